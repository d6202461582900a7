// Into the computation and out of it: normalisation, element types and orientation, and the one
// elementwise kernel in between. Free of torch, like products.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace megatron_ext {

enum class ElementType { kFloat16, kBFloat16, kFloat32, kFloat64 };

// A matrix seen with its short side first, whatever lies in memory: element (r, c) is
// data[r * row_stride + c * column_stride]. A tall matrix has its strides swapped.
struct WideMatrix {
  void* data;
  int64_t row_stride;
  int64_t column_stride;
};

// `count` matrices of one element type and shape. The array is on the host; launches carry it as
// kernel parameters.
struct WideMatrices {
  const WideMatrix* matrices;
  int count;
  ElementType type;
  int rows;
  int columns;
};

// Row-major copies to compute with: of fp16 for the two half-precision types, otherwise of the
// matrices' own type. Row r of item i starts at element i * batch_stride + r * ld.
struct WorkingCopies {
  void* data;
  int64_t ld;
  int64_t batch_stride;
};

// copies = scale * x / ||x||_F for every matrix x. The norm is a sum in fp64, in an order that
// depends on the shape alone: x and its transpose, any strides and any batch give the same bits,
// and so does x times a power of two. Zero gives zero; NaN or infinity anywhere in x makes its own
// copy NaN everywhere, and no other. `scratch` holds normalize_scratch(x) doubles.
cudaError_t normalize(const WideMatrices& x, double scale, const WorkingCopies& copies,
                      double* scratch, cudaStream_t stream);
int64_t normalize_scratch(const WideMatrices& x);

// out = scale * copies, for a power of two.
cudaError_t restore(const WorkingCopies& copies, double scale, const WideMatrices& out,
                    cudaStream_t stream);

// Adds to the diagonals of `count` square matrices of this size.
cudaError_t add_to_diagonal(const WorkingCopies& copies, int count, ElementType type, int size,
                            double value, cudaStream_t stream);

}  // namespace megatron_ext

// Batched matrix products in fp16 with fp32 accumulation, what Newton-Schulz on a GPU is made of.
// Free of torch: nvcc takes minutes for its headers. Nothing here waits for the device or
// allocates, so that every launch can be captured in a CUDA graph.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace megatron_ext {

// A batch of row-major matrices: row r of item i starts at data + i * batch_stride + r * ld.
// data is 128-byte aligned, ld and batch_stride are multiples of 64 (128 bytes, what TMA likes).
struct Matrices {
  __half* data;
  int64_t ld;
  int64_t batch_stride;
};

// d = alpha * (a b) + beta * c for every item of a batch; c is not read if beta is 0. d may be c,
// never a or b. Rows and columns beyond the sizes, up to ld, are neither read as values nor needed
// to be zero; they may be overwritten by anything finite.
struct Product {
  int batch;
  int rows;     // of d
  int columns;  // of d
  int depth;    // the dimension summed over
  float alpha;
  float beta;
  Matrices a;  // (rows, depth)
  Matrices b;  // symmetric product: (columns, depth), given transposed; general: (depth, columns)
  Matrices c;  // (rows, columns)
  Matrices d;  // (rows, columns)
};

// A launch holds its products by value: kernel parameters, so that nothing is copied to the device.
constexpr int kMaxProducts = 24;

// d = alpha a b' + beta c where a b' and c are symmetric (rows == columns): tiles on and below the
// diagonal are computed, those above are their mirror images. Differently shaped products of one
// launch share the GPU: one persistent grid works through the tiles of all of them. d may be c:
// what lies above the diagonal of c is not read.
cudaError_t symmetric_products(const Product* products, int count, cudaStream_t stream);

// d = alpha a b + beta c, all tiles.
cudaError_t general_products(const Product* products, int count, cudaStream_t stream);

}  // namespace megatron_ext

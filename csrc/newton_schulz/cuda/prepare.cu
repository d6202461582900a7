#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "intrinsics.cuh"
#include "prepare.h"

namespace megatron_ext {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = 64;          // of kTile x kTile elements, what a block works on
constexpr int kMaxMatrices = 128;  // of one launch, so that they fit into 4 KB of parameters

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

int tiles_of(const WideMatrices& x) { return ceil_div(x.rows, kTile) * ceil_div(x.columns, kTile); }

// --- element types
// --------------------------------------------------------------------------------

// What represents an element exactly, and what is computed with.
template <typename Element>
using Exact = std::conditional_t<std::is_same_v<Element, double>, double, float>;
template <typename Element>
using Working = std::conditional_t<std::is_same_v<Element, __nv_bfloat16>, __half, Element>;

__device__ inline float widen(__half value) { return __half2float(value); }
__device__ inline float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline float widen(float value) { return value; }
__device__ inline double widen(double value) { return value; }

template <typename Element>
__device__ inline Element narrow(double value) {
  if constexpr (std::is_same_v<Element, __half>) {
    return __float2half_rn(static_cast<float>(value));
  } else if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    return __float2bfloat16_rn(static_cast<float>(value));
  } else {
    return static_cast<Element>(value);
  }
}

// Calls function(Element()) for the element type.
template <typename Function>
cudaError_t dispatch(ElementType type, Function function) {
  switch (type) {
    case ElementType::kFloat16:
      return function(__half());
    case ElementType::kBFloat16:
      return function(__nv_bfloat16());
    case ElementType::kFloat32:
      return function(float());
    case ElementType::kFloat64:
      return function(double());
  }
  return cudaErrorInvalidValue;
}

// --- kernels
// --------------------------------------------------------------------------------------

// blockIdx.y counts the matrices, blockIdx.x the tiles of one.
template <typename Element>
struct Parameters {
  WideMatrix matrices[kMaxMatrices];
  int rows;
  int columns;
  Working<Element>* copies;
  int64_t ld;
  int64_t batch_stride;
  double scale;
  double* partial_sums;  // of squares, a tile each
  double* factors;       // scale / norm, a matrix each
};

// Calls visit(row, column) for all elements of a tile, threads side by side along a row or column.
template <typename Visitor>
__device__ void for_each_element(bool along_rows, Visitor visit) {
#pragma unroll 8
  for (int i = threadIdx.x; i < kTile * kTile; i += kThreads) {
    const int slow = i / kTile;
    const int fast = i % kTile;
    along_rows ? visit(slow, fast) : visit(fast, slow);
  }
}

__device__ inline bool contiguous_along_rows(const WideMatrix& matrix) {
  return matrix.column_stride <= matrix.row_stride;
}

template <typename Element>
struct TileOf {
  int first_row;
  int first_column;

  __device__ explicit TileOf(const Parameters<Element>& p) {
    const int tile_columns = ceil_div(p.columns, kTile);
    first_row = static_cast<int>(blockIdx.x) / tile_columns * kTile;
    first_column = static_cast<int>(blockIdx.x) % tile_columns * kTile;
  }
};

// An odd row length: threads along a column meet different banks.
template <typename Element>
using SharedTile = Exact<Element>[kTile][kTile + 1];

template <typename Element>
__device__ void load_tile(const Parameters<Element>& p, TileOf<Element> tile,
                          SharedTile<Element>& elements) {
  const WideMatrix& matrix = p.matrices[blockIdx.y];
  for_each_element(contiguous_along_rows(matrix), [&](int r, int c) {
    const int64_t row = tile.first_row + r;
    const int64_t column = tile.first_column + c;
    elements[r][c] =
        row < p.rows && column < p.columns
            ? widen(static_cast<const Element*>(
                  matrix.data)[row * matrix.row_stride + column * matrix.column_stride])
            : Exact<Element>(0);
  });
  __syncthreads();
}

// The sum of all threads' values, in a fixed order, for thread 0.
__device__ inline double sum_of_block(double value) {
  __shared__ double sums[kThreads];
  sums[threadIdx.x] = value;
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  return sums[0];
}

template <typename Element>
__global__ void __launch_bounds__(kThreads)
    sum_squares(const __grid_constant__ Parameters<Element> p) {
  __shared__ SharedTile<Element> elements;
  load_tile(p, TileOf<Element>(p), elements);
  double sum = 0;
  for_each_element(/*along_rows=*/true, [&](int r, int c) {
    const double element = elements[r][c];
    sum += element * element;
  });
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) p.partial_sums[int64_t{blockIdx.y} * gridDim.x + blockIdx.x] = sum;
}

template <typename Element>
__global__ void __launch_bounds__(kThreads)
    compute_factors(const __grid_constant__ Parameters<Element> p) {
  const int tiles = ceil_div(p.rows, kTile) * ceil_div(p.columns, kTile);
  const double* partial_sums = p.partial_sums + int64_t{blockIdx.y} * tiles;
  double sum = 0;
  for (int i = threadIdx.x; i < tiles; i += kThreads) sum += partial_sums[i];
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) {
    const double norm = sqrt(sum);
    // NaN fails the comparison.
    p.factors[blockIdx.y] = norm == 0 ? 0.0 : norm < INFINITY ? p.scale / norm : double{NAN};
  }
}

template <typename Element>
__global__ void __launch_bounds__(kThreads)
    write_copies(const __grid_constant__ Parameters<Element> p) {
  __shared__ SharedTile<Element> elements;
  const TileOf<Element> tile(p);
  load_tile(p, tile, elements);
  const double factor = p.factors[blockIdx.y];
  Working<Element>* copy = p.copies + blockIdx.y * p.batch_stride;
  for_each_element(/*along_rows=*/true, [&](int r, int c) {
    const int64_t row = tile.first_row + r;
    const int column = tile.first_column + c;
    if (row < p.rows && column < p.columns) {
      copy[row * p.ld + column] = narrow<Working<Element>>(factor * elements[r][c]);
    }
  });
}

template <typename Element>
__global__ void __launch_bounds__(kThreads)
    write_results(const __grid_constant__ Parameters<Element> p) {
  __shared__ SharedTile<Element> elements;
  const TileOf<Element> tile(p);
  const Working<Element>* copy = p.copies + blockIdx.y * p.batch_stride;
  for_each_element(/*along_rows=*/true, [&](int r, int c) {
    const int64_t row = tile.first_row + r;
    const int column = tile.first_column + c;
    if (row < p.rows && column < p.columns) elements[r][c] = widen(copy[row * p.ld + column]);
  });
  __syncthreads();
  const WideMatrix& matrix = p.matrices[blockIdx.y];
  for_each_element(contiguous_along_rows(matrix), [&](int r, int c) {
    const int64_t row = tile.first_row + r;
    const int64_t column = tile.first_column + c;
    if (row < p.rows && column < p.columns) {
      static_cast<Element*>(matrix.data)[row * matrix.row_stride + column * matrix.column_stride] =
          narrow<Element>(p.scale * elements[r][c]);
    }
  });
}

template <typename Element>
struct DiagonalParameters {
  Element* data;
  int64_t ld;
  int64_t batch_stride;
  int size;
  double value;
};

template <typename Element>
__global__ void __launch_bounds__(kThreads)
    add_to_diagonals(const __grid_constant__ DiagonalParameters<Element> p) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= p.size) return;
  Element& element = p.data[blockIdx.y * p.batch_stride + i * (p.ld + 1)];
  element = narrow<Element>(widen(element) + p.value);
}

// --- launches
// -------------------------------------------------------------------------------------

// Calls run(parameters, grid) for chunks of the matrices that fit into kernel parameters.
template <typename Element, typename Run>
cudaError_t for_each_chunk(const WideMatrices& x, const WorkingCopies& copies, double scale,
                           Run run) {
  if (x.rows == 0 || x.columns == 0) return cudaSuccess;
  Parameters<Element> p = {};
  static_assert(sizeof(p) <= 4096, "kernel parameters");
  p.rows = x.rows;
  p.columns = x.columns;
  p.ld = copies.ld;
  p.batch_stride = copies.batch_stride;
  p.scale = scale;
  for (int first = 0; first < x.count; first += kMaxMatrices) {
    const int count = std::min(kMaxMatrices, x.count - first);
    std::copy_n(x.matrices + first, count, p.matrices);
    p.copies = static_cast<Working<Element>*>(copies.data) + first * copies.batch_stride;
    if (const cudaError_t error = run(p, dim3(tiles_of(x), count))) return error;
  }
  return cudaSuccess;
}

}  // namespace

int64_t normalize_scratch(const WideMatrices& x) {
  return int64_t{std::min(x.count, kMaxMatrices)} * (tiles_of(x) + 1);
}

cudaError_t normalize(const WideMatrices& x, double scale, const WorkingCopies& copies,
                      double* scratch, cudaStream_t stream) {
  return dispatch(x.type, [&](auto element) {
    using Element = decltype(element);
    return for_each_chunk<Element>(
        x, copies, scale, [&](Parameters<Element>& p, dim3 tiles) -> cudaError_t {
          p.factors = scratch;
          p.partial_sums = scratch + tiles.y;
          if (const cudaError_t error =
                  launch(sum_squares<Element>, tiles, kThreads, 0, stream, p)) {
            return error;
          }
          if (const cudaError_t error =
                  launch(compute_factors<Element>, dim3(1, tiles.y), kThreads, 0, stream, p)) {
            return error;
          }
          return launch(write_copies<Element>, tiles, kThreads, 0, stream, p);
        });
  });
}

cudaError_t restore(const WorkingCopies& copies, double scale, const WideMatrices& out,
                    cudaStream_t stream) {
  return dispatch(out.type, [&](auto element) {
    using Element = decltype(element);
    return for_each_chunk<Element>(
        out, copies, scale, [&](const Parameters<Element>& p, dim3 tiles) {
          return launch(write_results<Element>, tiles, kThreads, 0, stream, p);
        });
  });
}

cudaError_t add_to_diagonal(const WorkingCopies& copies, int count, ElementType type, int size,
                            double value, cudaStream_t stream) {
  if (count == 0 || size == 0) return cudaSuccess;
  return dispatch(type, [&](auto element) {
    using Element = Working<decltype(element)>;
    constexpr int kMaxGrid = 65535;
    DiagonalParameters<Element> p = {nullptr, copies.ld, copies.batch_stride, size, value};
    for (int first = 0; first < count; first += kMaxGrid) {
      p.data = static_cast<Element*>(copies.data) + first * copies.batch_stride;
      const dim3 grid(ceil_div(size, kThreads), std::min(kMaxGrid, count - first));
      if (const cudaError_t error =
              launch(add_to_diagonals<Element>, grid, kThreads, 0, stream, p)) {
        return error;
      }
    }
    return cudaSuccess;
  });
}

}  // namespace megatron_ext

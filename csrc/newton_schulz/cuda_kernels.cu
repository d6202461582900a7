#include <algorithm>

#include "cuda_kernels.h"

namespace megatron_ext {
namespace {

constexpr int kThreads = 256;
// Enough to fill any GPU many times over; the grid-stride loops take the rest.
constexpr int64_t kMaxBlocks = 16384;

unsigned blocks_for(int64_t count) {
  return static_cast<unsigned>(std::min((count + kThreads - 1) / kThreads, kMaxBlocks));
}

__device__ int64_t first_index() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

__device__ int64_t index_stride() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

__global__ void normalize(float* values, int64_t count, const double* norm) {
  const double divisor = *norm;
  for (int64_t i = first_index(); i < count; i += index_stride()) {
    values[i] = divisor == 0 ? 0.0f : static_cast<float>(values[i] / divisor);
  }
}

__global__ void polynomial(const float* gram, float* square, int64_t n, float a, float b, float c) {
  for (int64_t i = first_index(); i < n * n; i += index_stride()) {
    const float diagonal = i % (n + 1) == 0 ? a : 0.0f;
    square[i] = diagonal + b * gram[i] + c * square[i];
  }
}

}  // namespace

cudaError_t launch_normalize(float* values, int64_t count, const double* norm,
                             cudaStream_t stream) {
  normalize<<<blocks_for(count), kThreads, 0, stream>>>(values, count, norm);
  return cudaGetLastError();
}

cudaError_t launch_polynomial(const float* gram, float* square, int64_t n, float a, float b,
                              float c, cudaStream_t stream) {
  polynomial<<<blocks_for(n * n), kThreads, 0, stream>>>(gram, square, n, a, b, c);
  return cudaGetLastError();
}

}  // namespace megatron_ext

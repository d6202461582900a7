// Launchers of the kernels in cuda_kernels.cu, free of torch: nvcc takes minutes for its headers.
// All pointers are device pointers to contiguous data; the launch error, if any, is returned.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace megatron_ext {

// values[i] /= *norm for count > 0 values; all zero if the norm is.
cudaError_t launch_normalize(float* values, int64_t count, const double* norm, cudaStream_t stream);

// square = a I + b gram + c square for two n x n matrices, n > 0.
cudaError_t launch_polynomial(const float* gram, float* square, int64_t n, float a, float b,
                              float c, cudaStream_t stream);

}  // namespace megatron_ext

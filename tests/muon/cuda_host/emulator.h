// Runs the CUDA kernels on the CPU, for tests of their indices, edges, barriers and schedule: every
// thread of a block is a fiber, barriers and warp-wide instructions are where fibers meet. Blocks
// run one after the other. Included by intrinsics.cuh in place of the PTX; the instructions do what
// the PTX ISA says of them, and know nothing of the kernels.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>
#include <functional>

#undef __shared__
#define __shared__ static  // one for all threads of the block that runs
#undef __launch_bounds__
#define __launch_bounds__(...)

namespace megatron_ext::emulator {

struct Options {
  int sm_count = 3;  // few, so that each block works on many tiles
  // When asynchronous copies arrive: at once, or not before they are waited for. The first shows
  // stages that are overwritten too early, the second those that are read too early.
  bool copies_arrive_at_once = false;
  bool descending = false;  // the order in which threads run between barriers
};
extern Options options;

void run_grid(dim3 grid, int threads, int shared_bytes, const std::function<void()>& thread);
void wait_for_copies(int pending);

}  // namespace megatron_ext::emulator

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

void __syncthreads();
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a < b ? b : a; }

namespace megatron_ext {

template <typename Parameters>
cudaError_t launch(void (*kernel)(Parameters), dim3 grid, int threads, int shared_bytes,
                   cudaStream_t, Parameters parameters) {
  emulator::run_grid(grid, threads, shared_bytes, [&] { kernel(parameters); });
  return cudaSuccess;
}

uint8_t* dynamic_shared_memory();

void copy_async(void* shared, const void* global, int bytes);
void commit_copies();
template <int kPending>
void wait_for_copies() {
  emulator::wait_for_copies(kPending);
}

void load_matrices(uint32_t (&fragments)[4], const void* shared_row);
void load_matrices_transposed(uint32_t (&fragments)[4], const void* shared_row);
void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

}  // namespace megatron_ext

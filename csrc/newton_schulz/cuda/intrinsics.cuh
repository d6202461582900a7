// The few instructions that the kernels take from PTX, and their launch. Nothing else in the
// kernels needs a GPU: with MEGATRON_EXT_EMULATED_CUDA a plain C++ compiler takes them from the
// emulator of the tests.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#ifdef MEGATRON_EXT_EMULATED_CUDA
#include "emulator.h"
#else

namespace megatron_ext {

template <typename Parameters>
cudaError_t launch(void (*kernel)(Parameters), dim3 grid, int threads, int shared_bytes,
                   cudaStream_t stream, Parameters parameters) {
  void* arguments[] = {&parameters};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, dim3(threads), arguments,
                          shared_bytes, stream);
}

__device__ inline uint8_t* dynamic_shared_memory() {
  extern __shared__ __align__(128) uint8_t shared_memory[];
  return shared_memory;
}

__device__ inline uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Copies the first `bytes` of 16 bytes and fills the rest with zeros; both sides are aligned to 16.
// Past L1, as every tile is read once by a block.
__device__ inline void copy_async(void* shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(__cvta_generic_to_global(global)), "r"(bytes)
               : "memory");
}

__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the latest kPending commits of this thread have arrived.
template <int kPending>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8x8 matrices; lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void load_matrices(uint32_t (&fragments)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]), "=r"(fragments[3])
               : "r"(shared_address(shared_row))
               : "memory");
}

__device__ inline void load_matrices_transposed(uint32_t (&fragments)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]), "=r"(fragments[3])
               : "r"(shared_address(shared_row))
               : "memory");
}

// d (16x8, fp32) += a (16x16) b (16x8), both fp16.
__device__ inline void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace megatron_ext

#endif

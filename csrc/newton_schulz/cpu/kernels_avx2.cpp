#include <algorithm>
#include <cstdint>
#include <utility>

#include "kernels.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

#define MEGATRON_EXT_INSTRUCTION_SET "AVX2"
#define MEGATRON_EXT_VECTOR_BYTES 32
#define MEGATRON_EXT_VECTOR_REGISTERS 16

namespace megatron_ext::cpu {
namespace {
#include "kernels.inc"
}  // namespace

template <>
const Kernels<float>& avx2_kernels<float>() {
  return kKernels<float>;
}
template <>
const Kernels<double>& avx2_kernels<double>() {
  return kKernels<double>;
}

}  // namespace megatron_ext::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif  // defined(__x86_64__)

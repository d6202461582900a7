#include <algorithm>
#include <cstdint>
#include <utility>

#include "kernels.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(                                                                  \
    __attribute__((target("avx512f,avx512vl,avx512dq,avx512bw,fma,prefer-vector-width=512"))), \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512vl,avx512dq,avx512bw,fma,prefer-vector-width=512")
#endif

#define MEGATRON_EXT_INSTRUCTION_SET "AVX-512"
#define MEGATRON_EXT_VECTOR_BYTES 64
#define MEGATRON_EXT_VECTOR_REGISTERS 32

namespace megatron_ext::cpu {
namespace {
#include "kernels.inc"
}  // namespace

template <>
const Kernels<float>& avx512_kernels<float>() {
  return kKernels<float>;
}
template <>
const Kernels<double>& avx512_kernels<double>() {
  return kKernels<double>;
}

}  // namespace megatron_ext::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif  // defined(__x86_64__)

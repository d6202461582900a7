#include <algorithm>
#include <cstdint>
#include <utility>

#include "kernels.h"

#define MEGATRON_EXT_INSTRUCTION_SET "portable"
#define MEGATRON_EXT_VECTOR_BYTES 16
#define MEGATRON_EXT_VECTOR_REGISTERS 16

namespace megatron_ext::cpu {
namespace {
#include "kernels.inc"
}  // namespace

template <>
const Kernels<float>& portable_kernels<float>() {
  return kKernels<float>;
}
template <>
const Kernels<double>& portable_kernels<double>() {
  return kKernels<double>;
}

}  // namespace megatron_ext::cpu

#include "kernels.h"

#include <ATen/Version.h>

#include <string>

namespace megatron_ext::cpu {

template <class T>
const Kernels<T>& kernels() {
  static const Kernels<T>& best = []() -> const Kernels<T>& {
#if defined(__x86_64__)
    const std::string capability = at::get_cpu_capability();
    if (capability == "AVX512") return avx512_kernels<T>();
    if (capability == "AVX2") return avx2_kernels<T>();
#endif
    return portable_kernels<T>();
  }();
  return best;
}

template const Kernels<float>& kernels<float>();
template const Kernels<double>& kernels<double>();

}  // namespace megatron_ext::cpu

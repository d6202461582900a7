#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
// c10/cuda only: ATen/cuda would ask for the cuBLAS headers, which a toolkit may lack.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <optional>
#include <utility>

#include "cuda_kernels.h"
#include "newton_schulz.h"

namespace megatron_ext {

at::Tensor newton_schulz_cuda(const at::Tensor& matrix, const std::vector<Coefficients>& steps) {
  check_arguments(matrix, steps, at::kCUDA);
  if (matrix.numel() == 0) return at::zeros(matrix.sizes(), matrix.options());
  const at::NoGradGuard no_grad;
  const c10::cuda::CUDAGuard device_guard(matrix.device());
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();

  at::Tensor x = wide_copy(matrix);
  // In fp64 for the reasons given in cpu.cpp; it stays on the device, so the host need not wait.
  const at::Tensor norm =
      at::linalg_vector_norm(x, /*ord=*/2, /*dim=*/std::nullopt, /*keepdim=*/false, at::kDouble);
  C10_CUDA_CHECK(launch_normalize(x.mutable_data_ptr<float>(), x.numel(),
                                  norm.const_data_ptr<double>(), stream));

  at::Tensor next = at::empty_like(x);
  at::Tensor gram = at::empty({x.size(0), x.size(0)}, x.options());
  at::Tensor polynomial = at::empty_like(gram);
  for (const auto& [a, b, c] : steps) {
    at::mm_out(gram, x, x.t());
    at::mm_out(polynomial, gram, gram);
    C10_CUDA_CHECK(launch_polynomial(
        gram.const_data_ptr<float>(), polynomial.mutable_data_ptr<float>(), gram.size(0),
        static_cast<float>(a), static_cast<float>(b), static_cast<float>(c), stream));
    at::mm_out(next, polynomial, x);
    std::swap(x, next);
  }
  return is_tall(matrix) ? x.t().contiguous() : x;
}

}  // namespace megatron_ext

#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <utility>

#include "newton_schulz.h"

namespace megatron_ext {
namespace {

// Squares of fp32 numbers neither overflow nor underflow in fp64, and powers of two scale them
// exactly: no rescaling is needed first, and the norm is finite exactly if all entries are. One
// running sum, so that the bits do not depend on the number of threads.
double frobenius_norm(const float* values, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double value = values[i];
    sum += value * value;
  }
  return std::sqrt(sum);
}

}  // namespace

at::Tensor newton_schulz_cpu(const at::Tensor& matrix, const std::vector<Coefficients>& steps) {
  check_arguments(matrix, steps, at::kCPU);
  const at::NoGradGuard no_grad;

  at::Tensor x = wide_copy(matrix);
  float* values = x.mutable_data_ptr<float>();
  const double norm = frobenius_norm(values, x.numel());
  if (!std::isfinite(norm)) {
    throw std::invalid_argument("newton_schulz: the matrix has NaN or infinite entries");
  }
  if (norm == 0) return at::zeros(matrix.sizes(), matrix.options());
  for (int64_t i = 0; i < x.numel(); ++i) values[i] = static_cast<float>(values[i] / norm);

  at::Tensor next = at::empty_like(x);
  at::Tensor gram = at::empty({x.size(0), x.size(0)}, x.options());
  at::Tensor polynomial = at::empty_like(gram);
  for (const auto& [a, b, c] : steps) {
    at::mm_out(gram, x, x.t());
    at::addmm_out(polynomial, gram, gram, gram, /*beta=*/b, /*alpha=*/c);
    at::addmm_out(next, x, polynomial, x, /*beta=*/a);
    std::swap(x, next);
  }
  return is_tall(matrix) ? x.t().contiguous() : x;
}

}  // namespace megatron_ext

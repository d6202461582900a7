// Newton-Schulz orthogonalisation of one matrix M (m x n), Keller Jordan's Muon iteration
// (arXiv 2502.16982, Algorithm 1):
//
//   X_0 = M / ||M||_F,   X <- a X + (b A + c A^2) X,   A = X X'
//
// Shared by the CPU and the CUDA module.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <vector>

namespace megatron_ext {

// (a, b, c) of one step.
using Coefficients = std::array<double, 3>;

// Both take a strided fp32 matrix of any strides, possibly empty, and return a new contiguous
// matrix of the same shape without a gradient; the input is not modified. `steps` holds one triple
// a step. A zero matrix gives zero. For k with finite 2^k M, f(2^k M) = f(M) bit by bit.

// Throws std::invalid_argument if an entry is NaN or infinite.
at::Tensor newton_schulz_cpu(const at::Tensor& matrix, const std::vector<Coefficients>& steps);

// Runs on the current stream without waiting for it, so non-finite entries are not reported: they
// make the whole result NaN.
at::Tensor newton_schulz_cuda(const at::Tensor& matrix, const std::vector<Coefficients>& steps);

inline void check_arguments(const at::Tensor& matrix, const std::vector<Coefficients>& steps,
                            at::DeviceType device) {
  TORCH_CHECK(matrix.device().type() == device, "newton_schulz: expected a ", device,
              " tensor, got one on ", matrix.device());
  TORCH_CHECK(matrix.scalar_type() == at::kFloat, "newton_schulz: expected float32, got ",
              matrix.scalar_type());
  TORCH_CHECK(matrix.dim() == 2, "newton_schulz: expected 2 dimensions, got ", matrix.dim());
  TORCH_CHECK(!steps.empty(), "newton_schulz: expected at least one step");
}

// The Gram matrix A is cheapest over the short side.
inline bool is_tall(const at::Tensor& matrix) { return matrix.size(0) > matrix.size(1); }

// A contiguous copy with the short side first. M and M' of any strides become the same bytes, so
// all that follows gives the same bits for them.
inline at::Tensor wide_copy(const at::Tensor& matrix) {
  const auto [shorter, longer] = std::minmax({matrix.size(0), matrix.size(1)});
  return at::empty({shorter, longer}, matrix.options())
      .copy_(is_tall(matrix) ? matrix.t() : matrix);
}

}  // namespace megatron_ext

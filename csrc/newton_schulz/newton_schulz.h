// Newton-Schulz orthogonalisation of batches of matrices, the operator megatron_ext::newton_schulz.
//
//   X_0 = M / ||M||_F,   X <- a X + (b A + c A^2) X,   A = X X'
//
// (Keller Jordan's Muon; arXiv 2502.16982, Algorithm 1.) Gram form: the steps are cut into
// segments. Within one, only n x n matrices are computed, n being the short side:
//
//   R = X X', Q = I;  each step:  Y = b R + c R^2,  Q <- a Q + Q Y,  R <- R (a I + Y)^2
//
// and X <- Q X at its end. All of them are polynomials of R, hence symmetric, and each product is
// computed once for both triangles. A new segment (a restart) computes R anew: within a segment,
// rounding errors in directions where X is zero grow by a^2 a step, in X they cannot arise.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace megatron_ext {

// x[i] and out[i] have the same shape (..., m, n), possibly empty, and all the same floating-point
// dtype; x of any strides, out contiguous and apart from x. `coefficients` holds (a, b, c) for
// every step, `segments` how many steps each segment has, `square_segments` the same for squares.
// `workspace`, if given, is contiguous, uint8 and has at least the size of
// newton_schulz_workspace_cpu/cuda's. A matrix with a NaN or infinite entry gives all NaN; if
// raise_nonfinite, c10::ValueError then names these matrices.
void newton_schulz_cpu(at::TensorList x, at::TensorList out,
                       const std::optional<at::Tensor>& workspace,
                       c10::ArrayRef<double> coefficients, at::IntArrayRef segments,
                       at::IntArrayRef square_segments, bool raise_nonfinite);

// A workspace for x and the present number of threads; it does not depend on the segments.
at::Tensor newton_schulz_workspace_cpu(const std::vector<at::Tensor>& x,
                                       const std::vector<int64_t>& segments,
                                       const std::vector<int64_t>& square_segments);

}  // namespace megatron_ext

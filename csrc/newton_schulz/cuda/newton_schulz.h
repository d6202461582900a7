// Newton-Schulz orthogonalisation on a GPU, for lists of batches of matrices.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace megatron_ext {

// out[i] = the polynomial of x[i] / ||x[i]||_F, for every matrix of x[i] with shape (..., m, n).
//
// x[i] has any strides, out[i] is contiguous, with the shape, dtype and device of x[i]; it may be
// x[i]. All tensors are on one CUDA device. fp16 and bf16 are computed in fp16 with fp32
// accumulation, fp32 and fp64 in themselves, with cuBLAS. Matrices of one shape, tall or wide, are
// one batch.
//
// coefficients: (a, b, c) of each step. segments: steps of each segment of the Gram form (gram.h);
// their number less one is the number of restarts.
// workspace: contiguous uint8, of at least newton_schulz_workspace_cuda bytes, 128-byte aligned;
// allocated if absent.
//
// Runs on the current stream without waiting for it, so that it can be captured in a CUDA graph. A
// matrix with NaN or infinity gives NaN everywhere, and no other does; a zero matrix gives zero.
// Throws c10::Error for invalid arguments, std::invalid_argument as make_schedule does.
void newton_schulz_cuda(at::TensorList x, at::TensorList out,
                        const std::optional<at::Tensor>& workspace,
                        at::ArrayRef<double> coefficients, at::IntArrayRef segments);

// Bytes of workspace for tensors of these shapes, dtypes.
int64_t newton_schulz_workspace_cuda(at::TensorList x, at::IntArrayRef segments);

}  // namespace megatron_ext

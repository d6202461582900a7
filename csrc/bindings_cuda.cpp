// The module megatron_ext._C_cuda, apart from _C because it needs libtorch_cuda, which a CPU build
// of torch does not have; _C defines the operator. No maths here.
#include <ATen/ops/empty.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <sstream>
#include <vector>

#include "newton_schulz/cuda/newton_schulz.h"

namespace {

using Tensors = std::vector<at::Tensor>;

// Indices of the squares in x, and of the others.
std::array<std::vector<size_t>, 2> split(at::TensorList x) {
  std::array<std::vector<size_t>, 2> indices;
  for (size_t i = 0; i < x.size(); ++i) indices[x[i].size(-2) != x[i].size(-1)].push_back(i);
  return indices;
}

Tensors choose(at::TensorList all, const std::vector<size_t>& indices) {
  Tensors chosen;
  for (const size_t i : indices) chosen.push_back(all[i]);
  return chosen;
}

void newton_schulz(at::TensorList x, at::TensorList out, const std::optional<at::Tensor>& workspace,
                   c10::ArrayRef<double> coefficients, at::IntArrayRef segments,
                   at::IntArrayRef square_segments, bool raise_nonfinite) {
  const auto [squares, others] = split(x);
  megatron_ext::newton_schulz_cuda(choose(x, squares), choose(out, squares), workspace,
                                   coefficients, square_segments);
  megatron_ext::newton_schulz_cuda(choose(x, others), choose(out, others), workspace, coefficients,
                                   segments);
  if (!raise_nonfinite) return;
  // A matrix with a non-finite entry is NaN everywhere now. This waits for the device.
  std::ostringstream names;
  for (size_t i = 0; i < x.size(); ++i) {
    if (x[i].numel() == 0) continue;
    const at::Tensor first = out[i].select(-1, 0).select(-1, 0).isnan().nonzero().cpu();
    for (int64_t row = 0; row < first.size(0); ++row) {
      names << (names.tellp() > 0 ? "; x" : " x");
      if (x.size() > 1) names << "[" << i << "]";
      for (int64_t dim = 0; dim < first.size(1); ++dim) {
        names << (dim == 0 ? ", matrix (" : ", ") << first[row][dim].item<int64_t>();
      }
      if (first.size(1) > 0) names << ")";
    }
  }
  TORCH_CHECK_VALUE(names.tellp() == 0, "newton_schulz: NaN or infinite entries in", names.str());
}

at::Tensor newton_schulz_workspace(const Tensors& x, const std::vector<int64_t>& segments,
                                   const std::vector<int64_t>& square_segments) {
  const auto [squares, others] = split(x);
  const int64_t bytes =
      std::max(megatron_ext::newton_schulz_workspace_cuda(choose(x, squares), square_segments),
               megatron_ext::newton_schulz_workspace_cuda(choose(x, others), segments));
  return at::empty({bytes}, x[0].options().dtype(at::kByte));
}

}  // namespace

TORCH_LIBRARY_IMPL(megatron_ext, CUDA, library) { library.impl("newton_schulz", &newton_schulz); }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("newton_schulz_workspace", &newton_schulz_workspace);
}

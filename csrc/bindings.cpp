// The module megatron_ext._C: what needs no CUDA. No maths here.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "newton_schulz/newton_schulz.h"

namespace py = pybind11;

TORCH_LIBRARY(megatron_ext, library) {
  library.def(
      "newton_schulz(Tensor[] x, Tensor(a!)[] out, Tensor(b!)? workspace, float[] coefficients, "
      "int[] segments, int[] square_segments, bool raise_nonfinite) -> ()");
}

TORCH_LIBRARY_IMPL(megatron_ext, CPU, library) {
  library.impl("newton_schulz", &megatron_ext::newton_schulz_cpu);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("newton_schulz_workspace", &megatron_ext::newton_schulz_workspace_cpu);
  // setup.py describes the build in JSON.
  m.def("build_info",
        [] { return py::module_::import("json").attr("loads")(MEGATRON_EXT_BUILD_INFO); });
}

// The module megatron_ext._C_cuda, apart from _C because it needs libtorch_cuda, which a CPU build
// of torch does not have. No maths here.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "newton_schulz/newton_schulz.h"

namespace py = pybind11;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("newton_schulz", &megatron_ext::newton_schulz_cuda, py::arg("matrix"), py::arg("steps"),
        py::call_guard<py::gil_scoped_release>());
}

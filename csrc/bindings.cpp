// The module megatron_ext._C: what needs no CUDA. No maths here.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "newton_schulz/newton_schulz.h"

namespace py = pybind11;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("newton_schulz", &megatron_ext::newton_schulz_cpu, py::arg("matrix"), py::arg("steps"),
        py::call_guard<py::gil_scoped_release>());
  // setup.py describes the build in JSON.
  m.def("build_info",
        [] { return py::module_::import("json").attr("loads")(MEGATRON_EXT_BUILD_INFO); });
}

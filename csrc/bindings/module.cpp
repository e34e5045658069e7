// The module cumem._core. cumem/_core.pyi is its documentation.
#include <pybind11/pybind11.h>

#include "../process.h"
#include "bind.h"

namespace py = pybind11;

PYBIND11_MODULE(_core, m) {
  m.attr("__version__") = CUMEM_VERSION;
  cumem::bind_drivers(m);
  cumem::bind_core(m);
  m.def("mark_exiting", &cumem::mark_exiting);
  m.def("immortalize", [](const py::object& thing) { (void)thing.inc_ref(); }, py::arg("thing"));
  m.def("is_forked_child", &cumem::is_forked_child);
  py::module_::import("atexit").attr("register")(m.attr("mark_exiting"));
}

// The parts of the module, one file each.
#pragma once

#include <pybind11/pybind11.h>

namespace cumem {

void bind_drivers(pybind11::module_& m);
void bind_core(pybind11::module_& m);

}  // namespace cumem

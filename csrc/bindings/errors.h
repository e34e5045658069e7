// Status -> the exceptions of cumem/errors.py. The only place that does that.
#pragma once

#include <pybind11/pybind11.h>

#include <utility>

#include "../status.h"
#include "../types.h"

namespace cumem {

// The exception object for a status that is not ok. Needs the GIL.
pybind11::object exception_of(const Status& status);

// Raises it if the status is not ok.
void check(const Status& status);

template <typename T>
T check(Result<T> result) {
  check(result.status());
  return std::move(result).value();
}

// Runs `work`, which throws nothing, without the GIL. Not by a guard object: while the interpreter ends, taking the GIL
// back unwinds a daemon thread's stack, which must not happen inside a destructor.
template <typename Work>
auto without_gil(Work work) {
  PyThreadState* const state = PyEval_SaveThread();
  auto result = work();
  PyEval_RestoreThread(state);
  return result;
}

}  // namespace cumem

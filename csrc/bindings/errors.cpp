#include "errors.h"

#include <string>

namespace py = pybind11;

namespace cumem {
namespace {

py::object error_class(const char* name) { return py::module_::import("cumem.errors").attr(name); }

std::string shown(std::uint64_t bytes) {
  if (bytes >= 10 * kMiB) return std::to_string(bytes / kMiB) + " MiB";
  return bytes >= 10 * kKiB ? std::to_string(bytes / kKiB) + " KiB" : std::to_string(bytes) + " bytes";
}

std::string memory_message(const Status& status, const char* what) {
  return std::string(what) + ": " + shown(status.needed_bytes()) + " needed, " + shown(status.free_bytes()) +
         " free (" + status.call() + ": " + status.message() + ")";
}

py::object driver_error(const Status& status) {
  const bool broken = status.code() == Code::kContextBroken;
  const std::string message =
      status.call() + " failed: " + status.message() +
      (broken
           ? "; the context of this process is lost: only backups in host memory can still be read, restart the process"
           : "");
  return error_class("DriverError")(message, py::arg("call") = status.call(), py::arg("code") = status.raw(),
                                    py::arg("context_broken") = broken);
}

py::object device_memory_error(const Status& status) {
  return error_class("OutOfDeviceMemory")(memory_message(status, "out of device memory"),
                                          py::arg("needed_bytes") = status.needed_bytes(),
                                          py::arg("free_bytes") = status.free_bytes());
}

py::object host_memory_error(const Status& status) {
  return error_class("OutOfHostMemory")(memory_message(status, "out of host memory"),
                                        py::arg("needed_bytes") = status.needed_bytes(),
                                        py::arg("free_bytes") = status.free_bytes());
}

py::object busy_error(const Status& status, const std::string& message) {
  const double timeout_s = status.timeout_s();
  return error_class("DeviceBusy")(message, py::arg("timeout_s") = timeout_s > 0 ? py::cast(timeout_s) : py::none());
}

}  // namespace

py::object exception_of(const Status& status) {
  const std::string message = status.call() + ": " + status.message();
  switch (status.code()) {
    case Code::kOutOfDeviceMemory: return device_memory_error(status);
    case Code::kOutOfHostMemory: return host_memory_error(status);
    case Code::kInvalidValue:
      // A driver's own refusal carries its number; without one the caller's argument was refused here.
      return status.raw() == 0 ? error_class("InvalidArgument")(message) : driver_error(status);
    case Code::kBusy: return busy_error(status, message);
    case Code::kUnsupported: return error_class("Unsupported")(message);
    case Code::kNotFound:
    case Code::kWrongState: return error_class("StateError")(message);
    case Code::kOk:
    case Code::kContextBroken:
    case Code::kShuttingDown:
    case Code::kDriver: break;
  }
  return driver_error(status);
}

void check(const Status& status) {
  if (status.ok()) return;
  const py::object error = exception_of(status);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw py::error_already_set();
}

}  // namespace cumem

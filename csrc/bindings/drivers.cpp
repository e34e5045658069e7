#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "../driver/cuda_driver.h"
#include "../driver/driver.h"
#include "../driver/faulty_driver.h"
#include "../driver/host_driver.h"
#include "bind.h"
#include "errors.h"

namespace py = pybind11;

namespace cumem {
namespace {

using DriverPtr = std::shared_ptr<Driver>;

Code code_from_name(const std::string& name) {
  for (int value = 0; value <= static_cast<int>(Code::kDriver); ++value) {
    const Code code = static_cast<Code>(value);
    if (code != Code::kOk && name == code_name(code)) return code;
  }
  check(Status(Code::kInvalidValue, "fail_at", "no error code is named '" + name + "'"));
  return Code::kOk;
}

void launch_fill(Driver& driver, std::uint64_t address, int byte, std::uint64_t size) {
  Driver* inner = &driver;
  while (auto* faulty = dynamic_cast<FaultyDriver*>(inner)) inner = faulty->inner().get();
  auto* host = dynamic_cast<HostDriver*>(inner);
  if (host == nullptr) check(Status(Code::kUnsupported, "launch_fill", "only the host driver queues work by itself"));
  check(host->launch_fill(DeviceAddress(address), static_cast<std::uint8_t>(byte), size));
}

DriverPtr make_cuda_driver() {
  return check(without_gil([] { return CudaDriver::create(); }));
}

DriverPtr make_host_driver(int device_count, std::uint64_t device_bytes, std::uint64_t granularity_bytes,
                           bool refuse_pinning) {
  return check(HostDriver::create({device_count, device_bytes, granularity_bytes, refuse_pinning}));
}

void bind_values(py::module_& m) {
  py::class_<DriverCounts>(m, "DriverCounts")
      .def_readonly("handles", &DriverCounts::handles)
      .def_readonly("ranges", &DriverCounts::ranges)
      .def_readonly("mappings", &DriverCounts::mappings)
      .def_readonly("registrations", &DriverCounts::registrations)
      .def_readonly("streams", &DriverCounts::streams)
      .def_readonly("events", &DriverCounts::events)
      .def_readonly("physical_bytes", &DriverCounts::physical_bytes);
  py::class_<DeviceProperties>(m, "DeviceProperties")
      .def_readonly("name", &DeviceProperties::name)
      .def_readonly("uuid", &DeviceProperties::uuid)
      .def_readonly("total_bytes", &DeviceProperties::total_bytes)
      .def_readonly("granularity_bytes", &DeviceProperties::granularity_bytes)
      .def_readonly("virtual_memory", &DeviceProperties::virtual_memory)
      .def_readonly("exportable", &DeviceProperties::exportable)
      .def_readonly("rdma", &DeviceProperties::rdma)
      .def_readonly("integrated", &DeviceProperties::integrated);
}

void bind_faulty_driver(py::module_& m) {
  py::class_<FaultyDriver, Driver, std::shared_ptr<FaultyDriver>>(m, "FaultyDriver")
      .def(py::init<DriverPtr>(), py::arg("inner"))
      .def_property_readonly("calls", &FaultyDriver::calls)
      .def_property_readonly("failed", &FaultyDriver::failed)
      .def("clear", &FaultyDriver::clear)
      .def(
          "fail_at",
          [](FaultyDriver& self, std::int64_t call, const std::string& code, std::int64_t times,
             std::optional<std::string> only) {
            check(self.fail_at(call, code_from_name(code), times, std::move(only)));
          },
          py::arg("call"), py::kw_only(), py::arg("code") = code_name(Code::kDriver), py::arg("times") = 1,
          py::arg("only") = py::none())
      .def(
          "hold", [](FaultyDriver& self, const std::string& call) { check(self.hold(call)); }, py::arg("call"))
      .def("release", &FaultyDriver::release_gate, py::arg("call"))
      .def(
          "wait_held",
          [](FaultyDriver& self, const std::string& call, double timeout_s) {
            return without_gil([&] { return self.wait_held(call, std::chrono::duration<double>(timeout_s)); });
          },
          py::arg("call"), py::arg("timeout_s"));
}

}  // namespace

void bind_drivers(py::module_& m) {
  bind_values(m);
  py::class_<Driver, DriverPtr>(m, "Driver")
      .def_property_readonly("name", &Driver::name)
      .def_property_readonly(
          "device_type", [](const Driver& self) { return self.memory_kind() == MemoryKind::kCuda ? "cuda" : "cpu"; })
      .def("counts", &Driver::counts)
      .def("device_count", &Driver::device_count)
      .def(
          "properties", [](Driver& self, int device) { return check(self.properties(Device{device})); },
          py::arg("device"))
      .def(
          "memory_info",
          [](Driver& self, int device) {
            const MemoryInfo info = check(without_gil([&] { return self.memory_info(Device{device}); }));
            return py::make_tuple(info.free_bytes, info.total_bytes);
          },
          py::arg("device"))
      .def(
          "can_access_peer",
          [](Driver& self, int source, int target) {
            return check(self.can_access_peer(Device{source}, Device{target}));
          },
          py::arg("source"), py::arg("target"))
      .def("is_capturing", &Driver::is_capturing, py::arg("stream"))
      .def("launch_fill", &launch_fill, py::arg("address"), py::arg("byte"), py::arg("size"));
  bind_faulty_driver(m);
  const HostDriverOptions defaults;
  m.def("cuda_driver", &make_cuda_driver);
  m.def("host_driver", &make_host_driver, py::arg("device_count") = defaults.device_count,
        py::arg("device_bytes") = defaults.device_bytes, py::arg("granularity_bytes") = defaults.granularity_bytes,
        py::arg("refuse_pinning") = defaults.refuse_pinning);
}

}  // namespace cumem

#include "../core.h"

#include <pybind11/operators.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../host_limits.h"
#include "../plan.h"
#include "../torch_shim.h"
#include "bind.h"
#include "dlpack.h"
#include "errors.h"

namespace py = pybind11;

namespace cumem {
namespace {

using CorePtr = std::shared_ptr<Core>;
using Ids = std::vector<std::uint64_t>;
using Extents = std::vector<Extent>;

using RunPairs = std::vector<std::pair<std::uint64_t, std::uint64_t>>;  // (offset, length)

std::vector<Run> runs_of(const RunPairs& pairs) {
  std::vector<Run> runs;
  runs.reserve(pairs.size());
  for (const auto& [offset, length] : pairs) runs.push_back({offset, length});
  return runs;
}

std::vector<SegmentId> segment_ids(const Ids& ids) {
  std::vector<SegmentId> strong;
  strong.reserve(ids.size());
  for (const std::uint64_t id : ids) strong.emplace_back(id);
  return strong;
}

std::vector<Device> devices_of(const std::vector<int>& ordinals) {
  std::vector<Device> devices;
  devices.reserve(ordinals.size());
  for (const int ordinal : ordinals) devices.push_back(Device{ordinal});
  return devices;
}

CorePtr make_core(std::shared_ptr<Driver> driver, std::optional<std::uint64_t> host_budget_bytes,
                  std::uint64_t margin_bytes, double device_timeout_s) {
  CoreOptions options;
  options.host_budget_bytes = host_budget_bytes;
  options.margin_bytes = margin_bytes;
  options.device_timeout = std::chrono::duration<double>(device_timeout_s);
  return std::make_shared<Core>(std::move(driver), options);
}

py::list outcome_list(const std::vector<Outcome>& outcomes) {
  py::list list;
  for (const Outcome& outcome : outcomes) list.append(outcome);
  return list;
}

// The memory of each buffer, checked against its extent.
std::vector<std::byte*> buffer_pointers(const Extents& extents, const std::vector<py::buffer>& buffers, bool writable,
                                        std::vector<py::buffer_info>& keep) {
  if (extents.size() != buffers.size()) {
    check(Status(Code::kInvalidValue, "copy",
                 std::to_string(extents.size()) + " extents but " + std::to_string(buffers.size()) + " buffers"));
  }
  std::vector<std::byte*> pointers;
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    keep.push_back(buffers[i].request(writable));
    const py::buffer_info& info = keep.back();
    const auto bytes = static_cast<std::uint64_t>(info.size * info.itemsize);
    if (PyBuffer_IsContiguous(info.view(), 'C') == 0 || bytes < extents[i].length) {
      check(Status(Code::kInvalidValue, "copy",
                   "a buffer of " + std::to_string(bytes) + " bytes (contiguous ones only) for an extent of " +
                       std::to_string(extents[i].length)));
    }
    pointers.push_back(static_cast<std::byte*>(info.ptr));
  }
  return pointers;
}

// Raises the error of a copy. What a copy may still use is leaked: better than memory that changes under its next
// owner.
void check_copy(const Status& status, bool in_flight, std::vector<py::buffer_info> keep) {
  if (in_flight) new std::vector<py::buffer_info>(std::move(keep));
  check(status);
}

void copy_to_host(Core& core, const Extents& extents, const std::vector<py::buffer>& buffers) {
  std::vector<py::buffer_info> keep;
  const auto pointers = buffer_pointers(extents, buffers, true, keep);
  bool in_flight = false;
  const Status status = without_gil([&] { return core.copy_to_host(extents, pointers, &in_flight); });
  check_copy(status, in_flight, std::move(keep));
}

void copy_to_device(Core& core, const Extents& extents, const std::vector<py::buffer>& buffers) {
  std::vector<py::buffer_info> keep;
  const auto pointers = buffer_pointers(extents, buffers, false, keep);
  bool in_flight = false;
  const Status status = without_gil([&] { return core.copy_to_device(extents, pointers, &in_flight); });
  check_copy(status, in_flight, std::move(keep));
}

void bind_values(py::module_& m) {
  py::class_<Extent>(m, "Extent")
      .def(py::init([](std::uint64_t segment, std::uint64_t offset, std::uint64_t length) {
             return Extent{SegmentId(segment), offset, length};
           }),
           py::arg("segment"), py::arg("offset"), py::arg("length"))
      .def_property_readonly("segment", [](const Extent& self) { return self.segment.value; })
      .def_readonly("offset", &Extent::offset)
      .def_readonly("length", &Extent::length)
      .def("__hash__",
           [](const Extent& self) { return py::hash(py::make_tuple(self.segment.value, self.offset, self.length)); })
      .def(py::self == py::self)
      .def(py::self < py::self)
      .def("__repr__", [](const Extent& self) {
        return "Extent(segment=" + std::to_string(self.segment.value) + ", offset=" + std::to_string(self.offset) +
               ", length=" + std::to_string(self.length) + ")";
      });
  py::class_<SegmentInfo>(m, "SegmentInfo")
      .def_property_readonly("id", [](const SegmentInfo& self) { return self.id.value; })
      .def_property_readonly("slot", [](const SegmentInfo& self) { return self.slot.value; })
      .def_property_readonly("address", [](const SegmentInfo& self) { return self.address.value; })
      .def_readonly("size", &SegmentInfo::size)
      .def_property_readonly("device", [](const SegmentInfo& self) { return self.device.ordinal; })
      .def_readonly("backing_bytes", &SegmentInfo::backing_bytes)
      .def_readonly("shareable", &SegmentInfo::shareable)
      .def_readonly("owned", &SegmentInfo::owned)
      .def_readonly("captured", &SegmentInfo::captured)
      .def_property_readonly("state", [](const SegmentInfo& self) { return state_name(self.state); })
      .def_property_readonly("mapped_bytes", &SegmentInfo::mapped_bytes)
      .def_readonly("live_bytes", &SegmentInfo::live_bytes);
  py::class_<Outcome>(m, "Outcome")
      .def_property_readonly("segment", [](const Outcome& self) { return self.segment.value; })
      .def_property_readonly("error", [](const Outcome& self) -> py::object {
        return self.status.ok() ? py::none() : exception_of(self.status);
      });
}

void bind_memory(py::class_<Core, CorePtr>& core) {
  core.def("create_slot", [](Core& self) { return self.create_slot().value; })
      .def(
          "malloc",
          [](Core& self, std::uint64_t slot, std::uint64_t size, int device, bool shareable) {
            return check(without_gil([&] { return self.malloc(SlotId(slot), size, Device{device}, shareable); })).value;
          },
          py::arg("slot"), py::arg("size"), py::arg("device"), py::arg("shareable") = false)
      .def(
          "free",
          [](Core& self, std::uint64_t address) {
            check(without_gil([&] { return self.free(DeviceAddress(address)); }));
          },
          py::arg("address"))
      .def(
          "capsule",
          [](Core& self, std::uint64_t address, std::uint64_t offset, std::uint64_t length) {
            return block_capsule(check(self.add_block(DeviceAddress(address), offset, length)),
                                 self.driver()->memory_kind());
          },
          py::arg("address"), py::arg("offset"), py::arg("length"))
      .def(
          "malloc_capsule",
          [](Core& self, std::uint64_t slot, std::uint64_t size, int device, bool shareable) {
            auto block =
                check(without_gil([&] { return self.malloc_block(SlotId(slot), size, Device{device}, shareable); }));
            return block_capsule(std::move(block), self.driver()->memory_kind());
          },
          py::arg("slot"), py::arg("size"), py::arg("device"), py::arg("shareable") = false)
      .def(
          "find", [](const Core& self, std::uint64_t address) { return self.find(DeviceAddress(address)); },
          py::arg("address"))
      .def(
          "segments",
          [](const Core& self, std::optional<std::uint64_t> slot) {
            return self.segments(slot ? std::optional<SlotId>(SlotId(*slot)) : std::nullopt);
          },
          py::arg("slot") = py::none())
      .def(
          "live_extents", [](const Core& self, const Ids& ids) { return self.live_extents(segment_ids(ids)); },
          py::arg("segments"))
      .def(
          "reap",
          [](Core& self, bool beside_capture) { return check(without_gil([&] { return self.reap(beside_capture); })); },
          py::kw_only(), py::arg("beside_capture") = false)
      .def_property_readonly("dead_bytes", &Core::dead_bytes);
}

void bind_transitions(py::class_<Core, CorePtr>& core) {
  core.def(
          "claim",
          [](Core& self, const Ids& ids) {
            Ids held;
            for (const SegmentId id : self.claim(segment_ids(ids))) held.push_back(id.value);
            return held;
          },
          py::arg("segments"))
      .def(
          "unclaim", [](Core& self, const Ids& ids) { self.unclaim(segment_ids(ids)); }, py::arg("segments"))
      .def(
          "wait_devices",
          [](Core& self, const std::vector<int>& devices, bool beside_capture) {
            check(without_gil([&] { return self.wait_devices(devices_of(devices), beside_capture); }));
          },
          py::arg("devices"), py::kw_only(), py::arg("beside_capture") = false)
      .def(
          "memory_info",
          [](Core& self, int device) {
            const MemoryInfo info = check(without_gil([&] { return self.memory_info(Device{device}); }));
            return py::make_tuple(info.free_bytes, info.total_bytes);
          },
          py::arg("device"))
      .def(
          "unmap",
          [](Core& self, const Ids& ids) {
            return outcome_list(without_gil([&] { return self.unmap(segment_ids(ids)); }));
          },
          py::arg("segments"))
      .def(
          "map",
          [](Core& self, const Ids& ids) {
            return outcome_list(without_gil([&] { return self.map(segment_ids(ids)); }));
          },
          py::arg("segments"))
      .def(
          "settle", [](Core& self, const Ids& ids) { self.settle(segment_ids(ids)); }, py::arg("segments"))
      .def(
          "set_backing",
          [](Core& self, std::uint64_t segment, const RunPairs& runs) {
            check(self.set_backing(SegmentId(segment), runs_of(runs)));
          },
          py::arg("segment"), py::arg("runs"))
      .def(
          "fill",
          [](Core& self, const Extents& extents, int byte) {
            check(without_gil([&] { return self.fill(extents, static_cast<std::uint8_t>(byte)); }));
          },
          py::arg("extents"), py::arg("byte"));
}

void bind_backups(py::class_<Core, CorePtr>& core) {
  core.def(
          "reserve_backup",
          [](Core& self, const Extents& extents) { check(without_gil([&] { return self.reserve_backup(extents); })); },
          py::arg("extents"))
      .def(
          "save", [](Core& self, const Extents& extents) { check(without_gil([&] { return self.save(extents); })); },
          py::arg("extents"))
      .def(
          "restore",
          [](Core& self, const Extents& extents) { check(without_gil([&] { return self.restore(extents); })); },
          py::arg("extents"))
      .def(
          "release_backup",
          [](Core& self, const Extents& extents, bool keep_memory) {
            without_gil([&] {
              self.release_backup(extents, keep_memory);
              return 0;
            });
          },
          py::arg("extents"), py::kw_only(), py::arg("keep_memory") = true)
      .def(
          "backup_bytes", [](const Core& self, std::uint64_t segment) { return self.backup_bytes(SegmentId(segment)); },
          py::arg("segment"))
      .def("trim_host", [](Core& self) { return check(without_gil([&] { return self.trim_host(); })); })
      .def(
          "host_view",
          [](const Core& self, std::uint64_t address, std::uint64_t length) {
            return host_capsule(check(self.host_view(DeviceAddress(address), length)), length);
          },
          py::arg("address"), py::arg("length"))
      .def("copy_to_host", &copy_to_host, py::arg("extents"), py::arg("buffers"))
      .def("copy_to_device", &copy_to_device, py::arg("extents"), py::arg("buffers"))
      .def_property_readonly("host_bytes", [](const Core& self) { return self.arena().bytes(); })
      .def_property_readonly("host_used_bytes", [](const Core& self) { return self.arena().used_bytes(); })
      .def_property_readonly("host_pageable_bytes", [](const Core& self) { return self.arena().pageable_bytes(); })
      .def_property_readonly("progress", [](const Core& self) {
        const Transfer::Progress progress = self.progress();
        return py::make_tuple(progress.done_bytes, progress.total_bytes);
      });
}

void bind_torch(py::module_& m) {
  m.def(
      "torch_entry",
      [](CorePtr core, std::uint64_t slot) { return check(add_torch_entry(std::move(core), SlotId(slot))); },
      py::arg("core"), py::arg("slot"));
  m.def(
      "torch_malloc_address", [](int entry) { return reinterpret_cast<std::uintptr_t>(torch_malloc(entry)); },
      py::arg("entry"));
  m.def("torch_free_address", [] { return reinterpret_cast<std::uintptr_t>(torch_free()); });
  m.def("check_torch_entry", [](int entry) { check(take_torch_error(entry)); }, py::arg("entry"));
  m.def(
      "live_runs",
      [](const RunPairs& blocks, std::uint64_t segment_size) {
        RunPairs pairs;
        for (const Run& run : live_runs(runs_of(blocks), segment_size)) pairs.emplace_back(run.offset, run.length);
        return pairs;
      },
      py::arg("blocks"), py::arg("segment_size"));
}

}  // namespace

void bind_core(py::module_& m) {
  bind_values(m);
  py::class_<Core, CorePtr> core(m, "Core");
  core.def(py::init(&make_core), py::arg("driver"), py::kw_only(), py::arg("host_budget_bytes") = py::none(),
           py::arg("margin_bytes") = 0, py::arg("device_timeout_s") = CoreOptions{}.device_timeout.count())
      .def_property_readonly("driver", [](const Core& self) { return self.driver(); })
      .def_property_readonly("broken",
                             [](const Core& self) -> std::optional<std::string> {
                               std::string why = self.broken();
                               if (why.empty()) return std::nullopt;
                               return why;
                             })
      .def("check_valid", [](const Core& self) {
        const std::string law = self.check_valid();
        if (!law.empty()) check(Status(Code::kWrongState, "check_valid", law));
      });
  bind_memory(core);
  bind_transitions(core);
  bind_backups(core);
  bind_torch(m);
  m.def(
      "host_headroom",
      [](bool system_too, const std::string& root) {
        const HostHeadroom room = host_headroom(system_too, root);
        return py::make_tuple(room.free_bytes, room.limit);
      },
      py::arg("system_too"), py::arg("root") = "");
}

}  // namespace cumem

// What tests over a core share: segments with contents, claims, the laws after each step.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core.h"
#include "driver_helpers.h"

namespace cumem::testing {

using Extents = std::vector<Extent>;
using Ids = std::vector<SegmentId>;
using CorePtr = std::shared_ptr<Core>;

inline CorePtr make_core(std::shared_ptr<Driver> driver, const CoreOptions& options = {}) {
  return std::make_shared<Core>(std::move(driver), options);
}

// The law that does not hold, "" if all do: counts of pages agree with what the segments say.
inline std::string broken_law(const Core& core) { return core.check_valid(); }

// What is left on the driver but for the lanes of copies and the slabs of backups.
inline bool gives_all_back(const Core& core) {
  const DriverCounts counts = core.driver()->counts();
  return counts.handles == 0 && counts.ranges == 0 && counts.mappings == 0 && counts.physical_bytes == 0;
}

// Claims segments until its end.
class Claim {
 public:
  Claim(Core& core, const Ids& ids) : core_(core), ids_(core.claim(ids)) { CHECK(ids_.size() == ids.size()); }
  Claim(const Claim&) = delete;
  ~Claim() { core_.unclaim(ids_); }
  [[nodiscard]] const Ids& ids() const { return ids_; }

 private:
  Core& core_;
  const Ids ids_;
};

inline Status put(Core& core, const Extents& extents, std::vector<Bytes>& contents) {
  std::vector<std::byte*> buffers;
  for (Bytes& bytes : contents) buffers.push_back(reinterpret_cast<std::byte*>(bytes.data()));
  return core.copy_to_device(extents, buffers);
}

inline Result<std::vector<Bytes>> get(Core& core, const Extents& extents) {
  std::vector<Bytes> contents;
  std::vector<std::byte*> buffers;
  for (const Extent& extent : extents) contents.emplace_back(extent.length);
  for (Bytes& bytes : contents) buffers.push_back(reinterpret_cast<std::byte*>(bytes.data()));
  CUMEM_RETURN_IF_ERROR(core.copy_to_host(extents, buffers));
  return contents;
}

inline bool all_ok(const std::vector<Outcome>& outcomes) {
  for (const Outcome& outcome : outcomes) {
    if (!outcome.status.ok()) return false;
  }
  return true;
}

// Segments of one slot, each full of bytes of its own.
class Segments {
 public:
  Segments(Core& core, std::size_t count, std::uint64_t size, Device device = kFirst)
      : core_(core), slot_(core.create_slot()) {
    for (std::size_t i = 0; i < count; ++i) {
      addresses_.push_back(must(core.malloc(slot_, size, device, false)));
      const SegmentInfo info = *core.find(addresses_.back());
      ids_.push_back(info.id);
      extents_.push_back({info.id, 0, info.size});
      contents_.push_back(pattern(info.size, static_cast<std::uint8_t>(17 * i + 1)));
    }
    const Claim claim(core, ids_);
    REQUIRE_OK(put(core, extents_, contents_));
  }
  Segments(const Segments&) = delete;

  [[nodiscard]] SlotId slot() const { return slot_; }
  [[nodiscard]] const Ids& ids() const { return ids_; }
  [[nodiscard]] const Extents& extents() const { return extents_; }
  [[nodiscard]] const std::vector<DeviceAddress>& addresses() const { return addresses_; }
  [[nodiscard]] const std::vector<Bytes>& contents() const { return contents_; }
  [[nodiscard]] SegmentState state(std::size_t i) const { return core_.find(addresses_[i])->state; }
  [[nodiscard]] bool all(SegmentState state) const {
    for (const DeviceAddress address : addresses_) {
      if (core_.find(address)->state != state) return false;
    }
    return true;
  }

  // pre: claimed.
  void check_contents() const {
    const auto now = get(core_, extents_);
    REQUIRE_OK(now);
    for (std::size_t i = 0; i < contents_.size(); ++i) CHECK((now.value()[i] == contents_[i]));  // not printed: large
  }

  // Each a whole transition; pre: claimed. The first failure ends it.
  Status sleep() const {
    CUMEM_RETURN_IF_ERROR(core_.reserve_backup(extents_));
    CUMEM_RETURN_IF_ERROR(core_.save(extents_));
    CUMEM_RETURN_IF_ERROR(core_.wait_devices(devices()));
    return first_error(core_.unmap(ids_));
  }
  Status wake() const {
    CUMEM_RETURN_IF_ERROR(first_error(core_.map(ids_)));
    CUMEM_RETURN_IF_ERROR(core_.restore(extents_));
    CUMEM_RETURN_IF_ERROR(core_.wait_devices(devices()));
    core_.settle(ids_);
    return {};
  }

  void free_all() {
    for (const DeviceAddress address : addresses_) CHECK_OK(core_.free(address));
    addresses_.clear();
    ids_.clear();
  }

 private:
  [[nodiscard]] std::vector<Device> devices() const {
    std::vector<Device> devices;
    for (const DeviceAddress address : addresses_) devices.push_back(core_.find(address)->device);
    return devices;
  }
  static Status first_error(const std::vector<Outcome>& outcomes) {
    for (const Outcome& outcome : outcomes) CUMEM_RETURN_IF_ERROR(outcome.status);
    return {};
  }

  Core& core_;
  const SlotId slot_;
  std::vector<DeviceAddress> addresses_;
  Ids ids_;
  Extents extents_;
  std::vector<Bytes> contents_;
};

}  // namespace cumem::testing

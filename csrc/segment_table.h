// SegmentTable: address -> segment, id -> segment, and the segments that died. The only mutex over segments; it is
// never held across a driver call, a copy or a wait. Lock order: GIL -> arena -> table.
//
// Laws:
//   a segment is in exactly one of: the table, the dead list, the hands of a caller that destroys it
//   in the table    =>  not dead, or claimed
//   in the dead list => dead and not claimed
// A segment leaves the table before its address goes back to the driver, so an address is never found twice.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "extent.h"
#include "segment.h"
#include "status.h"

namespace cumem {

using SegmentPtr = std::shared_ptr<Segment>;

// A moment's copy of what a segment is.
struct SegmentInfo {
  SegmentId id;
  SlotId slot;
  DeviceAddress address;
  std::uint64_t size = 0;
  std::uint64_t backing_bytes = 0;  // what has pages, or gets them at the next map
  Device device;
  bool shareable = false;
  bool owned = false;     // by the one who called malloc; else its blocks keep it
  bool captured = false;  // made while a stream was captured
  SegmentState state = SegmentState::kResident;
  std::uint64_t live_bytes = 0;

  [[nodiscard]] std::uint64_t mapped_bytes() const {
    return state == SegmentState::kResident || state == SegmentState::kMoving ? backing_bytes : 0;
  }
};

// The devices on which these segments have pages. pre: their mappings are the caller's to read.
[[nodiscard]] std::vector<Device> devices_of(const std::vector<SegmentPtr>& segments);

class SegmentTable {
 public:
  void insert(SegmentPtr segment);

  // The segment that contains `address`.
  [[nodiscard]] std::optional<SegmentInfo> find(DeviceAddress address) const;
  [[nodiscard]] std::vector<SegmentInfo> list(std::optional<SlotId> slot) const;  // by address
  [[nodiscard]] std::vector<Extent> live_extents(const std::vector<SegmentId>& ids) const;

  // Drops the owner's hold on the segment that begins at `address`. The segment, if the caller must destroy it now;
  // nothing if blocks live or a claim holds it (it then dies later). kNotFound: no owned segment begins there.
  Result<SegmentPtr> drop_owner(DeviceAddress address);

  // A new block of [offset, offset + length) of the segment that begins at `address`.
  Result<SegmentPtr> add_block(DeviceAddress address, std::uint64_t offset, std::uint64_t length);
  // Its end. Never blocks on anything but the mutex; a segment that dies goes to the dead list.
  void drop_block(const SegmentPtr& segment, std::uint64_t offset, std::uint64_t length);

  // Holds those of `ids` that exist and are not dead.
  std::vector<SegmentPtr> claim(const std::vector<SegmentId>& ids);
  void unclaim(const std::vector<SegmentId>& ids);
  [[nodiscard]] std::vector<SegmentPtr> claimed(const std::vector<SegmentId>& ids) const;

  void set_state(const SegmentPtr& segment, SegmentState state);
  void set_backing(const SegmentPtr& segment, std::vector<Run> backing);
  [[nodiscard]] SegmentState state(const SegmentPtr& segment) const;

  [[nodiscard]] std::vector<SegmentPtr> take_dead();
  void put_dead(SegmentPtr segment);                 // could not be destroyed: kept for the next try
  [[nodiscard]] std::uint64_t dead_bytes() const;    // of pages that the dead still hold
  [[nodiscard]] std::vector<SegmentPtr> take_all();  // of a core that ends

  // The first law that does not hold, or an empty string.
  [[nodiscard]] std::string check_valid() const;

 private:
  using ByAddress = std::map<std::uint64_t, SegmentPtr>;
  [[nodiscard]] ByAddress::const_iterator containing(DeviceAddress address) const;
  void bury_if_dead(const SegmentPtr& segment);
  void erase(const SegmentPtr& segment);

  mutable std::mutex mutex_;
  ByAddress by_address_;
  std::unordered_map<SegmentId, SegmentPtr> by_id_;
  std::vector<SegmentPtr> dead_;
};

}  // namespace cumem

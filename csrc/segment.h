// Segment: one reserved range of device addresses that the allocator handed out, its pages, and who still needs it.
//
//            malloc                      unmap                        map
//   (none) ---------> resident --------------------------> asleep ----------> moving
//                        ^                                    ^                  |
//                        |               settle               |      unmap       |
//                        +------------------------------------|------------------+---- settle --> resident
//   any unmap that stops half-way ----> lost ---- map (removes what is left first) ----> moving
//
// Laws:
//   resident or moving  =>  exactly the runs of `backing` are mapped, one handle a run, with access for the device and
//                           for its peers
//   asleep              =>  nothing is mapped in [range)
//   dead == (!owned && blocks.empty());  a dead, unclaimed segment is in no table
//
// Threads: `state`, `owned`, `claims`, `blocks`, `backing` belong to the table's mutex. `range` and `mappings` belong
// to whoever holds a claim (there is one transition at a time) or, once dead and out of the table, to whoever destroys
// it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <vector>

#include "driver/driver.h"
#include "plan.h"
#include "vmm.h"

namespace cumem {

enum class SegmentState { kResident, kAsleep, kMoving, kLost };

[[nodiscard]] inline const char* state_name(SegmentState state) {
  switch (state) {
    case SegmentState::kResident: return "resident";
    case SegmentState::kAsleep: return "asleep";
    case SegmentState::kMoving: return "moving";
    case SegmentState::kLost: return "lost";
  }
  return "unknown";
}

struct Segment {
  SegmentId id;
  SlotId slot;
  AllocationProperties properties;  // fixed: a wake re-creates with the same
  AddressRange range;               // before mappings: pages go before addresses
  std::vector<Mapping> mappings;    // ascending

  // What has pages, or gets them at the next map: ascending, disjoint, multiples of the granularity. The whole segment
  // at first; a wake leaves holes where nothing lives any more.
  std::vector<Run> backing;
  bool captured = false;  // made while a stream was captured: a CUDA graph holds its addresses, live or not

  SegmentState state = SegmentState::kResident;
  bool owned = true;                                   // malloc's caller has not called free
  std::uint32_t claims = 0;                            // transitions that use it
  std::multimap<std::uint64_t, std::uint64_t> blocks;  // offset -> length of live blocks

  [[nodiscard]] DeviceAddress address() const { return range.address(); }
  [[nodiscard]] std::uint64_t size() const { return range.size(); }
  [[nodiscard]] bool dead() const { return !owned && blocks.empty(); }
  [[nodiscard]] bool mapped() const { return state == SegmentState::kResident || state == SegmentState::kMoving; }

  [[nodiscard]] std::uint64_t backing_bytes() const {
    return std::accumulate(backing.begin(), backing.end(), std::uint64_t{0},
                           [](std::uint64_t sum, const Run& run) { return sum + run.length; });
  }

  [[nodiscard]] bool contains(const Run& part) const {
    return part.offset <= size() && part.length <= size() - part.offset;
  }

  // Of the pages that it holds just now, whatever its state. Needs what `mappings` needs.
  [[nodiscard]] std::uint64_t held_bytes() const {
    return std::accumulate(
        mappings.begin(), mappings.end(), std::uint64_t{0},
        [](std::uint64_t sum, const Mapping& each) { return sum + (each.empty() ? 0 : each.size()); });
  }

  // Whether one run of the backing holds all of `part`.
  [[nodiscard]] bool has_pages(const Run& part) const {
    return std::any_of(backing.begin(), backing.end(), [&](const Run& run) {
      return part.offset >= run.offset && part.offset - run.offset <= run.length &&
             part.length <= run.length - (part.offset - run.offset);
    });
  }

  // An owned segment is live as a whole; else its blocks are.
  [[nodiscard]] std::vector<Run> live_blocks() const {
    if (owned) return {{0, size()}};
    std::vector<Run> runs;
    runs.reserve(blocks.size());
    for (const auto& [offset, length] : blocks) runs.push_back({offset, length});
    return runs;
  }
};

}  // namespace cumem

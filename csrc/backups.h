// Backups: extent -> host block. Reserved before anything changes, dropped only when the caller says so or the segment
// dies.
//
// Law: an extent has at most one backup; two backups of one segment never overlap (the caller's extents do not).
// Threads: one mutex, for bookkeeping only.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "extent.h"
#include "host_arena.h"

namespace cumem {

struct HostRange {
  HostBlockPtr block;  // keeps the memory
  std::byte* data = nullptr;
};

class Backups {
 public:
  explicit Backups(std::shared_ptr<HostArena> arena) : arena_(std::move(arena)) {}

  // A block for each extent that has none. All or nothing.
  Status reserve(const std::vector<Extent>& extents);

  // The blocks of `extents`, in order. kNotFound names the first that has none.
  Result<std::vector<HostBlockPtr>> blocks(const std::vector<Extent>& extents) const;

  // The memory behind [offset, offset + length) of a segment, if one backup holds all of it.
  [[nodiscard]] Result<HostRange> find(SegmentId segment, std::uint64_t offset, std::uint64_t length) const;

  void drop(const std::vector<Extent>& extents);  // unknown ones are ignored
  void drop_segment(SegmentId segment);

  [[nodiscard]] std::uint64_t bytes(SegmentId segment) const;

  // The first law that does not hold, or an empty string.
  [[nodiscard]] std::string check_valid() const;

 private:
  std::shared_ptr<HostArena> arena_;
  mutable std::mutex mutex_;
  std::map<Extent, HostBlockPtr> blocks_;
};

}  // namespace cumem

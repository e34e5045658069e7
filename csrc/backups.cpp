#include "backups.h"

#include <string>
#include <utility>

namespace cumem {
namespace {

using Lock = std::lock_guard<std::mutex>;

Status no_backup(SegmentId segment, std::uint64_t offset, std::uint64_t length) {
  return Status(Code::kNotFound, "backup",
                "no backup of " + std::to_string(length) + " bytes at offset " + std::to_string(offset) +
                    " of segment " + std::to_string(segment.value));
}

}  // namespace

Status Backups::reserve(const std::vector<Extent>& extents) {
  std::vector<Extent> missing;
  std::vector<std::uint64_t> sizes;
  {
    const Lock lock(mutex_);
    for (const Extent& extent : extents) {
      if (blocks_.count(extent) > 0) continue;
      missing.push_back(extent);
      sizes.push_back(extent.length);
    }
  }
  auto allocated = arena_->allocate(sizes);
  if (!allocated.ok()) return allocated.status();
  const Lock lock(mutex_);
  for (std::size_t i = 0; i < missing.size(); ++i) blocks_.emplace(missing[i], std::move(allocated.value()[i]));
  return {};
}

Result<std::vector<HostBlockPtr>> Backups::blocks(const std::vector<Extent>& extents) const {
  std::vector<HostBlockPtr> found;
  found.reserve(extents.size());
  const Lock lock(mutex_);
  for (const Extent& extent : extents) {
    const auto it = blocks_.find(extent);
    if (it == blocks_.end()) return no_backup(extent.segment, extent.offset, extent.length);
    found.push_back(it->second);
  }
  return found;
}

Result<HostRange> Backups::find(SegmentId segment, std::uint64_t offset, std::uint64_t length) const {
  const Lock lock(mutex_);
  auto it = blocks_.upper_bound(Extent{segment, offset, ~0ull});
  if (it == blocks_.begin()) return no_backup(segment, offset, length);
  --it;
  const Extent& extent = it->first;
  const bool holds = extent.segment == segment && offset - extent.offset <= extent.length &&
                     length <= extent.length - (offset - extent.offset);
  if (!holds) return no_backup(segment, offset, length);
  return HostRange{it->second, it->second->data() + (offset - extent.offset)};
}

void Backups::drop(const std::vector<Extent>& extents) {
  std::vector<HostBlockPtr> gone;  // die outside our lock: they take the arena's, which comes first
  const Lock lock(mutex_);
  for (const Extent& extent : extents) {
    const auto it = blocks_.find(extent);
    if (it == blocks_.end()) continue;
    gone.push_back(std::move(it->second));
    blocks_.erase(it);
  }
}

void Backups::drop_segment(SegmentId segment) {
  std::vector<HostBlockPtr> gone;
  const Lock lock(mutex_);
  auto it = blocks_.lower_bound(Extent{segment, 0, 0});
  while (it != blocks_.end() && it->first.segment == segment) {
    gone.push_back(std::move(it->second));
    it = blocks_.erase(it);
  }
}

std::uint64_t Backups::bytes(SegmentId segment) const {
  const Lock lock(mutex_);
  std::uint64_t total = 0;
  for (auto it = blocks_.lower_bound(Extent{segment, 0, 0}); it != blocks_.end() && it->first.segment == segment;
       ++it) {
    total += it->first.length;
  }
  return total;
}

std::string Backups::check_valid() const {
  const Lock lock(mutex_);
  const Extent* before = nullptr;
  for (const auto& [extent, block] : blocks_) {
    const std::string name =
        "the backup at offset " + std::to_string(extent.offset) + " of segment " + std::to_string(extent.segment.value);
    if (extent.length == 0 || extent.length > block->size()) return name + " has another size than its memory";
    if (before != nullptr && before->segment == extent.segment && before->end() > extent.offset) {
      return name + " overlaps the one before it";
    }
    before = &extent;
  }
  return {};
}

}  // namespace cumem

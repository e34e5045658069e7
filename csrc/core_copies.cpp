// Core: copies, fills and backups of extents of claimed segments.
#include <map>
#include <string>
#include <utility>

#include "core.h"

namespace cumem {
namespace {

using Lock = std::lock_guard<std::mutex>;

Status one_buffer_each(const std::vector<Extent>& extents, const std::vector<std::byte*>& buffers) {
  if (extents.size() == buffers.size()) return {};
  return Status(Code::kInvalidValue, "copy",
                std::to_string(extents.size()) + " extents but " + std::to_string(buffers.size()) + " buffers");
}

}  // namespace

Status Core::move(Move::Kind kind, const std::vector<Extent>& extents, const std::vector<std::byte*>& hosts,
                  std::uint8_t byte, bool* in_flight) {
  std::vector<Move> moves;
  moves.reserve(extents.size());
  std::map<SegmentId, SegmentPtr> held;
  for (std::size_t i = 0; i < extents.size(); ++i) {
    const Extent& extent = extents[i];
    SegmentPtr& segment = held[extent.segment];
    if (!segment) {
      const auto found = table_.claimed({extent.segment});
      if (found.empty())
        return Status(Code::kNotFound, "copy", "segment " + std::to_string(extent.segment.value) + " is not claimed");
      segment = found.front();
    }
    if (!segment->has_pages({extent.offset, extent.length})) {
      return Status(Code::kInvalidValue, "copy",
                    "an extent leaves the pages of segment " + std::to_string(extent.segment.value));
    }
    const SegmentState state = table_.state(segment);
    if (state != SegmentState::kResident && state != SegmentState::kMoving) {
      return Status(Code::kWrongState, "copy",
                    "segment " + std::to_string(extent.segment.value) + " is " + state_name(state));
    }
    if (extent.length == 0) continue;
    moves.push_back({kind, segment->properties.device, segment->address() + extent.offset,
                     hosts.empty() ? nullptr : hosts[i], extent.length, byte});
  }
  return noted(transfer_.run(moves, in_flight));
}

Status Core::move_backups(Move::Kind kind, const std::vector<Extent>& extents) {
  auto blocks = backups_.blocks(extents);
  if (!blocks.ok()) return blocks.status();
  std::vector<std::byte*> hosts;
  hosts.reserve(extents.size());
  for (const HostBlockPtr& block : blocks.value()) hosts.push_back(block->data());
  bool in_flight = false;
  Status status = move(kind, extents, hosts, 0, &in_flight);
  if (in_flight) {
    std::vector<SegmentId> ids;
    ids.reserve(extents.size());
    for (const Extent& extent : extents) ids.push_back(extent.segment);
    Abandoned abandoned{devices_of(table_.claimed(ids)), std::move(blocks).value()};
    const Lock lock(mutex_);
    abandoned_.push_back(std::move(abandoned));
  }
  return status;
}

Status Core::fill(const std::vector<Extent>& extents, std::uint8_t byte) {
  return move(Move::Kind::kFill, extents, {}, byte);
}

Status Core::reserve_backup(const std::vector<Extent>& extents) {
  for (const Extent& extent : extents) {
    const auto found = table_.claimed({extent.segment});
    if (found.empty()) {
      return Status(Code::kNotFound, "reserve", "segment " + std::to_string(extent.segment.value) + " is not claimed");
    }
    if (!found.front()->contains({extent.offset, extent.length})) {
      return Status(Code::kInvalidValue, "reserve", "an extent leaves segment " + std::to_string(extent.segment.value));
    }
  }
  return noted(backups_.reserve(extents));
}

Status Core::save(const std::vector<Extent>& extents) { return move_backups(Move::Kind::kToHost, extents); }

Status Core::restore(const std::vector<Extent>& extents) { return move_backups(Move::Kind::kToDevice, extents); }

Status Core::copy_to_host(const std::vector<Extent>& extents, const std::vector<std::byte*>& buffers, bool* in_flight) {
  CUMEM_RETURN_IF_ERROR(one_buffer_each(extents, buffers));
  return move(Move::Kind::kToHost, extents, buffers, 0, in_flight);
}

Status Core::copy_to_device(const std::vector<Extent>& extents, const std::vector<std::byte*>& buffers,
                            bool* in_flight) {
  CUMEM_RETURN_IF_ERROR(one_buffer_each(extents, buffers));
  return move(Move::Kind::kToDevice, extents, buffers, 0, in_flight);
}

void Core::release_backup(const std::vector<Extent>& extents, bool keep_memory) {
  backups_.drop(extents);
  if (!keep_memory) (void)trim_host();
}

Result<std::uint64_t> Core::trim_host() {
  Status failed;
  const std::uint64_t bytes = arena_->trim(&failed);
  if (!failed.ok()) return noted(failed);
  return bytes;
}

Result<HostRange> Core::host_view(DeviceAddress address, std::uint64_t length) const {
  const auto segment = table_.find(address);
  if (!segment) return Status(Code::kNotFound, "host_view", "the address is not managed");
  return backups_.find(segment->id, address.value - segment->address.value, length);
}

}  // namespace cumem

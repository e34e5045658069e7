#include "host_arena.h"

#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <thread>
#include <utility>

#include "host_limits.h"
#include "parallel.h"
#include "process.h"

namespace cumem {
namespace {

using Lock = std::lock_guard<std::mutex>;

constexpr std::uint64_t kSlabBytes = 512 * kMiB;
constexpr unsigned kMostThreads = 8;  // measured: 16 gain an eighth more

unsigned thread_count() { return std::clamp(std::thread::hardware_concurrency(), 1u, kMostThreads); }

std::uint64_t page_bytes() { return static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE)); }

// The sizes rounded to what blocks have. kInvalidValue if one is 0, or if they add up to more than any machine has.
Result<std::vector<std::uint64_t>> block_sizes(const std::vector<std::uint64_t>& sizes) {
  constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 62;
  std::vector<std::uint64_t> rounded;
  std::uint64_t left = kMostBytes;
  for (const std::uint64_t size : sizes) {
    const auto block = round_up(size, kBlockAlignment);
    if (size == 0 || !block || *block > left) {
      return Status(Code::kInvalidValue, "reserve", "a block of " + std::to_string(size) + " bytes cannot be made");
    }
    left -= *block;
    rounded.push_back(*block);
  }
  return rounded;
}

std::uint64_t sum(const std::vector<std::uint64_t>& sizes) {
  std::uint64_t total = 0;
  for (const std::uint64_t size : sizes) total += size;
  return total;
}

}  // namespace

HostBlock::HostBlock(std::shared_ptr<HostArena> arena, std::shared_ptr<Slab> slab, Run place)
    : arena_(std::move(arena)), slab_(std::move(slab)), place_(place) {}

HostBlock::~HostBlock() {
  if (is_forked_child()) return;  // no slab here; and the arena's lock may have been copied locked
  arena_->give_back(slab_.get(), place_);
}

HostArena::HostArena(std::shared_ptr<Driver> driver, std::optional<std::uint64_t> budget_bytes)
    : driver_(std::move(driver)), budget_bytes_(budget_bytes) {}

Result<std::vector<HostBlockPtr>> HostArena::allocate(const std::vector<std::uint64_t>& sizes) {
  const auto rounded = block_sizes(sizes);
  if (!rounded.ok()) return rounded.status();
  std::vector<HostBlockPtr> blocks(sizes.size());  // dies on every early return: what was taken goes back
  std::vector<std::size_t> missing;
  std::vector<std::uint64_t> missing_sizes;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (auto placed = take_free(rounded.value()[i])) {
      blocks[i] = std::make_shared<HostBlock>(shared_from_this(), std::move(placed->slab), placed->run);
    } else {
      missing.push_back(i);
      missing_sizes.push_back(rounded.value()[i]);
    }
  }
  if (missing.empty()) return blocks;

  const SlabPlan plan =
      plan_slabs(missing_sizes, slab_target(sum(missing_sizes), thread_count(), kSlabBytes), page_bytes());
  const std::uint64_t bytes = sum(plan.slab_bytes);
  Status admitted = admit(bytes);
  if (!admitted.ok() && trim() > 0) admitted = admit(bytes);  // empty slabs whose shape does not fit make room
  CUMEM_RETURN_IF_ERROR(admitted);
  auto slabs = populate(plan.slab_bytes);
  {
    const Lock lock(mutex_);
    pending_bytes_ -= bytes;
    if (!slabs.ok()) return slabs.status();
    const std::size_t first = entries_.size();
    for (const auto& slab : slabs.value()) entries_.push_back({slab, {{0, slab->size()}}});
    for (std::size_t i = 0; i < missing.size(); ++i) {
      const auto& [slab, offset] = plan.places[i];
      Entry& entry = entries_[first + slab];
      const auto last = std::prev(entry.free.end());  // blocks are placed in order: the free rest is one run
      const std::uint64_t rest = last->second - missing_sizes[i];
      entry.free.erase(last);
      if (rest > 0) entry.free.emplace(offset + missing_sizes[i], rest);
      blocks[missing[i]] = std::make_shared<HostBlock>(shared_from_this(), entry.slab, Run{offset, missing_sizes[i]});
    }
  }
  return blocks;
}

std::optional<HostArena::Placed> HostArena::take_free(std::uint64_t size) {
  const Lock lock(mutex_);
  for (Entry& entry : entries_) {
    for (auto it = entry.free.begin(); it != entry.free.end(); ++it) {
      if (it->second < size) continue;
      const Run run{it->first, size};
      const std::uint64_t rest = it->second - size;
      entry.free.erase(it);
      if (rest > 0) entry.free.emplace(run.offset + size, rest);
      return Placed{entry.slab, run};
    }
  }
  return std::nullopt;
}

void HostArena::give_back(const Slab* slab, Run place) {
  const Lock lock(mutex_);
  const auto it = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.slab.get() == slab; });
  if (it != entries_.end()) insert_free(*it, place);
}

void HostArena::insert_free(Entry& entry, Run place) {
  auto next = entry.free.lower_bound(place.offset);
  if (next != entry.free.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == place.offset) {
      place = {before->first, before->second + place.length};
      entry.free.erase(before);
    }
  }
  if (next != entry.free.end() && place.offset + place.length == next->first) {
    place.length += next->second;
    entry.free.erase(next);
  }
  entry.free.emplace(place.offset, place.length);
}

Status HostArena::admit(std::uint64_t bytes) {
  const HostHeadroom room = host_headroom(!budget_bytes_.has_value());
  if (bytes > room.free_bytes) {
    return Status::out_of_host_memory("reserve", bytes, room.free_bytes, room.limit + " leaves too little");
  }
  const Lock lock(mutex_);
  std::uint64_t held = pending_bytes_;
  for (const Entry& entry : entries_) held += entry.slab->size();
  if (budget_bytes_ && (held > *budget_bytes_ || bytes > *budget_bytes_ - held)) {
    const std::uint64_t left = *budget_bytes_ - std::min(*budget_bytes_, held);
    return Status::out_of_host_memory("reserve", bytes, left, "host_budget leaves too little");
  }
  pending_bytes_ += bytes;
  return {};
}

Result<std::vector<std::shared_ptr<Slab>>> HostArena::populate(const std::vector<std::uint64_t>& sizes) {
  std::vector<std::shared_ptr<Slab>> slabs(sizes.size());
  std::vector<Status> statuses(sizes.size());
  const unsigned threads = thread_count();
  const auto threads_a_slab = static_cast<unsigned>(std::max<std::size_t>(1, threads / sizes.size()));
  for_each_index(threads, sizes.size(), [&](std::size_t i) {
    auto slab = Slab::create(driver_, sizes[i], threads_a_slab);
    statuses[i] = slab.status();
    if (slab.ok()) slabs[i] = std::move(slab).value();
  });
  for (const Status& status : statuses) CUMEM_RETURN_IF_ERROR(status);
  return slabs;
}

std::uint64_t HostArena::trim(Status* failed) {
  std::vector<std::shared_ptr<Slab>> empty;  // die outside the lock
  {
    const Lock lock(mutex_);
    for (auto it = entries_.begin(); it != entries_.end();) {
      if (it->empty()) {
        empty.push_back(it->slab);
        it = entries_.erase(it);
      } else {
        ++it;
      }
    }
  }
  std::uint64_t bytes = 0;
  for (const auto& slab : empty) {
    Status status = slab->unpin();
    if (status.ok()) {
      bytes += slab->size();
      continue;
    }
    if (failed != nullptr && failed->ok()) *failed = std::move(status);
    const Lock lock(mutex_);
    entries_.push_back({slab, {{0, slab->size()}}});
  }
  return bytes;
}

std::uint64_t HostArena::bytes() const {
  const Lock lock(mutex_);
  std::uint64_t total = pending_bytes_;
  for (const Entry& entry : entries_) total += entry.slab->size();
  return total;
}

std::uint64_t HostArena::used_bytes() const {
  const Lock lock(mutex_);
  std::uint64_t total = 0;
  for (const Entry& entry : entries_) {
    total += entry.slab->size();
    for (const auto& [offset, length] : entry.free) total -= length;
  }
  return total;
}

std::uint64_t HostArena::pageable_bytes() const {
  const Lock lock(mutex_);
  std::uint64_t total = 0;
  for (const Entry& entry : entries_) total += entry.slab->pinned() ? 0 : entry.slab->size();
  return total;
}

std::string HostArena::check_valid() const {
  const Lock lock(mutex_);
  std::uint64_t held = pending_bytes_;
  for (const Entry& entry : entries_) {
    held += entry.slab->size();
    std::uint64_t end = 0;
    bool first = true;
    for (const auto& [offset, length] : entry.free) {
      if (length == 0 || offset > entry.slab->size() || length > entry.slab->size() - offset)
        return "a free run leaves its slab";
      if (!first && offset <= end) return "free runs of a slab touch or overlap";
      end = offset + length;
      first = false;
    }
  }
  if (budget_bytes_ && held > *budget_bytes_) return "the slabs exceed their budget";
  return {};
}

}  // namespace cumem

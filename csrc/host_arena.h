// HostArena: the host memory that backups live in. Large slabs, each populated by steps in its own thread and
// registered once (measured: 24 to 27 GiB/s, against 2.3 for cudaHostAlloc), cut into blocks; no block crosses a slab,
// since a copy whose host range crosses from one registration into the next fails.
//
// Laws:
//   bytes() == sum of slab sizes <= budget                 (bytes being populated count)
//   used_bytes() == sum of block sizes, rounded to 512
//   a slab lives until it is trimmed or dropped AND its last block is gone
// A slab whose pinning is refused stays, pageable: slower, not wrong.
//
// Threads: one mutex, held for bookkeeping only: never while populating, registering or unregistering.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "driver/driver.h"
#include "plan.h"

namespace cumem {

// One mapping of host memory, registered with the driver unless that was refused.
class Slab {
 public:
  // Populated by that many threads, and registered. kOutOfHostMemory when the system has no pages.
  static Result<std::shared_ptr<Slab>> create(std::shared_ptr<Driver> driver, std::uint64_t size, unsigned threads);
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;
  ~Slab();

  // Ends the registration. After an error it goes on: call it again. pre: no copy uses the memory.
  Status unpin();

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] std::uint64_t size() const { return size_; }
  [[nodiscard]] bool pinned() const { return pinned_; }

 private:
  Slab(std::shared_ptr<Driver> driver, std::byte* data, std::uint64_t size);

  std::shared_ptr<Driver> driver_;
  std::byte* data_ = nullptr;
  std::uint64_t size_ = 0;
  bool pinned_ = false;
};

class HostArena;

// A piece of a slab. Gives itself back when it dies; keeps its slab alive until then.
class HostBlock {
 public:
  HostBlock(std::shared_ptr<HostArena> arena, std::shared_ptr<Slab> slab, Run place);
  HostBlock(const HostBlock&) = delete;
  HostBlock& operator=(const HostBlock&) = delete;
  ~HostBlock();

  [[nodiscard]] std::byte* data() const { return slab_->data() + place_.offset; }
  [[nodiscard]] std::uint64_t size() const { return place_.length; }

 private:
  std::shared_ptr<HostArena> arena_;
  std::shared_ptr<Slab> slab_;
  Run place_;
};

using HostBlockPtr = std::shared_ptr<HostBlock>;

class HostArena : public std::enable_shared_from_this<HostArena> {
 public:
  // budget_bytes: the most that all slabs may hold. Without one, MemAvailable limits what is added; the cgroups always
  // do.
  HostArena(std::shared_ptr<Driver> driver, std::optional<std::uint64_t> budget_bytes);

  // One block for each size, all or nothing: an error leaves the blocks as they were. Blocks until populated.
  // kOutOfHostMemory: needed and free bytes, and what limits them. kInvalidValue: a size of 0, or past all bounds.
  Result<std::vector<HostBlockPtr>> allocate(const std::vector<std::uint64_t>& sizes);

  // Gives slabs without a block back to the system; their bytes. A slab whose registration does not end stays for the
  // next call, and `failed`, if given, says why.
  std::uint64_t trim(Status* failed = nullptr);

  [[nodiscard]] std::uint64_t bytes() const;
  [[nodiscard]] std::uint64_t used_bytes() const;
  [[nodiscard]] std::uint64_t pageable_bytes() const;
  [[nodiscard]] std::string check_valid() const;

 private:
  friend class HostBlock;
  struct Entry {
    std::shared_ptr<Slab> slab;
    std::map<std::uint64_t, std::uint64_t> free;  // offset -> length, disjoint, never adjacent
    [[nodiscard]] bool empty() const { return free.size() == 1 && free.begin()->second == slab->size(); }
  };
  struct Placed {
    std::shared_ptr<Slab> slab;
    Run run;
  };

  std::optional<Placed> take_free(std::uint64_t size);
  void give_back(const Slab* slab, Run place);
  static void insert_free(Entry& entry, Run place);
  Status admit(std::uint64_t bytes);
  Result<std::vector<std::shared_ptr<Slab>>> populate(const std::vector<std::uint64_t>& sizes);

  std::shared_ptr<Driver> driver_;
  std::optional<std::uint64_t> budget_bytes_;
  mutable std::mutex mutex_;
  // In the order in which they were made, and searched in it: the same requests again find the same places, so that a
  // cycle that is repeated needs no more than the first one did.
  std::vector<Entry> entries_;
  std::uint64_t pending_bytes_ = 0;  // admitted, being populated
};

}  // namespace cumem

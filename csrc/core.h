// Core: ties drivers, table, backups and transfers; the batch primitives that the binding exposes.
//
// It moves bytes and decides nothing: it knows no tag, policy, rank or torch. Its callers order the primitives (wait,
// save, unmap ...); it keeps each of them safe: no leak, no double use, a legal state after every failure.
//
// malloc -> address, owned by the caller; add_block/drop_block count what lives in a segment; free drops the owner's
// hold. A segment dies when it is neither owned nor holds a block; it is destroyed at once by free, else at the next
// reap(). Blocks end in tensors' deleters, where neither waiting nor driver calls are allowed: hence the delay.
//
// Lock order: GIL -> arena -> table; no lock of ours is held across a driver call, except Transfer's own.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "backups.h"
#include "device_waiter.h"
#include "driver/driver.h"
#include "segment_table.h"
#include "transfer.h"

namespace cumem {

struct CoreOptions {
  std::optional<std::uint64_t> host_budget_bytes;      // of all slabs
  std::uint64_t margin_bytes = 0;                      // malloc fails when less would stay free on the device
  std::chrono::duration<double> device_timeout{60.0};  // of every wait for a device
};

// What became of one segment in a batch.
struct Outcome {
  SegmentId segment;
  Status status;
};

// A block that is being handed out: keeps the core and the segment until it is dropped, once.
class BlockHold {
 public:
  BlockHold(std::shared_ptr<class Core> core, SegmentPtr segment, Run run);
  BlockHold(const BlockHold&) = delete;
  BlockHold& operator=(const BlockHold&) = delete;
  ~BlockHold();  // any thread, any time; no GIL, no driver call, no wait

  [[nodiscard]] DeviceAddress address() const;
  [[nodiscard]] std::uint64_t size() const { return run_.length; }
  [[nodiscard]] Device device() const;

 private:
  std::shared_ptr<class Core> core_;
  SegmentPtr segment_;
  Run run_;
};

class Core : public std::enable_shared_from_this<Core> {
 public:
  Core(std::shared_ptr<Driver> driver, CoreOptions options);
  // Waits for the devices and destroys every segment that is left. While the process exits, leaks instead.
  ~Core();
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  [[nodiscard]] const std::shared_ptr<Driver>& driver() const { return driver_; }

  // Why the context is contaminated; empty while it is not. Never becomes empty again.
  [[nodiscard]] std::string broken() const;

  [[nodiscard]] SlotId create_slot() { return SlotId(next_slot_++); }

  // --- memory ---

  // A resident segment of `size` bytes rounded up to the granularity. Reaps first when much is dead or memory is short.
  // kOutOfDeviceMemory (needed, free), kInvalidValue (0, overflow, no such device): nothing changed.
  // `captured`: a CUDA graph being captured will hold the address; the segment then keeps all its pages, live or not.
  Result<DeviceAddress> malloc(SlotId slot, std::uint64_t size, Device device, bool shareable, bool captured = false);

  // Legal in every state. Complete on return, unless a transition or a block holds the segment: then a later reap()
  // ends it. Waits for the device as cudaFree does, without a deadline and without a hand-over to a thread: it is on
  // torch's path. kNotFound: not an address that malloc gave and free did not take.
  Status free(DeviceAddress address);

  // The same without any wait: what would need one goes to the next reap().
  Status free_later(DeviceAddress address);

  Result<std::unique_ptr<BlockHold>> add_block(DeviceAddress address, std::uint64_t offset, std::uint64_t length);

  // A new segment that its block of the first `size` bytes holds alone: nobody has to free it. Else as malloc.
  Result<std::unique_ptr<BlockHold>> malloc_block(SlotId slot, std::uint64_t size, Device device, bool shareable);

  [[nodiscard]] std::optional<SegmentInfo> find(DeviceAddress address) const { return table_.find(address); }
  [[nodiscard]] std::vector<SegmentInfo> segments(std::optional<SlotId> slot) const { return table_.list(slot); }
  [[nodiscard]] std::vector<Extent> live_extents(const std::vector<SegmentId>& ids) const {
    return table_.live_extents(ids);
  }

  // Destroys what died; waits for the devices once. The bytes given back. After an error the rest stays for the next
  // call, and what could end has ended.
  // `beside_capture`: see DeviceWaiter.
  Result<std::uint64_t> reap(bool beside_capture = false);
  [[nodiscard]] std::uint64_t dead_bytes() const { return table_.dead_bytes(); }

  // --- transitions; the caller holds claims on the segments, and is alone ---

  std::vector<SegmentId> claim(const std::vector<SegmentId>& ids);
  void unclaim(const std::vector<SegmentId>& ids) { table_.unclaim(ids); }
  Status wait_devices(const std::vector<Device>& devices, bool beside_capture = false);
  Result<MemoryInfo> memory_info(Device device);  // of the whole device, other processes included

  // resident or moving -> asleep, each segment by itself. pre: the device was waited for.
  // A failed unmap is tried once more; then the segment stays what it was, or is lost if some of its mappings are gone.
  std::vector<Outcome> unmap(const std::vector<SegmentId>& ids);

  // asleep or lost -> moving, each by itself. A failure other than out of memory is tried once more; then it stays.
  std::vector<Outcome> map(const std::vector<SegmentId>& ids);

  void settle(const std::vector<SegmentId>& ids);  // moving -> resident

  // What the next map() gives pages to: `runs`, rounded outwards to the granularity. pre: asleep.
  // kWrongState for segments that keep one layout for ever: shareable ones, and those made during a capture.
  Status set_backing(SegmentId id, const std::vector<Run>& runs);

  Status fill(const std::vector<Extent>& extents, std::uint8_t byte);

  // --- backups; extents lie in claimed segments ---

  Status reserve_backup(const std::vector<Extent>& extents);
  Status save(const std::vector<Extent>& extents);     // pre: reserved, mapped
  Status restore(const std::vector<Extent>& extents);  // pre: saved, mapped
  void release_backup(const std::vector<Extent>& extents, bool keep_memory);
  [[nodiscard]] std::uint64_t backup_bytes(SegmentId segment) const { return backups_.bytes(segment); }
  Result<std::uint64_t> trim_host();  // the bytes given back; after an error the rest stays for the next call
  Result<HostRange> host_view(DeviceAddress address, std::uint64_t length) const;

  // Copies between extents and the caller's buffers, one an extent, each at least as long. `in_flight`: whether, after
  // an error, a copy may still use the buffers, which then must never be freed.
  Status copy_to_host(const std::vector<Extent>& extents, const std::vector<std::byte*>& buffers,
                      bool* in_flight = nullptr);
  Status copy_to_device(const std::vector<Extent>& extents, const std::vector<std::byte*>& buffers,
                        bool* in_flight = nullptr);

  [[nodiscard]] const HostArena& arena() const { return *arena_; }
  [[nodiscard]] Transfer::Progress progress() const { return transfer_.progress(); }

  // The first law that does not hold, or an empty string.
  [[nodiscard]] std::string check_valid() const;

 private:
  friend class BlockHold;

  struct DeviceFacts {
    std::uint64_t granularity_bytes = 0;
    bool exportable = false;
    bool rdma = false;           // probed: the driver really makes such handles
    std::vector<Device> access;  // the device and every peer that can reach it
  };

  // What a clean-up gave back, and the first thing that it could not do.
  struct Reaped {
    std::uint64_t bytes = 0;
    Status first_error;
  };

  // Host memory that a copy may still use, until all work of its devices was waited for.
  struct Abandoned {
    std::vector<Device> devices;
    std::vector<HostBlockPtr> blocks;
  };

  Result<DeviceFacts> facts(Device device);
  Result<DeviceFacts> probe(Device device);
  bool probe_rdma(Device device, std::uint64_t granularity_bytes);

  Status keep_margin(std::uint64_t size, Device device);
  Result<SegmentPtr> make_segment(SlotId slot, std::uint64_t size, const AllocationProperties& properties,
                                  const std::vector<Device>& access);
  Status back(Segment& segment);  // pages, mapping and access for its backing
  Status back_once(Segment& segment, const std::vector<Device>& access);
  Status back_run(Segment& segment, const Run& run, const std::vector<Device>& access);
  Status unmap_all(Segment& segment);  // until the first failure
  Status destroy(const SegmentPtr& segment);
  void keep_orphan(PhysicalMemory memory);
  Reaped close_orphans();
  Reaped reap_all(bool beside_capture);
  void release_abandoned(bool beside_capture = false);
  Outcome unmap_one(const SegmentPtr& segment);
  Outcome map_one(const SegmentPtr& segment);
  Status move(Move::Kind kind, const std::vector<Extent>& extents, const std::vector<std::byte*>& hosts,
              std::uint8_t byte, bool* in_flight = nullptr);
  Status move_backups(Move::Kind kind, const std::vector<Extent>& extents);
  Status noted(Status status);  // remembers a broken context

  std::shared_ptr<Driver> driver_;
  CoreOptions options_;
  std::shared_ptr<HostArena> arena_;
  Backups backups_;
  SegmentTable table_;
  DeviceWaiter waiter_;
  Transfer transfer_;
  std::atomic<std::uint64_t> next_slot_{1};

  mutable std::mutex mutex_;  // of what follows; innermost
  std::map<Device, DeviceFacts> facts_;
  std::string broken_;
  std::vector<PhysicalMemory> orphans_;  // unmapped pages that could not be released yet
  std::vector<Abandoned> abandoned_;
};

}  // namespace cumem

// Transfer: runs a list of copies and fills, on one stream a device, chunked, and waits for all of them.
//
// Each device keeps at most kWindow chunks in flight; chunks are cut at kChunkBytes. The wait has a deadline that
// counts from the last progress. After an error nothing of the list is still in flight, unless the wait for that failed
// as well: run() says so, with kBusy unless a context is broken, and the caller must keep the host memory until all
// work of the devices was waited for.
//
// Threads: one run at a time (its own mutex, held throughout; nothing else waits for it). progress() any time.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "device_waiter.h"
#include "driver/driver.h"

namespace cumem {

struct Move {
  enum class Kind { kToHost, kToDevice, kFill };
  Kind kind = Kind::kFill;
  Device device;
  DeviceAddress address;
  std::byte* host = nullptr;  // to and from; null for fills
  std::uint64_t size = 0;
  std::uint8_t byte = 0;  // of fills
};

class Transfer {
 public:
  struct Progress {
    std::uint64_t done_bytes = 0;
    std::uint64_t total_bytes = 0;
  };

  Transfer(std::shared_ptr<Driver> driver, DeviceWaiter& waiter);
  ~Transfer();
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  // `in_flight`, if given: whether, after an error, something of the list may still be in flight.
  Status run(const std::vector<Move>& moves, bool* in_flight = nullptr);

  // Of the run under way, or of the last one.
  [[nodiscard]] Progress progress() const;

 private:
  class Lane;  // one device's stream, events and queue
  Result<Lane*> lane(Device device);
  Status run_lanes(const std::vector<Lane*>& busy);

  std::shared_ptr<Driver> driver_;
  DeviceWaiter& waiter_;
  std::mutex mutex_;
  std::map<Device, std::unique_ptr<Lane>> lanes_;
  std::atomic<std::uint64_t> done_bytes_{0};
  std::atomic<std::uint64_t> total_bytes_{0};
};

}  // namespace cumem

#include "transfer.h"

#include <algorithm>
#include <deque>
#include <string>
#include <thread>
#include <utility>

#include "process.h"

namespace cumem {
namespace {

constexpr std::uint64_t kChunkBytes = 64 * kMiB;  // 16 MiB and more reach the link's speed; bounds progress steps
constexpr std::size_t kWindow = 4;                // chunks in flight: the stream never runs dry between two polls
constexpr std::size_t kMovesAnEvent = 256;        // of small moves
constexpr auto kPollInterval = std::chrono::microseconds(20);

Status queue_move(Driver& driver, const Move& move, std::uint64_t offset, std::uint64_t size, StreamHandle stream) {
  const DeviceAddress address = move.address + offset;
  switch (move.kind) {
    case Move::Kind::kToHost: return driver.copy_to_host(move.host + offset, address, size, stream);
    case Move::Kind::kToDevice: return driver.copy_to_device(address, move.host + offset, size, stream);
    case Move::Kind::kFill: return driver.fill(address, move.byte, size, stream);
  }
  return {};
}

Status not_drained(const Status& failed, const Status& drained) {
  return Status::busy("copy",
                      failed.call() + " failed (" + failed.message() +
                          "), and so did the wait for the copies before it (" + drained.call() + ": " +
                          drained.message() + ")",
                      drained.timeout_s());
}

}  // namespace

// Laws: in_flight.size() <= kWindow == events; an event is in `idle` or in `in_flight`, never in both.
class Transfer::Lane {
 public:
  static Result<std::unique_ptr<Lane>> create(std::shared_ptr<Driver> driver, Device device) {
    std::unique_ptr<Lane> lane(new Lane(std::move(driver), device));
    auto stream = lane->driver_->create_stream(device);
    if (!stream.ok()) return stream.status();
    lane->stream_ = stream.value();
    lane->has_stream_ = true;
    while (lane->idle_.size() < kWindow) {
      auto event = lane->driver_->create_event(device);
      if (!event.ok()) return event.status();
      lane->idle_.push_back(event.value());
    }
    return lane;
  }

  ~Lane() {
    if (!may_call_driver()) return;
    for (const Batch& batch : in_flight_) idle_.push_back(batch.event);
    for (const EventHandle event : idle_) (void)driver_->destroy_event(event);
    if (has_stream_) (void)driver_->destroy_stream(stream_);
  }

  [[nodiscard]] Device device() const { return device_; }
  void add(const Move& move) { moves_.push_back(move); }
  [[nodiscard]] bool finished() const { return moves_.empty() && in_flight_.empty(); }

  // Queues batches until the window is full.
  Status feed() {
    while (!moves_.empty() && !idle_.empty()) CUMEM_RETURN_IF_ERROR(queue_batch());
    return {};
  }

  // Bytes of batches that have ended since the last call.
  Result<std::uint64_t> poll() {
    std::uint64_t bytes = 0;
    while (!in_flight_.empty()) {
      auto done = driver_->query_event(in_flight_.front().event);
      if (!done.ok()) return done.status();
      if (!done.value()) break;
      bytes += in_flight_.front().bytes;
      idle_.push_back(in_flight_.front().event);
      in_flight_.pop_front();
    }
    return bytes;
  }

  // Forgets everything. pre: nothing of it is in flight.
  void reset() {
    moves_.clear();
    offset_ = 0;
    for (const Batch& batch : in_flight_) idle_.push_back(batch.event);
    in_flight_.clear();
  }

 private:
  struct Batch {
    EventHandle event;
    std::uint64_t bytes = 0;
  };

  Lane(std::shared_ptr<Driver> driver, Device device) : driver_(std::move(driver)), device_(device) {}

  Status queue_batch() {
    std::uint64_t bytes = 0;
    for (std::size_t count = 0; !moves_.empty() && bytes < kChunkBytes && count < kMovesAnEvent; ++count) {
      const Move& move = moves_.front();
      const std::uint64_t size = std::min(move.size - offset_, kChunkBytes);
      CUMEM_RETURN_IF_ERROR(queue_move(*driver_, move, offset_, size, stream_));
      bytes += size;
      offset_ += size;
      if (offset_ == move.size) {
        moves_.pop_front();
        offset_ = 0;
      }
    }
    CUMEM_RETURN_IF_ERROR(driver_->record_event(idle_.back(), stream_));
    in_flight_.push_back({idle_.back(), bytes});
    idle_.pop_back();
    return {};
  }

  std::shared_ptr<Driver> driver_;
  Device device_;
  StreamHandle stream_;
  bool has_stream_ = false;
  std::vector<EventHandle> idle_;
  std::deque<Batch> in_flight_;
  std::deque<Move> moves_;
  std::uint64_t offset_ = 0;  // queued bytes of moves_.front()
};

Transfer::Transfer(std::shared_ptr<Driver> driver, DeviceWaiter& waiter)
    : driver_(std::move(driver)), waiter_(waiter) {}

Transfer::~Transfer() = default;

Result<Transfer::Lane*> Transfer::lane(Device device) {
  std::unique_ptr<Lane>& slot = lanes_[device];
  if (!slot) {
    auto made = Lane::create(driver_, device);
    if (!made.ok()) return made.status();
    slot = std::move(made).value();
  }
  return slot.get();
}

Status Transfer::run(const std::vector<Move>& moves, bool* in_flight) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Lane*> busy;
  std::uint64_t total = 0;
  for (const Move& move : moves) {
    auto found = lane(move.device);
    if (!found.ok()) {
      for (Lane* each : busy) each->reset();
      return found.status();
    }
    found.value()->add(move);
    if (std::find(busy.begin(), busy.end(), found.value()) == busy.end()) busy.push_back(found.value());
    total += move.size;
  }
  done_bytes_ = 0;
  total_bytes_ = total;
  Status status = run_lanes(busy);
  if (status.ok()) return status;
  // What is queued still runs and still uses the host memory: wait for it before anyone gives that away.
  for (Lane* each : busy) {
    const Status drained = waiter_.wait(each->device());
    if (drained.code() == Code::kContextBroken) status = drained;  // nothing of this device runs any more
    if (drained.ok() || drained.code() == Code::kContextBroken) {
      each->reset();
    } else {
      if (in_flight != nullptr) *in_flight = true;
      if (status.code() != Code::kContextBroken) status = not_drained(status, drained);
      lanes_.erase(each->device());  // its stream is never used again
    }
  }
  return status;
}

Status Transfer::run_lanes(const std::vector<Lane*>& busy) {
  auto progressed = std::chrono::steady_clock::now();
  while (true) {
    bool finished = true;
    std::uint64_t bytes = 0;
    for (Lane* each : busy) {
      CUMEM_RETURN_IF_ERROR(each->feed());
      auto polled = each->poll();
      if (!polled.ok()) return polled.status();
      bytes += polled.value();
      finished = finished && each->finished();
    }
    done_bytes_ += bytes;
    if (finished) return {};
    const auto now = std::chrono::steady_clock::now();
    if (bytes > 0) progressed = now;
    if (now - progressed > waiter_.timeout()) {
      const double timeout_s = waiter_.timeout().count();
      return Status::busy("copy", "no copy ended in " + std::to_string(timeout_s) + " s", timeout_s);
    }
    if (bytes == 0) std::this_thread::sleep_for(kPollInterval);
  }
}

Transfer::Progress Transfer::progress() const { return {done_bytes_.load(), total_bytes_.load()}; }

}  // namespace cumem

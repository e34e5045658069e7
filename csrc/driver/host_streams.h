// Streams and events of the emulated devices: work that runs late, in an order that the caller alone decides.
//
// Nothing runs when it is queued. Work runs
//   - when its device is synchronised: stream by stream in order of creation, launched kernels last;
//   - when its stream is destroyed: that stream's work;
//   - when an event of its stream is queried: one operation a query.
// So bytes that somebody reads, or pages that somebody unmaps, without having waited are wrong every time.
//
// An operation is checked against the tables when it runs, then moves its bytes by the virtual address. A device range
// that its stream's device may not touch, or pinned host memory whose registration has ended, is an illegal access: the
// device is broken for ever, what is still queued on it never runs.
//
// Invariants: of a stream: queued == done + size of its queue. A broken device's streams run nothing.
// An event is (stream, position): reached <=> stream.done >= position; an event never recorded is reached.
//
// Threads: not locked; the owner does, and holds its lock while bytes move. Otherwise a range that was checked could be
// unmapped under the copy, and what is an illegal access on a GPU would be a crash of the process here.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "../status.h"
#include "../types.h"
#include "host_address_space.h"
#include "host_registrations.h"

namespace cumem {

struct HostOperation {
  enum class Kind { kCopyToHost, kCopyToDevice, kFill };
  Kind kind;
  DeviceAddress address;
  std::uint64_t size = 0;
  std::uintptr_t host = 0;         // copies
  std::uint64_t registration = 0;  // copies: the registration that holds the host range, 0: pageable
  std::uint8_t byte = 0;           // fill
};

class HostStreams {
 public:
  HostStreams(int device_count, const HostAddressSpace& addresses, const HostRegistrations& registrations);

  // kContextBroken with the reason, if the device's context is.
  Status check_context(const char* call, Device device) const;

  StreamHandle create_stream(Device device);
  Status destroy_stream(StreamHandle stream);  // runs its work first; stays if that breaks the device
  EventHandle create_event(Device device);
  Status destroy_event(EventHandle event);
  // kInvalidValue when the two are of different devices.
  Status record_event(EventHandle event, StreamHandle stream);
  Result<bool> query_event(EventHandle event);
  // Work of size 0 is none.
  Status enqueue(const char* call, StreamHandle stream, const HostOperation& operation);
  // On a stream of the device that nobody can name: a kernel of somebody else.
  Status launch(Device device, const HostOperation& operation);
  Status synchronize(Device device);

  [[nodiscard]] std::uint64_t stream_count() const { return streams_.size(); }
  [[nodiscard]] std::uint64_t event_count() const { return events_.size(); }

 private:
  struct Stream {
    Device device;
    std::deque<HostOperation> queue;
    std::uint64_t done = 0;
  };
  struct Event {
    Device device;
    std::shared_ptr<Stream> stream;  // null: never recorded
    std::uint64_t position = 0;
  };

  Result<std::shared_ptr<Stream>> find_stream(const char* call, StreamHandle stream) const;
  Status run_all(const char* call, Stream& stream);
  Status run_one(const char* call, Stream& stream);
  Status check_legal(const char* call, const Stream& stream, const HostOperation& operation);
  Status break_context(const char* call, Device device, const std::string& why);

  const HostAddressSpace& addresses_;
  const HostRegistrations& registrations_;
  std::map<StreamHandle, std::shared_ptr<Stream>> streams_;  // in order of creation
  std::map<EventHandle, Event> events_;
  std::vector<std::shared_ptr<Stream>> kernels_;  // by device
  std::vector<std::string> broken_;               // by device; empty: it is not
  std::uint64_t last_handle_ = 0;
};

}  // namespace cumem

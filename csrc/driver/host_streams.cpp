#include "host_streams.h"

#include <cstring>
#include <limits>

namespace cumem {
namespace {

void* pointer(std::uint64_t address) { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address)); }

Status unknown(const char* call, const char* what) {
  return Status(Code::kInvalidValue, call, std::string("no such ") + what);
}

const char* name_of(HostOperation::Kind kind) {
  switch (kind) {
    case HostOperation::Kind::kCopyToHost: return "copy to the host";
    case HostOperation::Kind::kCopyToDevice: return "copy to the device";
    case HostOperation::Kind::kFill: return "fill";
  }
  return "?";
}

std::string describe(const HostOperation& operation) {
  return std::string(name_of(operation.kind)) + " of " + range_text(operation.address, operation.size);
}

void move_bytes(const HostOperation& operation) {
  void* const device = pointer(operation.address.value);
  switch (operation.kind) {
    case HostOperation::Kind::kCopyToHost: std::memcpy(pointer(operation.host), device, operation.size); break;
    case HostOperation::Kind::kCopyToDevice: std::memcpy(device, pointer(operation.host), operation.size); break;
    case HostOperation::Kind::kFill: std::memset(device, operation.byte, operation.size); break;
  }
}

Status check_wrap(const char* call, const HostOperation& operation) {
  const std::uint64_t room = std::numeric_limits<std::uint64_t>::max() - operation.size;
  if (operation.address.value <= room && operation.host <= room) return {};
  return Status(Code::kInvalidValue, call, "the range wraps around");
}

}  // namespace

HostStreams::HostStreams(int device_count, const HostAddressSpace& addresses, const HostRegistrations& registrations)
    : addresses_(addresses), registrations_(registrations), broken_(static_cast<std::size_t>(device_count)) {
  for (int i = 0; i < device_count; ++i) kernels_.push_back(std::make_shared<Stream>(Stream{Device{i}, {}, 0}));
}

// --- broken contexts ---

Status HostStreams::check_context(const char* call, Device device) const {
  const std::string& why = broken_[static_cast<std::size_t>(device.ordinal)];
  return why.empty() ? Status() : Status(Code::kContextBroken, call, why);
}

Status HostStreams::break_context(const char* call, Device device, const std::string& why) {
  broken_[static_cast<std::size_t>(device.ordinal)] =
      "illegal access of device " + std::to_string(device.ordinal) + ": " + why;
  return check_context(call, device);
}

// --- streams and events ---

StreamHandle HostStreams::create_stream(Device device) {
  const StreamHandle handle(++last_handle_);
  streams_.emplace(handle, std::make_shared<Stream>(Stream{device, {}, 0}));
  return handle;
}

Result<std::shared_ptr<HostStreams::Stream>> HostStreams::find_stream(const char* call, StreamHandle stream) const {
  const auto found = streams_.find(stream);
  if (found == streams_.end()) return unknown(call, "stream");
  CUMEM_RETURN_IF_ERROR(check_context(call, found->second->device));
  return found->second;
}

Status HostStreams::destroy_stream(StreamHandle stream) {
  auto found = find_stream("destroy_stream", stream);
  if (!found.ok()) return found.status();
  CUMEM_RETURN_IF_ERROR(run_all("destroy_stream", *found.value()));
  streams_.erase(stream);
  return {};
}

EventHandle HostStreams::create_event(Device device) {
  const EventHandle handle(++last_handle_);
  events_.emplace(handle, Event{device, nullptr, 0});
  return handle;
}

Status HostStreams::destroy_event(EventHandle event) {
  const auto found = events_.find(event);
  if (found == events_.end()) return unknown("destroy_event", "event");
  CUMEM_RETURN_IF_ERROR(check_context("destroy_event", found->second.device));
  events_.erase(found);
  return {};
}

Status HostStreams::record_event(EventHandle event, StreamHandle stream) {
  const auto found = events_.find(event);
  if (found == events_.end()) return unknown("record_event", "event");
  auto on = find_stream("record_event", stream);
  if (!on.ok()) return on.status();
  if (on.value()->device != found->second.device) {
    return Status(Code::kInvalidValue, "record_event", "the event is of another device than the stream");
  }
  found->second.stream = on.value();
  found->second.position = on.value()->done + on.value()->queue.size();
  return {};
}

Result<bool> HostStreams::query_event(EventHandle event) {
  const auto found = events_.find(event);
  if (found == events_.end()) return unknown("query_event", "event");
  CUMEM_RETURN_IF_ERROR(check_context("query_event", found->second.device));
  const Event& recorded = found->second;
  if (recorded.stream == nullptr) return true;
  if (recorded.stream->done < recorded.position) CUMEM_RETURN_IF_ERROR(run_one("query_event", *recorded.stream));
  return recorded.stream->done >= recorded.position;
}

// --- work ---

Status HostStreams::enqueue(const char* call, StreamHandle stream, const HostOperation& operation) {
  auto on = find_stream(call, stream);
  if (!on.ok()) return on.status();
  CUMEM_RETURN_IF_ERROR(check_wrap(call, operation));
  if (operation.size != 0) on.value()->queue.push_back(operation);
  return {};
}

Status HostStreams::launch(Device device, const HostOperation& operation) {
  CUMEM_RETURN_IF_ERROR(check_context("launch_fill", device));
  CUMEM_RETURN_IF_ERROR(check_wrap("launch_fill", operation));
  if (operation.size != 0) kernels_[static_cast<std::size_t>(device.ordinal)]->queue.push_back(operation);
  return {};
}

Status HostStreams::synchronize(Device device) {
  CUMEM_RETURN_IF_ERROR(check_context("synchronize", device));
  for (const auto& [handle, stream] : streams_) {
    if (stream->device == device) CUMEM_RETURN_IF_ERROR(run_all("synchronize", *stream));
  }
  return run_all("synchronize", *kernels_[static_cast<std::size_t>(device.ordinal)]);
}

Status HostStreams::run_all(const char* call, Stream& stream) {
  while (!stream.queue.empty()) CUMEM_RETURN_IF_ERROR(run_one(call, stream));
  return {};
}

Status HostStreams::run_one(const char* call, Stream& stream) {
  CUMEM_RETURN_IF_ERROR(check_legal(call, stream, stream.queue.front()));
  move_bytes(stream.queue.front());
  stream.queue.pop_front();
  ++stream.done;
  return {};
}

Status HostStreams::check_legal(const char* call, const Stream& stream, const HostOperation& operation) {
  if (!addresses_.accessible(operation.address, operation.size, stream.device)) {
    return break_context(call, stream.device, describe(operation) + ": not mapped with access for this device");
  }
  if (operation.registration != 0) {
    const auto now = registrations_.find(call, pointer(operation.host), operation.size);
    if (!now.ok() || now.value() != operation.registration) {
      return break_context(call, stream.device, describe(operation) + ": its host memory was unregistered meanwhile");
    }
  }
  return {};
}

}  // namespace cumem

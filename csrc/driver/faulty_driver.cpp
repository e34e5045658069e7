#include "faulty_driver.h"

#include <algorithm>
#include <array>
#include <utility>

namespace cumem {
namespace {

constexpr std::array kCallNames = {
    "memory_info",   "reserve",        "address_free", "create",        "release",       "map",
    "set_access",    "unmap",          "export_fd",    "import_fd",     "register_host", "unregister_host",
    "create_stream", "destroy_stream", "create_event", "destroy_event", "record_event",  "query_event",
    "copy_to_host",  "copy_to_device", "fill",         "synchronize",   "fence",
};

Status check_name(const char* caller, const std::string& call) {
  if (std::find(kCallNames.begin(), kCallNames.end(), call) != kCallNames.end()) return {};
  return Status(Code::kInvalidValue, caller, "'" + call + "' is no call of a driver");
}

Status injected(Code code, const char* call, std::uint64_t size) {
  const std::uint64_t needed = size != 0 ? size : 2 * kMiB;
  if (code == Code::kOutOfDeviceMemory) return Status::out_of_device_memory(call, needed, needed / 2);
  if (code == Code::kOutOfHostMemory) return Status::out_of_host_memory(call, needed, needed / 2, "injected fault");
  return Status(code, call, "injected fault");
}

}  // namespace

// --- orders ---

std::vector<std::string> FaultyDriver::calls() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return log_;
}

std::uint64_t FaultyDriver::failed() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return failed_;
}

Status FaultyDriver::fail_at(std::int64_t call, Code code, std::int64_t times, std::optional<std::string> only) {
  if (call < 0) return Status(Code::kInvalidValue, "fail_at", "call is negative");
  if (times <= 0 && times != kForever)
    return Status(Code::kInvalidValue, "fail_at", "times is neither positive nor -1");
  if (code == Code::kOk) return Status(Code::kInvalidValue, "fail_at", "kOk is no failure");
  if (only) CUMEM_RETURN_IF_ERROR(check_name("fail_at", *only));
  const std::lock_guard<std::mutex> lock(mutex_);
  fault_ = Fault{call, code, times, std::move(only)};
  return {};
}

void FaultyDriver::clear() {
  const std::lock_guard<std::mutex> lock(mutex_);
  log_.clear();
  fault_.reset();
  broken_ = false;
  failed_ = 0;
}

Status FaultyDriver::hold(const std::string& call) {
  CUMEM_RETURN_IF_ERROR(check_name("hold", call));
  const std::lock_guard<std::mutex> lock(mutex_);
  gates_[call].held = true;
  return {};
}

void FaultyDriver::release_gate(const std::string& call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  gates_[call] = Gate{false, 0, gates_[call].openings + 1};
  changed_.notify_all();
}

bool FaultyDriver::wait_held(const std::string& call, std::chrono::duration<double> timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, timeout, [&] { return gates_[call].waiting > 0; });
}

// --- the way of one call ---

Status FaultyDriver::arrive(const char* call, std::uint64_t size) {
  std::unique_lock<std::mutex> lock(mutex_);
  log_.emplace_back(call);
  const std::optional<Code> verdict = judge(call);
  stand_at_gate(call, lock);
  return verdict ? injected(*verdict, call, size) : Status();
}

std::optional<Code> FaultyDriver::judge(const std::string& call) {
  std::optional<Code> verdict;
  if (broken_) {
    verdict = Code::kContextBroken;
  } else if (fault_ && (!fault_->only || *fault_->only == call)) {
    if (fault_->calls_before > 0) {
      --fault_->calls_before;
    } else {
      verdict = fault_->code;
      if (fault_->times != kForever && --fault_->times == 0) fault_.reset();
    }
  }
  if (!verdict) return verdict;
  ++failed_;
  broken_ = *verdict == Code::kContextBroken;
  return verdict;
}

void FaultyDriver::stand_at_gate(const std::string& call, std::unique_lock<std::mutex>& lock) {
  const auto gate = gates_.find(call);
  if (gate == gates_.end() || !gate->second.held) return;
  ++gate->second.waiting;
  changed_.notify_all();
  const std::uint64_t before = gate->second.openings;
  changed_.wait(lock, [&] { return gate->second.openings != before; });
}

// --- the calls ---

Result<MemoryInfo> FaultyDriver::memory_info(Device device) {
  CUMEM_RETURN_IF_ERROR(arrive("memory_info"));
  return inner_->memory_info(device);
}

Result<DeviceAddress> FaultyDriver::reserve(std::uint64_t size) {
  CUMEM_RETURN_IF_ERROR(arrive("reserve", size));
  return inner_->reserve(size);
}

Status FaultyDriver::address_free(DeviceAddress address, std::uint64_t size) {
  CUMEM_RETURN_IF_ERROR(arrive("address_free", size));
  return inner_->address_free(address, size);
}

Result<PhysicalHandle> FaultyDriver::create(std::uint64_t size, const AllocationProperties& properties) {
  CUMEM_RETURN_IF_ERROR(arrive("create", size));
  return inner_->create(size, properties);
}

Status FaultyDriver::release(PhysicalHandle handle) {
  CUMEM_RETURN_IF_ERROR(arrive("release"));
  return inner_->release(handle);
}

Status FaultyDriver::map(DeviceAddress address, std::uint64_t size, PhysicalHandle handle) {
  CUMEM_RETURN_IF_ERROR(arrive("map", size));
  return inner_->map(address, size, handle);
}

Status FaultyDriver::set_access(DeviceAddress address, std::uint64_t size, const std::vector<Device>& devices) {
  CUMEM_RETURN_IF_ERROR(arrive("set_access", size));
  return inner_->set_access(address, size, devices);
}

Status FaultyDriver::unmap(DeviceAddress address, std::uint64_t size) {
  CUMEM_RETURN_IF_ERROR(arrive("unmap", size));
  return inner_->unmap(address, size);
}

Result<int> FaultyDriver::export_fd(PhysicalHandle handle) {
  CUMEM_RETURN_IF_ERROR(arrive("export_fd"));
  return inner_->export_fd(handle);
}

Result<PhysicalHandle> FaultyDriver::import_fd(int fd, std::uint64_t size) {
  CUMEM_RETURN_IF_ERROR(arrive("import_fd", size));
  return inner_->import_fd(fd, size);
}

Status FaultyDriver::register_host(void* host, std::uint64_t size) {
  CUMEM_RETURN_IF_ERROR(arrive("register_host", size));
  return inner_->register_host(host, size);
}

Status FaultyDriver::unregister_host(void* host) {
  CUMEM_RETURN_IF_ERROR(arrive("unregister_host"));
  return inner_->unregister_host(host);
}

Result<StreamHandle> FaultyDriver::create_stream(Device device) {
  CUMEM_RETURN_IF_ERROR(arrive("create_stream"));
  return inner_->create_stream(device);
}

Status FaultyDriver::destroy_stream(StreamHandle stream) {
  CUMEM_RETURN_IF_ERROR(arrive("destroy_stream"));
  return inner_->destroy_stream(stream);
}

Result<EventHandle> FaultyDriver::create_event(Device device) {
  CUMEM_RETURN_IF_ERROR(arrive("create_event"));
  return inner_->create_event(device);
}

Status FaultyDriver::destroy_event(EventHandle event) {
  CUMEM_RETURN_IF_ERROR(arrive("destroy_event"));
  return inner_->destroy_event(event);
}

Status FaultyDriver::record_event(EventHandle event, StreamHandle stream) {
  CUMEM_RETURN_IF_ERROR(arrive("record_event"));
  return inner_->record_event(event, stream);
}

Result<bool> FaultyDriver::query_event(EventHandle event) {
  CUMEM_RETURN_IF_ERROR(arrive("query_event"));
  return inner_->query_event(event);
}

Status FaultyDriver::copy_to_host(void* host, DeviceAddress device, std::uint64_t size, StreamHandle stream) {
  CUMEM_RETURN_IF_ERROR(arrive("copy_to_host", size));
  return inner_->copy_to_host(host, device, size, stream);
}

Status FaultyDriver::copy_to_device(DeviceAddress device, const void* host, std::uint64_t size, StreamHandle stream) {
  CUMEM_RETURN_IF_ERROR(arrive("copy_to_device", size));
  return inner_->copy_to_device(device, host, size, stream);
}

Status FaultyDriver::fill(DeviceAddress device, std::uint8_t byte, std::uint64_t size, StreamHandle stream) {
  CUMEM_RETURN_IF_ERROR(arrive("fill", size));
  return inner_->fill(device, byte, size, stream);
}

Status FaultyDriver::synchronize(Device device) {
  CUMEM_RETURN_IF_ERROR(arrive("synchronize"));
  return inner_->synchronize(device);
}

Status FaultyDriver::fence(Device device) {
  CUMEM_RETURN_IF_ERROR(arrive("fence"));
  return inner_->fence(device);
}

}  // namespace cumem

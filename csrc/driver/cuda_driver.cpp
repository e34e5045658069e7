#include "cuda_driver.h"

#include <cstdio>
#include <string>
#include <utility>

#include "cuda_api.h"
#include "cuda_fence.h"
#include "cuda_ledger.h"

namespace cumem {
namespace {

using Lock = std::lock_guard<std::mutex>;

bool breaks_context(CUresult result) {
  switch (static_cast<int>(result)) {
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_NVLINK_UNCORRECTABLE:
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_CONTEXT_IS_DESTROYED:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED: return true;
    default: return false;
  }
}

Code code_of(CUresult result) {
  if (breaks_context(result)) return Code::kContextBroken;
  switch (result) {
    case CUDA_SUCCESS: return Code::kOk;
    case CUDA_ERROR_OUT_OF_MEMORY: return Code::kOutOfDeviceMemory;
    case CUDA_ERROR_INVALID_VALUE:
    case CUDA_ERROR_INVALID_DEVICE:
    case CUDA_ERROR_INVALID_HANDLE:
    case CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED:
    case CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED: return Code::kInvalidValue;
    case CUDA_ERROR_NOT_SUPPORTED:
    case CUDA_ERROR_NOT_PERMITTED: return Code::kUnsupported;
    case CUDA_ERROR_DEINITIALIZED: return Code::kShuttingDown;
    default: return Code::kDriver;
  }
}

CUmemAllocationProp native(const AllocationProperties& properties) {
  CUmemAllocationProp prop = {};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = properties.device.ordinal;
  prop.requestedHandleTypes =
      properties.exportable ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE;
  prop.allocFlags.gpuDirectRDMACapable = properties.rdma ? 1 : 0;
  return prop;
}

struct StreamBox {
  CUstream stream = nullptr;
  Device device;
};

struct EventBox {
  CUevent event = nullptr;
  Device device;
};

StreamBox* box(StreamHandle handle) { return reinterpret_cast<StreamBox*>(handle.value); }
EventBox* box(EventHandle handle) { return reinterpret_cast<EventBox*>(handle.value); }

}  // namespace

struct CudaDriver::Impl {
  const CudaApi& api;
  std::mutex mutex;  // of what follows; never held across a driver call
  std::map<Device, CUcontext> contexts;
  std::map<Device, std::unique_ptr<CudaFence>> fences;
  DriverCounts counts;  // of registrations, streams and events; the ledger has the rest
  CudaLedger ledger;    // locks for itself

  explicit Impl(const CudaApi& table) : api(table) {}

  Status status(CUresult result, const char* call) const {
    if (result == CUDA_SUCCESS) return {};
    const char* name = nullptr;
    const char* text = nullptr;
    (void)api.cuGetErrorName(result, &name);
    (void)api.cuGetErrorString(result, &text);
    return Status(code_of(result), call, std::string(name ? name : "?") + ", " + (text ? text : "unknown error"),
                  result);
  }

  // While the process exits the driver may be gone, and with it whatever was to be given back.
  Status teardown(CUresult result, const char* call) const {
    return result == CUDA_ERROR_DEINITIALIZED ? Status() : status(result, call);
  }

  Result<CUcontext> context(Device device) {
    {
      const Lock lock(mutex);
      const auto it = contexts.find(device);
      if (it != contexts.end()) return it->second;
    }
    CUcontext context = nullptr;
    CUMEM_RETURN_IF_ERROR(status(api.cuDevicePrimaryCtxRetain(&context, device.ordinal), "cuDevicePrimaryCtxRetain"));
    const Lock lock(mutex);
    contexts.emplace(device, context);
    return context;
  }

  CudaFence& fence(Device device) {
    const Lock lock(mutex);
    std::unique_ptr<CudaFence>& slot = fences[device];
    if (!slot) slot = std::make_unique<CudaFence>(api);
    return *slot;
  }

  // A device whose context exists: for calls that need some context, whichever.
  Device any_device() {
    const Lock lock(mutex);
    return contexts.empty() ? Device{0} : contexts.begin()->first;
  }

  void count(std::uint64_t DriverCounts::* field, std::int64_t change) {
    const Lock lock(mutex);
    counts.*field += static_cast<std::uint64_t>(change);
  }
};

namespace {

// A device's context, current on this thread, with relaxed capture mode: our calls are then legal beside a capture and
// do not invalidate it. Both are put back at the end.
template <typename Impl>
class Scope {
 public:
  Scope(Impl& impl, Device device) : impl_(impl) {
    auto context = impl.context(device);
    status_ = context.status();
    if (!status_.ok()) return;
    status_ = impl.status(impl.api.cuCtxPushCurrent(context.value()), "cuCtxPushCurrent");
    pushed_ = status_.ok();
    exchanged_ = pushed_ && impl.api.cuThreadExchangeStreamCaptureMode(&mode_) == CUDA_SUCCESS;
  }
  explicit Scope(Impl& impl) : Scope(impl, impl.any_device()) {}
  ~Scope() {
    if (exchanged_) (void)impl_.api.cuThreadExchangeStreamCaptureMode(&mode_);
    CUcontext popped = nullptr;
    if (pushed_) (void)impl_.api.cuCtxPopCurrent(&popped);
  }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

  [[nodiscard]] const Status& status() const { return status_; }

 private:
  Impl& impl_;
  Status status_;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
  bool pushed_ = false;
  bool exchanged_ = false;
};

}  // namespace

#define CUMEM_ENTER(...)          \
  const Scope scope(__VA_ARGS__); \
  if (!scope.status().ok()) return scope.status()

CudaDriver::CudaDriver(std::unique_ptr<Impl> impl, int device_count)
    : impl_(std::move(impl)), device_count_(device_count) {}

CudaDriver::~CudaDriver() = default;  // contexts stay: torch uses them

Result<std::shared_ptr<CudaDriver>> CudaDriver::create() {
  auto api = cuda_api();
  if (!api.ok()) return api.status();
  auto impl = std::make_unique<Impl>(*api.value());
  int count = 0;
  CUMEM_RETURN_IF_ERROR(impl->status(api.value()->cuDeviceGetCount(&count), "cuDeviceGetCount"));
  std::shared_ptr<CudaDriver> driver(new CudaDriver(std::move(impl), count));
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    const auto properties = driver->properties(Device{ordinal});
    if (properties.ok() && properties.value().virtual_memory) return driver;
  }
  return Status(Code::kUnsupported, "cuda_driver",
                "none of the " + std::to_string(count) + " visible devices supports virtual memory management");
}

DriverCounts CudaDriver::counts() const {
  DriverCounts counts = impl_->ledger.counts();
  const Lock lock(impl_->mutex);
  counts.registrations = impl_->counts.registrations;
  counts.streams = impl_->counts.streams;
  counts.events = impl_->counts.events;
  return counts;
}

Result<DeviceProperties> CudaDriver::properties(Device device) {
  const CudaApi& api = impl_->api;
  const auto attribute = [&](CUdevice_attribute which) {
    int value = 0;
    return api.cuDeviceGetAttribute(&value, which, device.ordinal) == CUDA_SUCCESS ? value : 0;
  };
  DeviceProperties properties;
  char name[256] = {};
  CUMEM_RETURN_IF_ERROR(impl_->status(api.cuDeviceGetName(name, sizeof(name), device.ordinal), "cuDeviceGetName"));
  properties.name = name;
  std::size_t total = 0;
  CUMEM_RETURN_IF_ERROR(impl_->status(api.cuDeviceTotalMem(&total, device.ordinal), "cuDeviceTotalMem"));
  properties.total_bytes = total;
  CUuuid uuid = {};
  if (api.cuDeviceGetUuid(&uuid, device.ordinal) == CUDA_SUCCESS) {
    properties.uuid = "GPU-";
    for (int i = 0; i < 16; ++i) {
      char hex[3];
      std::snprintf(hex, sizeof(hex), "%02x", static_cast<unsigned>(static_cast<unsigned char>(uuid.bytes[i])));
      if (i == 4 || i == 6 || i == 8 || i == 10) properties.uuid += '-';
      properties.uuid += hex;
    }
  }
  properties.integrated = attribute(CU_DEVICE_ATTRIBUTE_INTEGRATED) != 0;
  properties.exportable = attribute(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) != 0;
  properties.rdma = attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED) != 0;
  if (attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) == 0) return properties;
  const CUmemAllocationProp prop = native({device, false, false});
  std::size_t granularity = 0;
  const CUresult result = api.cuMemGetAllocationGranularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
  properties.virtual_memory = result == CUDA_SUCCESS && granularity > 0;
  properties.granularity_bytes = granularity;
  return properties;
}

Result<MemoryInfo> CudaDriver::memory_info(Device device) {
  CUMEM_ENTER(*impl_, device);
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  CUMEM_RETURN_IF_ERROR(impl_->status(impl_->api.cuMemGetInfo(&free_bytes, &total_bytes), "cuMemGetInfo"));
  return MemoryInfo{free_bytes, total_bytes};
}

Result<bool> CudaDriver::can_access_peer(Device from, Device to) {
  if (from == to) return false;
  int can = 0;
  const CUresult result = impl_->api.cuDeviceCanAccessPeer(&can, from.ordinal, to.ordinal);
  return result == CUDA_SUCCESS && can != 0;
}

Result<DeviceAddress> CudaDriver::reserve(std::uint64_t size) {
  CUMEM_ENTER(*impl_);
  CUdeviceptr address = 0;
  CUMEM_RETURN_IF_ERROR(impl_->status(impl_->api.cuMemAddressReserve(&address, size, 0, 0, 0), "cuMemAddressReserve"));
  impl_->ledger.add_range(DeviceAddress(address), size);
  return DeviceAddress(address);
}

Status CudaDriver::address_free(DeviceAddress address, std::uint64_t size) {
  CUMEM_ENTER(*impl_);
  CUMEM_RETURN_IF_ERROR(impl_->ledger.take_range(address, size));
  Status status = impl_->teardown(impl_->api.cuMemAddressFree(address.value, size), "cuMemAddressFree");
  if (!status.ok()) impl_->ledger.add_range(address, size);
  return status;
}

Result<PhysicalHandle> CudaDriver::create(std::uint64_t size, const AllocationProperties& properties) {
  CUMEM_ENTER(*impl_, properties.device);
  const CUmemAllocationProp prop = native(properties);
  CUmemGenericAllocationHandle handle = 0;
  const CUresult result = impl_->api.cuMemCreate(&handle, size, &prop, 0);
  if (result == CUDA_ERROR_OUT_OF_MEMORY) {
    const auto info = memory_info(properties.device);
    return Status::out_of_device_memory("cuMemCreate", size, info.ok() ? info.value().free_bytes : 0, result);
  }
  CUMEM_RETURN_IF_ERROR(impl_->status(result, "cuMemCreate"));
  impl_->ledger.add_handle(PhysicalHandle(handle), {size, properties.exportable});
  return PhysicalHandle(handle);
}

Status CudaDriver::release(PhysicalHandle handle) {
  CUMEM_ENTER(*impl_);
  const auto taken = impl_->ledger.take_handle(handle);
  if (!taken.ok()) return taken.status();
  Status status = impl_->teardown(impl_->api.cuMemRelease(handle.value), "cuMemRelease");
  if (!status.ok()) impl_->ledger.add_handle(handle, taken.value());
  return status;
}

Status CudaDriver::map(DeviceAddress address, std::uint64_t size, PhysicalHandle handle) {
  CUMEM_ENTER(*impl_);
  CUMEM_RETURN_IF_ERROR(impl_->ledger.add_mapping(address, size, handle));
  Status status = impl_->status(impl_->api.cuMemMap(address.value, size, 0, handle.value, 0), "cuMemMap");
  if (!status.ok()) (void)impl_->ledger.take_mappings(address, size);
  return status;
}

Status CudaDriver::set_access(DeviceAddress address, std::uint64_t size, const std::vector<Device>& devices) {
  CUMEM_ENTER(*impl_);
  CUMEM_RETURN_IF_ERROR(impl_->ledger.check_mapped(address, size));
  if (devices.empty())
    return Status(Code::kInvalidValue, "cuMemSetAccess", "no device is named", CUDA_ERROR_INVALID_VALUE);
  std::vector<CUmemAccessDesc> access(devices.size());
  for (std::size_t i = 0; i < devices.size(); ++i) {
    access[i].location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access[i].location.id = devices[i].ordinal;
    access[i].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  }
  return impl_->status(impl_->api.cuMemSetAccess(address.value, size, access.data(), access.size()), "cuMemSetAccess");
}

Status CudaDriver::unmap(DeviceAddress address, std::uint64_t size) {
  CUMEM_ENTER(*impl_);
  const auto taken = impl_->ledger.take_mappings(address, size);
  if (!taken.ok()) return taken.status();
  Status status = impl_->teardown(impl_->api.cuMemUnmap(address.value, size), "cuMemUnmap");
  if (!status.ok()) impl_->ledger.put_back(taken.value());
  return status;
}

Result<int> CudaDriver::export_fd(PhysicalHandle handle) {
  CUMEM_ENTER(*impl_);
  CUMEM_RETURN_IF_ERROR(impl_->ledger.check_exportable(handle));
  int fd = -1;
  CUMEM_RETURN_IF_ERROR(impl_->status(
      impl_->api.cuMemExportToShareableHandle(&fd, handle.value, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
      "cuMemExportToShareableHandle"));
  return fd;
}

Result<PhysicalHandle> CudaDriver::import_fd(int fd, std::uint64_t size) {
  CUMEM_ENTER(*impl_);
  CUmemGenericAllocationHandle handle = 0;
  void* os_handle = reinterpret_cast<void*>(static_cast<std::intptr_t>(fd));
  CUMEM_RETURN_IF_ERROR(impl_->status(
      impl_->api.cuMemImportFromShareableHandle(&handle, os_handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
      "cuMemImportFromShareableHandle"));
  impl_->ledger.add_handle(PhysicalHandle(handle), {size, false});
  return PhysicalHandle(handle);
}

Status CudaDriver::register_host(void* host, std::uint64_t size) {
  CUMEM_ENTER(*impl_);
  const CUresult result = impl_->api.cuMemHostRegister(host, size, CU_MEMHOSTREGISTER_PORTABLE);
  if (result == CUDA_ERROR_OUT_OF_MEMORY) {
    return Status::out_of_host_memory("cuMemHostRegister", size, 0, "the system pins no more memory");
  }
  CUMEM_RETURN_IF_ERROR(impl_->status(result, "cuMemHostRegister"));
  impl_->count(&DriverCounts::registrations, 1);
  return {};
}

Status CudaDriver::unregister_host(void* host) {
  CUMEM_ENTER(*impl_);
  CUMEM_RETURN_IF_ERROR(impl_->teardown(impl_->api.cuMemHostUnregister(host), "cuMemHostUnregister"));
  impl_->count(&DriverCounts::registrations, -1);
  return {};
}

Result<StreamHandle> CudaDriver::create_stream(Device device) {
  CUMEM_ENTER(*impl_, device);
  auto made = std::make_unique<StreamBox>();
  made->device = device;
  CUMEM_RETURN_IF_ERROR(
      impl_->status(impl_->api.cuStreamCreate(&made->stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate"));
  impl_->count(&DriverCounts::streams, 1);
  return StreamHandle(reinterpret_cast<std::uint64_t>(made.release()));
}

Status CudaDriver::destroy_stream(StreamHandle stream) {
  CUMEM_ENTER(*impl_, box(stream)->device);
  CUMEM_RETURN_IF_ERROR(impl_->teardown(impl_->api.cuStreamDestroy(box(stream)->stream), "cuStreamDestroy"));
  impl_->count(&DriverCounts::streams, -1);
  delete box(stream);
  return {};
}

Result<EventHandle> CudaDriver::create_event(Device device) {
  CUMEM_ENTER(*impl_, device);
  auto made = std::make_unique<EventBox>();
  made->device = device;
  CUMEM_RETURN_IF_ERROR(
      impl_->status(impl_->api.cuEventCreate(&made->event, CU_EVENT_DISABLE_TIMING), "cuEventCreate"));
  impl_->count(&DriverCounts::events, 1);
  return EventHandle(reinterpret_cast<std::uint64_t>(made.release()));
}

Status CudaDriver::destroy_event(EventHandle event) {
  CUMEM_ENTER(*impl_, box(event)->device);
  CUMEM_RETURN_IF_ERROR(impl_->teardown(impl_->api.cuEventDestroy(box(event)->event), "cuEventDestroy"));
  impl_->count(&DriverCounts::events, -1);
  delete box(event);
  return {};
}

Status CudaDriver::record_event(EventHandle event, StreamHandle stream) {
  CUMEM_ENTER(*impl_, box(event)->device);
  if (box(event)->device != box(stream)->device) {
    return Status(Code::kInvalidValue, "cuEventRecord", "the event is of another device than the stream",
                  CUDA_ERROR_INVALID_HANDLE);
  }
  return impl_->status(impl_->api.cuEventRecord(box(event)->event, box(stream)->stream), "cuEventRecord");
}

Result<bool> CudaDriver::query_event(EventHandle event) {
  CUMEM_ENTER(*impl_, box(event)->device);
  const CUresult result = impl_->api.cuEventQuery(box(event)->event);
  if (result == CUDA_ERROR_NOT_READY) return false;
  CUMEM_RETURN_IF_ERROR(impl_->status(result, "cuEventQuery"));
  return true;
}

Status CudaDriver::copy_to_host(void* host, DeviceAddress device, std::uint64_t size, StreamHandle stream) {
  CUMEM_ENTER(*impl_, box(stream)->device);
  return impl_->status(impl_->api.cuMemcpyDtoHAsync(host, device.value, size, box(stream)->stream),
                       "cuMemcpyDtoHAsync");
}

Status CudaDriver::copy_to_device(DeviceAddress device, const void* host, std::uint64_t size, StreamHandle stream) {
  CUMEM_ENTER(*impl_, box(stream)->device);
  return impl_->status(impl_->api.cuMemcpyHtoDAsync(device.value, host, size, box(stream)->stream),
                       "cuMemcpyHtoDAsync");
}

Status CudaDriver::fill(DeviceAddress device, std::uint8_t byte, std::uint64_t size, StreamHandle stream) {
  CUMEM_ENTER(*impl_, box(stream)->device);
  return impl_->status(impl_->api.cuMemsetD8Async(device.value, byte, size, box(stream)->stream), "cuMemsetD8Async");
}

Status CudaDriver::synchronize(Device device) {
  CUMEM_ENTER(*impl_, device);
  return impl_->status(impl_->api.cuCtxSynchronize(), "cuCtxSynchronize");
}

Status CudaDriver::fence(Device device) {
  CUMEM_ENTER(*impl_, device);
  return impl_->status(impl_->fence(device).wait(), "fence (cuMemFree)");
}

bool CudaDriver::is_capturing(std::uint64_t native_stream) {
  const Scope scope(*impl_);
  if (!scope.status().ok()) return false;
  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUresult result = impl_->api.cuStreamIsCapturing(reinterpret_cast<CUstream>(native_stream), &capture);
  // The default stream cannot be asked while a capture forbids its implicit use.
  return result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT || capture != CU_STREAM_CAPTURE_STATUS_NONE;
}

}  // namespace cumem

#include "dlpack.h"

#include <cstdint>
#include <utility>

namespace py = pybind11;

namespace cumem {
namespace {

// The DLPack 0.x ABI, as its specification lays it out.
struct DlDevice {
  std::int32_t type;
  std::int32_t id;
};
struct DlDataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};
struct DlTensor {
  void* data;
  DlDevice device;
  std::int32_t ndim;
  DlDataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};
struct DlManagedTensor {
  DlTensor tensor;
  void* context;
  void (*deleter)(DlManagedTensor*);
};

constexpr std::int32_t kDlCpu = 1;
constexpr std::int32_t kDlCuda = 2;
constexpr std::uint8_t kDlUnsigned = 1;
constexpr const char* kName = "dltensor";  // a consumer renames it and takes the deleter over

// The managed tensor together with what it keeps alive.
template <typename Keep>
struct Box {
  DlManagedTensor managed{};
  std::int64_t shape = 0;
  std::int64_t stride = 1;
  Keep keep;

  explicit Box(Keep held) : keep(std::move(held)) {}
  static void destroy(DlManagedTensor* managed) { delete static_cast<Box*>(managed->context); }
};

void destroy_unconsumed(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, kName) == 0) return;
  auto* managed = static_cast<DlManagedTensor*>(PyCapsule_GetPointer(capsule, kName));
  managed->deleter(managed);
}

template <typename Keep>
py::capsule make(Keep keep, void* data, std::uint64_t length, DlDevice device) {
  auto box = std::make_unique<Box<Keep>>(std::move(keep));
  box->shape = static_cast<std::int64_t>(length);
  box->managed.tensor = {data, device, 1, {kDlUnsigned, 8, 1}, &box->shape, &box->stride, 0};
  box->managed.context = box.get();
  box->managed.deleter = &Box<Keep>::destroy;
  PyObject* capsule = PyCapsule_New(&box->managed, kName, &destroy_unconsumed);
  if (capsule == nullptr) throw py::error_already_set();
  (void)box.release();
  return py::reinterpret_steal<py::capsule>(capsule);
}

}  // namespace

py::capsule block_capsule(std::unique_ptr<BlockHold> block, MemoryKind kind) {
  void* data = reinterpret_cast<void*>(block->address().value);
  const std::uint64_t length = block->size();
  const DlDevice device = kind == MemoryKind::kCuda ? DlDevice{kDlCuda, block->device().ordinal} : DlDevice{kDlCpu, 0};
  return make(std::move(block), data, length, device);
}

py::capsule host_capsule(HostRange range, std::uint64_t length) {
  void* data = range.data;
  return make(std::move(range.block), data, length, DlDevice{kDlCpu, 0});
}

}  // namespace cumem

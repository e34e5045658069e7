#include "torch_shim.h"

#include <array>
#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "process.h"

namespace cumem {
namespace {

using Lock = std::lock_guard<std::mutex>;

struct Entry {
  std::shared_ptr<Core> core;
  SlotId slot;
  std::mutex mutex;
  Status error;  // mutex's
};

// Written once each, in order, before its address is given to anyone.
std::array<std::atomic<Entry*>, kTorchEntries> entries{};
std::mutex entries_mutex;
int entry_count = 0;  // entries_mutex's

// All distinct cores that have an entry; only ever grows, so that readers need no lock for a prefix they have seen.
std::array<std::atomic<Core*>, kTorchEntries> cores{};
std::atomic<int> core_count{0};

void* allocate(int index, std::size_t size, int device, void* stream) {
  Entry* entry = entries[static_cast<std::size_t>(index)].load();
  if (entry == nullptr || is_forked_child()) return nullptr;
  Core& core = *entry->core;
  const bool captured = core.driver()->is_capturing(reinterpret_cast<std::uint64_t>(stream));
  auto made = core.malloc(entry->slot, size, Device{device}, false, captured);
  if (made.ok()) return reinterpret_cast<void*>(made.value().value);
  if (made.status().code() != Code::kOutOfDeviceMemory) {
    const Lock lock(entry->mutex);
    entry->error = made.status();
  }
  return nullptr;
}

void deallocate(void* pointer, std::size_t, int, void* stream) {
  if (pointer == nullptr || !may_call_driver()) return;
  const DeviceAddress address(reinterpret_cast<std::uint64_t>(pointer));
  for (int i = 0; i < core_count.load(); ++i) {
    Core& core = *cores[static_cast<std::size_t>(i)].load();
    if (!core.find(address)) continue;
    const bool capturing = core.driver()->is_capturing(reinterpret_cast<std::uint64_t>(stream));
    // What cannot go now is on the core's dead list, counted, for the next chance.
    (void)(capturing ? core.free_later(address) : core.free(address));
    return;
  }
}

template <int Index>
void* malloc_of(std::size_t size, int device, void* stream) {
  return allocate(Index, size, device, stream);
}

template <int... Index>
constexpr std::array<TorchMalloc, sizeof...(Index)> make_mallocs(std::integer_sequence<int, Index...>) {
  return {&malloc_of<Index>...};
}

constexpr auto kMallocs = make_mallocs(std::make_integer_sequence<int, kTorchEntries>());

void remember_core(Core* core) {
  const int count = core_count.load();
  for (int i = 0; i < count; ++i) {
    if (cores[static_cast<std::size_t>(i)].load() == core) return;
  }
  cores[static_cast<std::size_t>(count)].store(core);
  core_count.store(count + 1);
}

}  // namespace

Result<int> add_torch_entry(std::shared_ptr<Core> core, SlotId slot) {
  const Lock lock(entries_mutex);
  if (entry_count == kTorchEntries) {
    return Status(Code::kUnsupported, "region",
                  "all " + std::to_string(kTorchEntries) + " (allocator, tag) entries of this process are taken");
  }
  remember_core(core.get());
  auto* entry = new Entry;  // never given back
  entry->core = std::move(core);
  entry->slot = slot;
  entries[static_cast<std::size_t>(entry_count)].store(entry);
  return entry_count++;
}

TorchMalloc torch_malloc(int entry) { return kMallocs[static_cast<std::size_t>(entry)]; }

TorchFree torch_free() { return &deallocate; }

Status take_torch_error(int entry) {
  Entry* found = entries[static_cast<std::size_t>(entry)].load();
  if (found == nullptr) return {};
  const Lock lock(found->mutex);
  return std::exchange(found->error, Status());
}

}  // namespace cumem

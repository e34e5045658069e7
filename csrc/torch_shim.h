// What torch calls: a malloc for each slot, and one free. Plain C functions whose addresses torch is given; this file
// knows no torch header.
//
// The tag must come with the pool, and torch passes a malloc nothing but size, device and stream. So each (allocator,
// tag) owns an entry of a table of mallocs made by a template. free looks up by address. Sizes come from our table,
// never from the caller, and the stream orders nothing: it is torch's current stream, not the block's.
//
// Both run with torch's allocator mutex held, on any thread, with or without the GIL, at exit too. They never take the
// GIL, never wait for a transition, and call nothing of torch. Lock order: GIL -> torch's mutex -> arena -> table.
//
// Entries and the cores behind them are never given back: torch may free long after the allocator is gone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "core.h"

namespace cumem {

inline constexpr int kTorchEntries = 1024;

using TorchMalloc = void* (*)(std::size_t size, int device, void* stream);
using TorchFree = void (*)(void* pointer, std::size_t size, int device, void* stream);

// An entry for a core's slot. kUnsupported once all are taken.
Result<int> add_torch_entry(std::shared_ptr<Core> core, SlotId slot);

// pre: 0 <= entry < kTorchEntries.
[[nodiscard]] TorchMalloc torch_malloc(int entry);
[[nodiscard]] TorchFree torch_free();

// Why the entry's last malloc gave null, if that was not for lack of memory (which torch reports by itself); then
// forgotten.
[[nodiscard]] Status take_torch_error(int entry);

}  // namespace cumem

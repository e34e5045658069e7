// DLPack capsules over our memory: uint8, one dimension. Their deleters are plain C: no GIL, no driver call.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "../backups.h"
#include "../core.h"

namespace cumem {

// Over a block: the block lives until the capsule, or the tensor made from it, dies.
pybind11::capsule block_capsule(std::unique_ptr<BlockHold> block, MemoryKind kind);

// Over a backup in host memory, which it keeps alive.
pybind11::capsule host_capsule(HostRange range, std::uint64_t length);

}  // namespace cumem

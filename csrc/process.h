// What this process is to its driver objects: the one that made them, a fork of it, or one that is exiting.
#pragma once

#include <memory>

namespace cumem {

// From now on deleters leak instead of calling the driver, which may be gone. Never undone.
void mark_exiting();

// Whether a deleter may call the driver: not exiting, and not a forked child, whose driver objects are its parent's.
[[nodiscard]] bool may_call_driver();

// Whether this is a fork of the process that loaded the library.
[[nodiscard]] bool is_forked_child();

// Keeps the object for ever, where its end would leave a dangling page. Takes no lock.
void leak(std::shared_ptr<const void> object);

}  // namespace cumem

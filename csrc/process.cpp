#include "process.h"

#include <unistd.h>

#include <atomic>

namespace cumem {
namespace {

std::atomic<bool> exiting{false};
const pid_t loader = getpid();

}  // namespace

void mark_exiting() { exiting.store(true); }

bool is_forked_child() { return getpid() != loader; }

bool may_call_driver() { return !exiting.load() && !is_forked_child(); }

}  // namespace cumem

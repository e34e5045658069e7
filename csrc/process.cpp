#include "process.h"

#include <unistd.h>

#include <atomic>
#include <utility>

namespace cumem {
namespace {

struct Leaked {
  std::shared_ptr<const void> object;
  Leaked* next = nullptr;
};

std::atomic<Leaked*> leaked{nullptr};  // all that was leaked stays reachable from here: leak checkers report it not
std::atomic<bool> exiting{false};
const pid_t kLoader = getpid();

}  // namespace

void mark_exiting() { exiting.store(true); }

bool is_forked_child() { return getpid() != kLoader; }

bool may_call_driver() { return !exiting.load() && !is_forked_child(); }

void leak(std::shared_ptr<const void> object) {
  auto* const node = new Leaked{std::move(object), leaked.load()};
  while (!leaked.compare_exchange_weak(node->next, node)) {
  }
}

}  // namespace cumem

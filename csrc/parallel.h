// for_each_index: the same work for many indices on a few threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <system_error>
#include <thread>
#include <vector>

namespace cumem {

// Calls work(0) to work(count - 1), each once, on at most `threads` threads of which the caller's is one; returns when
// all are done. `work` throws nothing.
template <typename Work>
void for_each_index(unsigned threads, std::size_t count, Work work) {
  std::atomic<std::size_t> next{0};
  const auto loop = [&] {
    for (std::size_t i = next++; i < count; i = next++) work(i);
  };
  std::vector<std::thread> others;
  for (std::size_t i = 1; i < std::min<std::size_t>(threads, count); ++i) {
    try {
      others.emplace_back(loop);
    } catch (const std::system_error&) {
      break;  // the system gives no more threads: those there are do the work
    }
  }
  loop();
  for (std::thread& other : others) other.join();
}

}  // namespace cumem

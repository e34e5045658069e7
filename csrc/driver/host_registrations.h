// Host memory that the host driver was told to pin.
//
// Invariant: registrations do not overlap. Ids are never reused: memory that was unregistered and registered again is
// another registration. Threads: not locked; the owner does.
#pragma once

#include <cstdint>
#include <map>

#include "../status.h"

namespace cumem {

class HostRegistrations {
 public:
  // kInvalidValue: empty, overlapping, or not all of it mapped memory of the process.
  Status add(const void* host, std::uint64_t size);
  // kInvalidValue unless a registration begins at `host`.
  Status remove(const void* host);

  // The id of the registration that holds all of [host, host + size), 0 if the range touches none. kInvalidValue if it
  // crosses into or out of one.
  Result<std::uint64_t> find(const char* call, const void* host, std::uint64_t size) const;

  [[nodiscard]] std::uint64_t count() const { return by_address_.size(); }

 private:
  struct Registration {
    std::uint64_t size;
    std::uint64_t id;
  };
  std::map<std::uint64_t, Registration> by_address_;
  std::uint64_t last_id_ = 0;
};

}  // namespace cumem

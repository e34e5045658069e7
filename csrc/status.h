// Status and Result<T>: how everything below the binding says what went wrong. No exception crosses this layer,
// no error is kept anywhere but in the value returned.
#pragma once

#include <cassert>
#include <cstdint>
#include <string>
#include <utility>
#include <variant>

namespace cumem {

enum class Code {
  kOk,
  kOutOfDeviceMemory,  // needed_bytes, free_bytes
  kOutOfHostMemory,    // needed_bytes, free_bytes
  kInvalidValue,       // an argument that the callee refuses; nothing changed
  kBusy,               // a wait reached its deadline; nothing changed
  kContextBroken,      // the device's context is contaminated; it never recovers in this process
  kUnsupported,        // this machine or driver cannot
  kNotFound,           // no such address, segment or extent
  kWrongState,         // legal in another state
  kShuttingDown,       // the driver is deinitialised: the process is exiting
  kDriver,             // any other driver error; raw holds its code
};

[[nodiscard]] const char* code_name(Code code);

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string call, std::string message, std::int64_t raw = 0)
      : code_(code), raw_(raw), call_(std::move(call)), message_(std::move(message)) {}

  static Status out_of_device_memory(std::string call, std::uint64_t needed_bytes, std::uint64_t free_bytes,
                                     std::int64_t raw = 0) {
    Status s(Code::kOutOfDeviceMemory, std::move(call), "out of device memory", raw);
    s.needed_bytes_ = needed_bytes;
    s.free_bytes_ = free_bytes;
    return s;
  }
  static Status out_of_host_memory(std::string call, std::uint64_t needed_bytes, std::uint64_t free_bytes,
                                   std::string limit) {
    Status s(Code::kOutOfHostMemory, std::move(call), std::move(limit));
    s.needed_bytes_ = needed_bytes;
    s.free_bytes_ = free_bytes;
    return s;
  }

  static Status busy(std::string call, std::string message, double timeout_s) {
    Status s(Code::kBusy, std::move(call), std::move(message));
    s.timeout_s_ = timeout_s;
    return s;
  }

  [[nodiscard]] bool ok() const { return code_ == Code::kOk; }
  [[nodiscard]] Code code() const { return code_; }
  [[nodiscard]] std::int64_t raw() const { return raw_; }          // the driver's own code, 0 if none
  [[nodiscard]] const std::string& call() const { return call_; }  // the call that failed, "cuMemCreate"
  [[nodiscard]] const std::string& message() const { return message_; }
  [[nodiscard]] std::uint64_t needed_bytes() const { return needed_bytes_; }
  [[nodiscard]] std::uint64_t free_bytes() const { return free_bytes_; }
  [[nodiscard]] double timeout_s() const { return timeout_s_; }  // the deadline that was reached, 0 if none

 private:
  Code code_ = Code::kOk;
  std::int64_t raw_ = 0;
  std::uint64_t needed_bytes_ = 0;
  std::uint64_t free_bytes_ = 0;
  double timeout_s_ = 0;
  std::string call_;
  std::string message_;
};

// A T or the Status that says why there is none. Invariant: status().ok() == has_value().
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : held_(std::move(value)) {}        // NOLINT(google-explicit-constructor)
  Result(Status status) : held_(std::move(status)) {  // NOLINT(google-explicit-constructor)
    assert(!std::get<Status>(held_).ok());
  }

  [[nodiscard]] bool ok() const { return std::holds_alternative<T>(held_); }
  [[nodiscard]] Status status() const { return ok() ? Status() : std::get<Status>(held_); }
  [[nodiscard]] T& value() & { return std::get<T>(held_); }
  [[nodiscard]] const T& value() const& { return std::get<T>(held_); }
  [[nodiscard]] T&& value() && { return std::get<T>(std::move(held_)); }

 private:
  std::variant<T, Status> held_;
};

// Returns the status from the enclosing function if it is not ok.
#define CUMEM_RETURN_IF_ERROR(expression)                                      \
  do {                                                                         \
    if (::cumem::Status status_ = (expression); !status_.ok()) return status_; \
  } while (false)

}  // namespace cumem

#include "status.h"

namespace cumem {

const char* code_name(Code code) {
  switch (code) {
    case Code::kOk: return "ok";
    case Code::kOutOfDeviceMemory: return "out_of_device_memory";
    case Code::kOutOfHostMemory: return "out_of_host_memory";
    case Code::kInvalidValue: return "invalid_value";
    case Code::kBusy: return "busy";
    case Code::kContextBroken: return "context_broken";
    case Code::kUnsupported: return "unsupported";
    case Code::kNotFound: return "not_found";
    case Code::kWrongState: return "wrong_state";
    case Code::kShuttingDown: return "shutting_down";
    case Code::kDriver: return "driver";
  }
  return "unknown";
}

}  // namespace cumem

#include "cuda_api.h"

#include <dlfcn.h>

#include <string>

namespace cumem {
namespace {

constexpr int kAbiVersion = 12000;

using GetProcAddress = CUresult (*)(const char*, void**, int, cuuint64_t, CUdriverProcAddressQueryResult*);

Status missing(const std::string& what) { return Status(Code::kUnsupported, "libcuda", what); }

// <cuda.h> renames some functions by macro ("cuMemGetInfo" -> "cuMemGetInfo_v2"); cuGetProcAddress wants the plain
// name.
std::string plain_name(std::string name) {
  const auto suffix = name.rfind("_v2");
  if (suffix != std::string::npos && suffix + 3 == name.size()) name.erase(suffix);
  return name;
}

template <typename Function>
Status resolve(GetProcAddress get, const char* name, Function& slot) {
  void* address = nullptr;
  CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  const std::string plain = plain_name(name);
  const CUresult result = get(plain.c_str(), &address, kAbiVersion, CU_GET_PROC_ADDRESS_DEFAULT, &found);
  if (result != CUDA_SUCCESS || address == nullptr) return missing("this driver has no " + plain);
  slot = reinterpret_cast<Function>(address);
  return {};
}

Status load(CudaApi& api) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return missing("libcuda.so.1 cannot be opened: no NVIDIA driver is installed");
  const auto get = reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress_v2"));
  if (get == nullptr) return missing("the NVIDIA driver is older than CUDA 12.0");
#define CUMEM_STRING(name) #name
#define CUMEM_RESOLVE(name) CUMEM_RETURN_IF_ERROR(resolve(get, CUMEM_STRING(name), api.name));
  CUMEM_CUDA_ENTRY_POINTS(CUMEM_RESOLVE)
#undef CUMEM_RESOLVE
#undef CUMEM_STRING
  const CUresult result = api.cuInit(0);
  if (result != CUDA_SUCCESS) {
    return missing("cuInit failed with code " + std::to_string(static_cast<int>(result)) + ": no usable GPU");
  }
  return {};
}

struct Loaded {
  CudaApi api;
  Status status;
  Loaded() : status(load(api)) {}
};

}  // namespace

Result<const CudaApi*> cuda_api() {
  static const Loaded* const loaded = new Loaded;  // never destroyed: deleters may run late
  if (!loaded->status.ok()) return loaded->status;
  return &loaded->api;
}

}  // namespace cumem

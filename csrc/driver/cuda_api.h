// The libcuda entry points that CudaDriver uses, resolved at run time at the ABI compiled for. Included by
// cuda_driver.* only.
#pragma once

#include <cuda.h>

#include "../status.h"

namespace cumem {

// name, as in <cuda.h>. All of them have had one ABI since CUDA 12.0 (kAbiVersion), so a 12.x and a 13.x driver give
// the same.
#define CUMEM_CUDA_ENTRY_POINTS(X)     \
  X(cuInit)                            \
  X(cuDriverGetVersion)                \
  X(cuGetErrorName)                    \
  X(cuGetErrorString)                  \
  X(cuDeviceGetCount)                  \
  X(cuDeviceGet)                       \
  X(cuDeviceGetName)                   \
  X(cuDeviceGetUuid)                   \
  X(cuDeviceTotalMem)                  \
  X(cuDeviceGetAttribute)              \
  X(cuDeviceCanAccessPeer)             \
  X(cuDevicePrimaryCtxRetain)          \
  X(cuCtxPushCurrent)                  \
  X(cuCtxPopCurrent)                   \
  X(cuCtxSynchronize)                  \
  X(cuThreadExchangeStreamCaptureMode) \
  X(cuMemAlloc)                        \
  X(cuMemFree)                         \
  X(cuMemGetInfo)                      \
  X(cuMemGetAllocationGranularity)     \
  X(cuMemAddressReserve)               \
  X(cuMemAddressFree)                  \
  X(cuMemCreate)                       \
  X(cuMemRelease)                      \
  X(cuMemMap)                          \
  X(cuMemUnmap)                        \
  X(cuMemSetAccess)                    \
  X(cuMemExportToShareableHandle)      \
  X(cuMemImportFromShareableHandle)    \
  X(cuMemHostRegister)                 \
  X(cuMemHostUnregister)               \
  X(cuStreamCreate)                    \
  X(cuStreamDestroy)                   \
  X(cuStreamIsCapturing)               \
  X(cuLaunchHostFunc)                  \
  X(cuEventCreate)                     \
  X(cuEventDestroy)                    \
  X(cuEventRecord)                     \
  X(cuEventQuery)                      \
  X(cuMemcpyDtoHAsync)                 \
  X(cuMemcpyHtoDAsync)                 \
  X(cuMemsetD8Async)

struct CudaApi {
#define CUMEM_DECLARE(name) decltype(&::name) name = nullptr;
  CUMEM_CUDA_ENTRY_POINTS(CUMEM_DECLARE)
#undef CUMEM_DECLARE
};

// The process's table; libcuda is opened at the first call and stays open. kUnsupported says what is missing.
Result<const CudaApi*> cuda_api();

}  // namespace cumem

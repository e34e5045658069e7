// CudaFence: a wait for all work of a device that leaves captures under way alone.
//
// cuCtxSynchronize beside a capture, on any thread and in relaxed mode too, fails and ends that capture (measured).
// Freeing device memory does not, and the driver waits for the device first, as torch relies on for cudaFree. That wait
// is not written down for cuMemFree, so each device proves it once: a free beside a host function that is still running
// must not return before it. Where the proof fails, the fence is cuCtxSynchronize.
//
// Its price: while it waits, other threads' launches wait as well (cuCtxSynchronize does not hold them up; measured).
// So it is for frees, which have that price anyway, and for waits that are known to be beside a capture.
#pragma once

#include <atomic>
#include <mutex>

#include "cuda_api.h"

namespace cumem {

class CudaFence {
 public:
  explicit CudaFence(const CudaApi& api) : api_(api) {}
  CudaFence(const CudaFence&) = delete;
  CudaFence& operator=(const CudaFence&) = delete;

  // pre: the device's context is current and the thread's capture mode relaxed. Errors of the device's work surface
  // here.
  CUresult wait();

 private:
  bool prove();

  const CudaApi& api_;
  std::once_flag once_;
  bool waits_ = false;  // freeing memory was seen to wait
  CUdeviceptr anchor_ =
      0;  // keeps the driver's chunk for small blocks alive, so that the fence neither makes nor frees it
  std::atomic<bool> ran_{false};
};

}  // namespace cumem

// One small kernel for each kind of bug that the emulator, or a sanitizer with it, has to report.
// Each is right with bug = 0 and wrong with bug = 1: a detector must speak, and must not cry wolf.
#include "device.h"

constexpr int kSize = 64;

#define PLANTED(name, shared_bytes)                                                     \
  extern "C" int name(int bug, const float* x, float* out) {                            \
    return LAUNCH(name##_kernel, dim3(1), dim3(kSize), shared_bytes, nullptr, bug, x, out); \
  }

// x[kSize] and out[kSize] end where their memory ends
__global__ void past_the_end_kernel(int bug, const float* x, float* out) {
  out[threadIdx.x + bug] = x[threadIdx.x];
}
PLANTED(past_the_end, 0)

__global__ void shared_index_kernel(int bug, const float* x, float* out) {
  __shared__ float shared[kSize];
  shared[threadIdx.x + bug] = x[threadIdx.x];
  out[threadIdx.x] = shared[threadIdx.x + bug];
}
PLANTED(shared_index, 0)

__global__ void dynamic_shared_kernel(int, const float* x, float* out) {
  DYNAMIC_SHARED(float, shared);
  shared[threadIdx.x] = x[threadIdx.x];
  out[threadIdx.x] = shared[threadIdx.x];
}
PLANTED(dynamic_shared, (kSize - bug) * sizeof(float))

__global__ void uninitialised_kernel(int bug, const float* x, float* out) {
  DYNAMIC_SHARED(float, shared);
  if (!bug) shared[threadIdx.x] = x[threadIdx.x];
  out[threadIdx.x] = shared[threadIdx.x];
}
PLANTED(uninitialised, kSize * sizeof(float))

__global__ void read_after_write_kernel(int bug, const float* x, float* out) {
  __shared__ float shared[kSize];
  shared[threadIdx.x] = x[threadIdx.x];
  if (!bug) __syncthreads();
  out[threadIdx.x] = shared[kSize - 1 - threadIdx.x];
}
PLANTED(read_after_write, 0)

__global__ void write_after_read_kernel(int bug, const float* x, float* out) {
  __shared__ float shared[kSize];
  for (int round = 0; round < 2; ++round) {
    shared[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = shared[kSize - 1 - threadIdx.x];
    if (!bug) __syncthreads();
  }
}
PLANTED(write_after_read, 0)

__global__ void missing_syncwarp_kernel(int bug, const float* x, float* out) {
  __shared__ float shared[kSize];
  for (int round = 0; round < 2; ++round) {
    shared[threadIdx.x] = x[threadIdx.x];
    __syncwarp();
    out[threadIdx.x] = shared[threadIdx.x ^ 1];
    if (!bug) __syncwarp();
  }
}
PLANTED(missing_syncwarp, 0)

// A shuffle makes the lanes meet but orders no memory.
__global__ void shuffle_for_syncwarp_kernel(int bug, const float* x, float* out) {
  __shared__ float shared[kSize];
  shared[threadIdx.x] = x[threadIdx.x];
  out[threadIdx.x] = __shfl_xor_sync(kFullWarp, x[threadIdx.x], 1);
  if (!bug) __syncwarp();
  out[threadIdx.x] += shared[threadIdx.x ^ 1];
}
PLANTED(shuffle_for_syncwarp, 0)

__global__ void divergent_barrier_kernel(int bug, const float* x, float* out) {
  if (bug && threadIdx.x < 32)
    __syncthreads();
  else
    __syncthreads();
  out[threadIdx.x] = x[threadIdx.x];
}
PLANTED(divergent_barrier, 0)

__global__ void barrier_and_shuffle_kernel(int bug, const float* x, float* out) {
  if (bug && threadIdx.x == 5) __syncthreads();
  out[threadIdx.x] = warp_sum(x[threadIdx.x]);
}
PLANTED(barrier_and_shuffle, 0)

__global__ void lane_left_early_kernel(int bug, const float* x, float* out) {
  if (bug && threadIdx.x == 5) return;
  out[threadIdx.x] = warp_sum(x[threadIdx.x]);
}
PLANTED(lane_left_early, 0)

__global__ void lane_not_in_mask_kernel(int bug, const float* x, float* out) {
  out[threadIdx.x] = __shfl_xor_sync(bug ? ~1u : ~0u, x[threadIdx.x], 2);
}
PLANTED(lane_not_in_mask, 0)

__global__ void source_not_in_mask_kernel(int bug, const float* x, float* out) {
  bool is_low = threadIdx.x % 32 < 16;
  out[threadIdx.x] = __shfl_sync(is_low ? 0xffffu : 0xffff0000u, x[threadIdx.x],
                                 is_low || bug ? 0 : 31);
}
PLANTED(source_not_in_mask, 0)

extern "C" int too_many_threads(int bug, const float* x, float* out) {
  return LAUNCH(past_the_end_kernel, dim3(1), dim3(bug ? 2048 : kSize), 0, nullptr, 0, x, out);
}

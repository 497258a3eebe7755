// Group advantages, (r - mean) / (std + eps) over the scored rewards of a group: one warp a group,
// float64 inside.
#include "device.h"

constexpr int kWarpsPerBlock = 4;

template <class Combine>
__device__ __forceinline__ double warp_reduce(double x, Combine combine) {
#pragma unroll
  for (int d = 16; d; d >>= 1) x = combine(x, __shfl_xor_sync(kFullWarp, x, d));
  return x;
}

// A group is flat by its spread: the std of equal numbers is rounding noise, and noise divided by
// noise is of order 1. `freedom` is what the std divides by less than the count; -1: no division.
__global__ void group_advantages_kernel(const double* rewards, const int64_t* offsets,
                                        const uint8_t* scored, int64_t num_groups, int freedom,
                                        double eps, double flat, float* advantages) {
  int64_t group = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
  if (group >= num_groups) return;  // the whole warp
  int64_t first = offsets[group] + threadIdx.x % 32, end = offsets[group + 1];
  double count = 0, sum = 0, low = INFINITY, high = -INFINITY;
  for (int64_t i = first; i < end; i += 32) {
    if (!scored[i]) continue;
    count += 1;
    sum += rewards[i];
    low = fmin(low, rewards[i]);
    high = fmax(high, rewards[i]);
  }
  count = warp_sum(count);
  double mean = warp_sum(sum) / count;  // NaN of an empty group, which is flat
  low = warp_reduce(low, [](double a, double b) { return fmin(a, b); });
  high = warp_reduce(high, [](double a, double b) { return fmax(a, b); });
  bool is_flat = count < 2 || high - low <= flat;
  double squares = 0;
  for (int64_t i = first; i < end; i += 32)
    if (scored[i]) squares += (rewards[i] - mean) * (rewards[i] - mean);
  squares = warp_sum(squares);
  double scale = freedom < 0 ? 1 : sqrt(squares / (count - freedom)) + eps;
  for (int64_t i = first; i < end; i += 32)
    advantages[i] = is_flat || !scored[i] ? 0.f : (float)((rewards[i] - mean) / scale);
}

int group_advantages_cuda(const double* rewards, const int64_t* offsets, const uint8_t* scored,
                          int64_t num_groups, int normalize, double eps, double flat,
                          float* advantages, void* stream) {
  if (num_groups == 0) return 0;
  if (normalize < 0 || normalize > 2) return kInvalid;
  return LAUNCH(group_advantages_kernel, dim3((num_groups + kWarpsPerBlock - 1) / kWarpsPerBlock),
                dim3(kWarpsPerBlock * 32), 0, stream, rewards, offsets, scored, num_groups,
                normalize - 1, eps, flat, advantages);
}

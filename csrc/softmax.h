// The one reduction over a vocabulary: its sums do not depend on who asks (log-prob or sampler), on
// the alignment of the row or on other rows, so that log-probs are equal bit for bit.
#pragma once
#include "device.h"

constexpr int kRowThreads = 512;  // one block a row

__device__ __forceinline__ float tempered(float logit, float inv_temperature) {
  return logit * inv_temperature;
}

// Of the numbers z seen so far: their maximum, sum of e^(z - max), sum of (z - max) e^(z - max).
struct Softmax {
  float max, sum, moment;

  // Far below the maximum e^d is 0 and only 0 * inf has to be avoided. NaN passes.
  static __device__ __forceinline__ float shift(float z, float base) {
    float d = z - base;
    return d < -1e4f ? -1e4f : d;
  }

  __device__ __forceinline__ void rescale(float top) {
    float d = shift(max, exp_base(top)), a = __expf(d);
    moment = a * fmaf(d, sum, moment);
    sum *= a;
    max = top;
  }

  // One exp an element and one for the rescaling of a whole pack.
  template <int N>
  __device__ __forceinline__ void add(const float (&z)[N]) {
    float top = max;
#pragma unroll
    for (int j = 0; j < N; ++j) top = fmaxf(top, z[j]);
    rescale(top);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      float d = shift(z[j], exp_base(top)), e = __expf(d);
      sum += e;
      moment = fmaf(e, d, moment);
    }
  }

  __device__ __forceinline__ void merge(Softmax other) {
    float top = fmaxf(max, other.max);
    rescale(top);
    other.rescale(top);
    sum += other.sum;
    moment += other.moment;
  }

  __device__ __forceinline__ void merge_warp() {
#pragma unroll
    for (int d = 16; d; d >>= 1)
      merge({__shfl_xor_sync(kFullWarp, max, d), __shfl_xor_sync(kFullWarp, sum, d),
             __shfl_xor_sync(kFullWarp, moment, d)});
  }

  __device__ __forceinline__ float logsumexp() const { return max + logf(sum); }
  __device__ __forceinline__ float logp(float z) const { return (z - max) - logf(sum); }
  __device__ __forceinline__ float entropy() const { return logf(sum) - moment / sum; }
};

// Reduce row[0, n) by the whole block; the result is valid in thread 0. `visit(i, z)` sees pack i,
// tempered and -inf past the end; a thread visits its packs in rising order, however many of them
// (kAhead) it loads at once.
template <int kAhead, class T, class Visit>
__device__ __forceinline__ Softmax reduce_row(const T* row, int64_t n, float inv_temperature,
                                              Visit visit) {
  constexpr int N = Pack<T>::N, kWarps = kRowThreads / 32;
  const T nothing = from_float<T>(-INFINITY);
  bool aligned = is_aligned(row);
  int64_t packs = (n + N - 1) / N;
  Softmax own{-INFINITY, 0.f, 0.f};
  auto add = [&](int64_t i, const Pack<T>& p) {
    float z[N];
#pragma unroll
    for (int j = 0; j < N; ++j) z[j] = tempered(to_float(p.v[j]), inv_temperature);
    own.add(z);
    visit(i, z);
  };
  int64_t i = threadIdx.x;
  while (aligned && (i + (kAhead - 1) * kRowThreads + 1) * N <= n) {
    Pack<T> p[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) p[u] = ((const Pack<T>*)row)[i + u * kRowThreads];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) add(i + u * kRowThreads, p[u]);
    i += kAhead * kRowThreads;
  }
  for (; i < packs; i += kRowThreads) add(i, load_pack(row, i, n, aligned, nothing));

  __shared__ Softmax of_warp[kWarps];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  own.merge_warp();
  if (lane == 0) of_warp[warp] = own;
  __syncthreads();
  if (warp == 0) {
    own = lane < kWarps ? of_warp[lane] : Softmax{-INFINITY, 0.f, 0.f};
    own.merge_warp();
  }
  return own;
}

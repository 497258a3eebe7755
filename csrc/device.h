// What the kernels share: launches, element types, 16-byte access, sums of a warp, the generator.
//
// The kernels are plain CUDA C++ without cp.async, TMA or mma: a plain C++ compiler takes the same
// files for the emulator of the tests (simt.h). nvcc takes them with -fmad=false: multiply-adds are
// written as fmaf, or the compiler could contract two kernels differently that must agree in every
// bit.
#pragma once
#include "kernels.h"

#ifdef __CUDACC__
#define LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  (kernel<<<grid, block, shared_bytes, (cudaStream_t)(stream)>>>(__VA_ARGS__), cudaGetLastError())
#define DYNAMIC_SHARED(T, name)                                 \
  extern __shared__ __align__(16) unsigned char name##_bytes[]; \
  T* name = (T*)name##_bytes
#else
#include "simt.h"
#define LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  ((void)(stream), simt::launch(grid, block, shared_bytes, [&] { kernel(__VA_ARGS__); }))
#define DYNAMIC_SHARED(T, name) T* name = (T*)simt::dynamic_shared
#endif

constexpr int kInvalid = 1;  // cudaErrorInvalidValue
constexpr unsigned kFullWarp = 0xffffffffu;

struct bf16 {
  uint16_t bits;
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) {
  return __uint_as_float((unsigned)x.bits << 16);
}

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
  unsigned u = __float_as_uint(x);
  // A NaN gets the quiet bit: rounding could carry its payload away, to infinity or 0.
  if (x != x) return {(uint16_t)(u >> 16 | 0x40)};
  return {(uint16_t)((u + 0x7fffu + (u >> 16 & 1)) >> 16)};  // to nearest, ties to even
}

// 16 bytes: the widest access of one thread.
template <class T>
struct alignas(16) Pack {
  static constexpr int N = 16 / sizeof(T);
  T v[N];
};

__host__ __device__ __forceinline__ bool is_aligned(const void* p) {
  return (uintptr_t)p % 16 == 0;
}

// Elements [i * N, i * N + N) of a row of n; those past its end are `fill`. A row that starts off a
// 16-byte border is read one by one, into the same pack: results do not depend on alignment.
template <class T>
__device__ __forceinline__ Pack<T> load_pack(const T* row, int64_t i, int64_t n, bool aligned,
                                             T fill) {
  constexpr int N = Pack<T>::N;
  if (aligned && (i + 1) * N <= n) return ((const Pack<T>*)row)[i];
  Pack<T> p;
#pragma unroll
  for (int j = 0; j < N; ++j) p.v[j] = i * N + j < n ? row[i * N + j] : fill;
  return p;
}

template <class T>
__device__ __forceinline__ void store_pack(T* row, int64_t i, int64_t n, bool aligned, Pack<T> p) {
  constexpr int N = Pack<T>::N;
  if (aligned && (i + 1) * N <= n) {
    ((Pack<T>*)row)[i] = p;
    return;
  }
#pragma unroll
  for (int j = 0; j < N; ++j)
    if (i * N + j < n) row[i * N + j] = p.v[j];
}

// Sum over groups of `width` neighbouring lanes, in all of them; every lane of the warp takes part.
template <class T>
__device__ __forceinline__ T warp_sum(T x, int width = 32) {
#pragma unroll
  for (int d = width / 2; d; d >>= 1) x += __shfl_xor_sync(kFullWarp, x, d);
  return x;
}

// What to subtract before exp where `max` is the largest so far: -inf - -inf would be NaN.
__device__ __forceinline__ float exp_base(float max) { return max == -INFINITY ? 0.f : max; }

// The arithmetic of attention on the CPU, forward and backward.
#pragma once
#include <algorithm>
#include <vector>

#include "cpu.h"
#include "kernels.h"

constexpr int kKeys = 32;     // of one step: a chunk of 128 floats each fills half the L1 cache
constexpr int kQueries = 32;  // of one tile, all of one kv head

// 8 floats, at any address. The compiler keeps arrays of these in registers, but not arrays of
// floats under `omp simd` (1.3 instead of 26 multiply-adds a ns).
typedef float v8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t i8 __attribute__((vector_size(32)));

INLINE v8& lanes(const float* p) { return *(v8*)p; }

// Three steps from 8 vectors to the vector of their sums, each sum in the same order.
INLINE v8 add_ones(v8 a, v8 b) {
  return __builtin_shuffle(a, b, i8{0, 8, 2, 10, 4, 12, 6, 14}) +
         __builtin_shuffle(a, b, i8{1, 9, 3, 11, 5, 13, 7, 15});
}
INLINE v8 add_twos(v8 a, v8 b) {
  return __builtin_shuffle(a, b, i8{0, 1, 8, 9, 4, 5, 12, 13}) +
         __builtin_shuffle(a, b, i8{2, 3, 10, 11, 6, 7, 14, 15});
}
INLINE v8 add_fours(v8 a, v8 b) {
  return __builtin_shuffle(a, b, i8{0, 1, 2, 3, 8, 9, 10, 11}) +
         __builtin_shuffle(a, b, i8{4, 5, 6, 7, 12, 13, 14, 15});
}

// out[t] = q . rows[t] for n rows, rounded up to whole eights.
template <int D>
INLINE void dots(const float* q, const float* const* rows, int n, float* out) {
  for (int t = 0; t < n; t += 8) {
    v8 s[8] = {};
    for (int j = 0; j < D; j += 8)
      for (int l = 0; l < 8; ++l) s[l] += lanes(q + j) * lanes(rows[t + l] + j);
    lanes(out + t) = add_fours(add_twos(add_ones(s[0], s[1]), add_ones(s[2], s[3])),
                               add_twos(add_ones(s[4], s[5]), add_ones(s[6], s[7])));
  }
}

// acc += sum of c[t] * rows[t], in the order of t
template <int D>
INLINE void mix(const float* c, const float* const* rows, int n, float* acc) {
  constexpr int W = D < 64 ? D : 64;  // as many as stay in registers
  for (int first = 0; first < D; first += W) {
    v8 sum[W / 8];
    for (int j = 0; j < W / 8; ++j) sum[j] = lanes(acc + first + 8 * j);
    for (int t = 0; t < n; ++t)
      for (int j = 0; j < W / 8; ++j) sum[j] += c[t] * lanes(rows[t] + first + 8 * j);
    for (int j = 0; j < W / 8; ++j) lanes(acc + first + 8 * j) = sum[j];
  }
}

template <class T>
INLINE void widen(const T* x, int n, float factor, float* out) {
#pragma omp simd
  for (int j = 0; j < n; ++j) out[j] = to_float(x[j]) * factor;
}

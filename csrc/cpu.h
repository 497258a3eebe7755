// Number types and an exp that vectorises, for the CPU kernels.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

// Compiled once for each kind of CPU, the best is chosen when the module is loaded. Goes on plain
// functions that the OpenMP loops call, never on the function that holds the pragma: its body would
// be outlined without the attribute.
#if !defined(CLONES) && defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#elif !defined(CLONES)
#define CLONES
#endif
#define INLINE static inline __attribute__((always_inline))

constexpr float kInf = INFINITY;

struct bf16 {
  uint16_t bits;
};

template <class To, class From>
INLINE To bit_cast(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  memcpy(&y, &x, sizeof y);
  return y;
}

INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) { return bit_cast<float>((uint32_t)x.bits << 16); }

INLINE void store(float* p, float x) { *p = x; }
// Round to nearest, ties to even; rounding would make some NaN an infinity or a zero.
INLINE void store(bf16* p, float x) {
  uint32_t u = bit_cast<uint32_t>(x);
  uint32_t rounded = u + 0x7fff + (u >> 16 & 1);
  p->bits = (uint16_t)((x == x ? rounded : u | 0x400000) >> 16);
}

// e^x for x <= 0 (or a rounding error above), relative error 2e-7, and 0 below -87.7, so that
// e^-inf is exactly 0. 2^n comes from adding n to the exponent's bits; at n = -127 they are all 0.
INLINE float exp_neg(float x) {
  x = x < -88.0f ? -88.0f : x;  // a NaN passes
  float shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the low bits hold round(x / ln 2)
  float n = shifted - 12582912.0f;
  float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // x - n ln 2, ln 2 in two parts
  float p = 0.00138146f;
  p = p * r + 0.00836872f;
  p = p * r + 0.04166839f;
  p = p * r + 0.16666521f;
  p = p * r + 0.49999993f;
  p = p * r * r + r + 1.0f;
  return p * bit_cast<float>((bit_cast<int32_t>(shifted) << 23) + 0x3f800000);
}

// Log-probs, sampling and advantages on the CPU.
//
// A row of logits is read once, in blocks that stay in the first-level cache. Sampling, log-probs
// and the backward pass share `reduce`, one function for each block and `log_prob`, so that the
// log-prob that is recorded and the one that is trained on have the same bits. A row belongs to
// one thread: results do not depend on their number.
#include <algorithm>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include "cpu.h"
#include "kernels.h"

namespace {

constexpr int kBlock = 1024;  // logits at once

// ------------------------------------------------------------------------------ one block

template <class T>
INLINE float load_row(const T* x, int n, float inverse, float* z) {
  float top = -kInf;
#pragma omp simd reduction(max : top)
  for (int j = 0; j < n; ++j) {
    z[j] = to_float(x[j]) * inverse;
    top = z[j] > top ? z[j] : top;  // passes over a NaN, which the sum will have
  }
  return top;
}

// z = x / temperature of one block; returns the largest.
CLONES float load_float(const float* x, int n, float inverse, float* z) {
  return load_row(x, n, inverse, z);
}
CLONES float load_bf16(const bf16* x, int n, float inverse, float* z) {
  return load_row(x, n, inverse, z);
}

// e = exp(z - top) of one block; adds the sums of e and of e * (z - top).
CLONES void exp_block(const float* z, int n, float top, float* e, double* sum, double* moment) {
  float s = 0, m = 0;
#pragma omp simd reduction(+ : s, m)
  for (int j = 0; j < n; ++j) {
    float d = z[j] - top;
    d = d < -88.0f ? -88.0f : d;  // 0 * -inf would be NaN
    e[j] = exp_neg(d);
    s += e[j];
    m += e[j] * d;
  }
  *sum += s, *moment += m;
}

struct Counter {  // of Philox: (step, sample, position, token / 4) under a 64-bit key
  uint32_t step, sample, position;
  uint64_t key;
};

// Exponential draws -log(u), u = (word + 0.5) / 2^32, of 4 * fours tokens from 4 * first on.
// Philox4x32-10 (Salmon et al., 2011).
CLONES void exponentials(Counter c, uint32_t first, int fours, float* out) {
  alignas(64) uint32_t words[kBlock];
#pragma omp simd
  for (int j = 0; j < fours; ++j) {
    uint32_t c0 = c.step, c1 = c.sample, c2 = c.position, c3 = first + j;
    uint32_t k0 = (uint32_t)c.key, k1 = (uint32_t)(c.key >> 32);
    for (int round = 0; round < 10; ++round) {
      uint64_t p0 = (uint64_t)c0 * 0xD2511F53u, p1 = (uint64_t)c2 * 0xCD9E8D57u;
      c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, c1 = (uint32_t)p1;
      c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1, c3 = (uint32_t)p0;
      k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    words[4 * j] = c0, words[4 * j + 1] = c1, words[4 * j + 2] = c2, words[4 * j + 3] = c3;
  }
#pragma omp simd
  for (int j = 0; j < 4 * fours; ++j) {
    // A float has no numbers close to 1, but many close to 0: above 1/2, y is 1 - u.
    uint32_t high = 0u - (words[j] >> 31);  // all ones from 1/2 on
    float y = ((float)(int32_t)(words[j] ^ high) + 0.5f) * 0x1p-32f;
    float u = high ? 1.0f - y : y;
    // u = 2^n * (1 + f), 1 + f from sqrt(1/2) to sqrt(2); n is 0 only above 1/2
    int32_t bits = bit_cast<int32_t>(u) - 0x3f3504f3, n = bits >> 23;
    float f = bit_cast<float>((bits & 0x7fffff) + 0x3f3504f3) - 1.0f;
    f = n == 0 ? -y : f;
    float p = 0.0870036f;
    p = p * f - 0.14267476f;
    p = p * f + 0.14914787f;
    p = p * f - 0.16577586f;
    p = p * f + 0.19963062f;
    p = p * f - 0.25001337f;
    p = p * f + 0.33333911f;
    out[j] = -(n * 0.693147181f + (f + f * f * (f * p - 0.5f)));
  }
}

// ratio = e / noise; returns the largest. The argmax of z + Gumbel noise is that of
// exp(z - top) / exponential noise: the exp is there already, and one log a token is saved.
CLONES float race(const float* e, const float* noise, int n, float* ratio) {
  float best = 0;
#pragma omp simd reduction(max : best)
  for (int j = 0; j < n; ++j) {
    ratio[j] = e[j] / noise[j];
    best = ratio[j] > best ? ratio[j] : best;
  }
  return best;
}

struct Draw {  // what sampling adds to the reduction
  Counter counter;
  bool is_greedy;
  int64_t id = 0;
  double best = 0;  // ratio of `id`, relative to the largest logit so far
};

struct Sums {
  double top = -kInf, sum = 0, moment = 0;  // of exp(z - top), and of that times (z - top)
  double lse() const { return sum == sum && top == -kInf ? -kInf : top + std::log(sum); }
};

const char* row_of(const Logits& x, int64_t row) {
  return (const char*)x.data + row * x.stride * (x.dtype ? 2 : 4);
}

float value(const Logits& x, const char* row, int64_t column) {
  return x.dtype ? to_float(((const bf16*)row)[column]) : ((const float*)row)[column];
}

void race_block(Draw& draw, int64_t first, int n, const float* e) {
  float noise[kBlock], ratio[kBlock];
  exponentials(draw.counter, (uint32_t)(first / 4), (n + 3) / 4, noise);
  float best = race(e, noise, n, ratio);
  if (best > draw.best) {  // equal ones: the smaller id
    draw.best = best;
    draw.id = first + (std::find(ratio, ratio + n, best) - ratio);
  }
}

Sums reduce(const Logits& x, const char* row, float inverse, Draw* draw) {
  float z[kBlock], e[kBlock];
  Sums out;
  for (int64_t first = 0; first < x.num_valid; first += kBlock) {
    int n = (int)std::min<int64_t>(kBlock, x.num_valid - first);
    float top = x.dtype ? load_bf16((const bf16*)row + first, n, inverse, z)
                        : load_float((const float*)row + first, n, inverse, z);
    if (top > out.top) {
      double shift = out.top == -kInf ? 0 : out.top - top, a = out.top == -kInf ? 0 : exp(shift);
      out.moment = a * (out.moment + shift * out.sum);
      out.sum *= a;
      out.top = top;
      if (draw) draw->best *= a;
      if (draw && draw->is_greedy) draw->id = first + (std::find(z, z + n, top) - z);
    }
    // before the first finite logit there is no top: 0 keeps exp(-inf) at 0 and a NaN at NaN
    exp_block(z, n, out.top == -kInf ? 0 : (float)out.top, e, &out.sum, &out.moment);
    if (draw && !draw->is_greedy) race_block(*draw, first, n, e);
  }
  return out;
}

float log_prob(const Logits& x, const char* row, int64_t id, float inverse, const Sums& sums) {
  if (sums.top == -kInf) return NAN;
  return (float)((double)(value(x, row, id) * inverse) - sums.top - std::log(sums.sum));
}

// argmax as torch has it: the first NaN is the largest.
int64_t argmax_with_nan(const Logits& x, const char* row) {
  int64_t best = 0;
  for (int64_t v = 0; v < x.num_valid; ++v) {
    float a = value(x, row, v);
    if (a != a) return v;
    if (a > value(x, row, best)) best = v;
  }
  return best;
}

template <class T>
INLINE void gradient(const T* x, int64_t n, float inverse, float lse, float scale, float* grad) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j)
    grad[j] = -scale * exp_neg(to_float(x[j]) * inverse - lse);
}

CLONES void gradient_float(const float* x, int64_t n, float inverse, float lse, float scale,
                           float* grad) {
  gradient(x, n, inverse, lse, scale, grad);
}

// Its own loop for the rounding: in one, the compiler shuffles more than it computes.
CLONES void gradient_bf16(const bf16* x, int64_t n, float inverse, float lse, float scale,
                          bf16* grad) {
  float z[kBlock];
  for (int64_t first = 0; first < n; first += kBlock) {
    int count = (int)std::min<int64_t>(kBlock, n - first);
    gradient(x + first, count, inverse, lse, scale, z);
#pragma omp simd
    for (int j = 0; j < count; ++j) store(&grad[first + j], z[j]);
  }
}

// A gradient as large as the logits is new memory, and its page faults (one for 4 kB) cost several
// times its writing: ask for pages of 2 MB. It is advice: failing is no error.
void use_large_pages([[maybe_unused]] void* data, [[maybe_unused]] size_t size) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t page = 2 << 20;
  uintptr_t first = ((uintptr_t)data + page - 1) / page * page;
  uintptr_t last = ((uintptr_t)data + size) / page * page;
  if (first < last) madvise((void*)first, last - first, MADV_HUGEPAGE);
#endif
}

// (r - mean) / (std + eps) of one group.
void advantages_of(const double* r, const uint8_t* scored, int64_t n, int normalize, double eps,
                   double flat, float* out) {
  std::fill(out, out + n, 0.0f);
  int64_t count = 0;
  double low = INFINITY, high = -INFINITY, mean = 0, square = 0;
  for (int64_t i = 0; i < n; ++i)
    if (scored[i]) ++count, low = std::min(low, r[i]), high = std::max(high, r[i]), mean += r[i];
  if (count < 2 || high - low <= flat) return;
  mean /= count;
  for (int64_t i = 0; i < n; ++i)
    if (scored[i]) square += (r[i] - mean) * (r[i] - mean);
  double std = normalize ? std::sqrt(square / (count - (normalize == 2))) + eps : 1.0;
  for (int64_t i = 0; i < n; ++i)
    if (scored[i]) out[i] = (float)((r[i] - mean) / std);
}

}  // namespace

// ------------------------------------------------------------------------------ launchers

int logprob_cpu(Logits x, const int64_t* targets, const uint8_t* mask, float* logps,
                float* entropy, float* lse, void*) {
  float inverse = 1.0f / x.temperature;
#pragma omp parallel for schedule(dynamic, 1) if (x.rows > 1)
  for (int64_t i = 0; i < x.rows; ++i) {
    logps[i] = entropy[i] = lse[i] = 0;
    if (mask && !mask[i]) continue;
    const char* row = row_of(x, i);
    Sums sums = reduce(x, row, inverse, nullptr);
    logps[i] = log_prob(x, row, targets[i], inverse, sums);
    lse[i] = (float)sums.lse();
    entropy[i] = (float)(std::log(sums.sum) - sums.moment / sums.sum);
  }
  return 0;
}

int logprob_backward_cpu(Logits x, const int64_t* targets, const uint8_t* mask, const float* lse,
                         const float* grad_logps, void* grad, int64_t grad_stride, void*) {
  float inverse = 1.0f / x.temperature;
  size_t width = x.dtype ? 2 : 4;
  if (grad != x.data) use_large_pages(grad, x.rows * grad_stride * width);
#pragma omp parallel for schedule(dynamic, 1) if (x.rows > 1)
  for (int64_t i = 0; i < x.rows; ++i) {
    const char* row = row_of(x, i);
    char* out = (char*)grad + i * grad_stride * width;
    if (mask && !mask[i]) {
      memset(out, 0, x.columns * width);
      continue;
    }
    float scale = grad_logps[i] * inverse;
    // 1 - p without cancellation, and read before `grad` may overwrite it
    float hit = -scale * std::expm1(value(x, row, targets[i]) * inverse - lse[i]);
    if (x.dtype) {
      gradient_bf16((const bf16*)row, x.num_valid, inverse, lse[i], scale, (bf16*)out);
      store((bf16*)out + targets[i], hit);
    } else {
      gradient_float((const float*)row, x.num_valid, inverse, lse[i], scale, (float*)out);
      store((float*)out + targets[i], hit);
    }
    memset(out + x.num_valid * width, 0, (x.columns - x.num_valid) * width);
  }
  return 0;
}

int group_advantages_cpu(const double* rewards, const int64_t* offsets, const uint8_t* scored,
                         int64_t num_groups, int normalize, double eps, double flat,
                         float* advantages, void*) {
  for (int64_t p = 0; p < num_groups; ++p) {
    int64_t at = offsets[p];
    advantages_of(rewards + at, scored + at, offsets[p + 1] - at, normalize, eps, flat,
                  advantages + at);
  }
  return 0;
}

int sample_cpu(Logits x, const uint64_t* keys, const int64_t* steps, const int64_t* samples,
               const int64_t* positions, int64_t* ids, float* logps, void*) {
  bool is_greedy = x.temperature == 0;
  float inverse = is_greedy ? 1.0f : 1.0f / x.temperature;
#pragma omp parallel for schedule(dynamic, 1) if (x.rows > 1)
  for (int64_t i = 0; i < x.rows; ++i) {
    const char* row = row_of(x, i);
    Counter counter{(uint32_t)steps[i], (uint32_t)samples[i], (uint32_t)positions[i], keys[i]};
    Draw draw{counter, is_greedy};
    Sums sums = reduce(x, row, inverse, &draw);
    ids[i] = sums.lse() == sums.lse() ? draw.id : argmax_with_nan(x, row);
    logps[i] = log_prob(x, row, ids[i], inverse, sums);
  }
  return 0;
}

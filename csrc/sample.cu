// Draw one token a row, and its log-prob: temperature, Gumbel noise, argmax and softmax in one read
// of the logits, one block a row.
#include "softmax.h"

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
__device__ __forceinline__ uint4 philox(uint4 c, unsigned k0, unsigned k1) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    unsigned high0 = __umulhi(c.x, 0xD2511F53u), low0 = c.x * 0xD2511F53u;
    unsigned high1 = __umulhi(c.z, 0xCD9E8D57u), low1 = c.z * 0xCD9E8D57u;
    c = {high1 ^ c.y ^ k0, low1, high0 ^ c.w ^ k1, low0};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

// -log(-log(u)) of u = (draw + 1/2) / 2^32. float32 has no numbers close to 1, so in the upper half
// the inner log is that of 1 - (1 - u): about an ulp from float64, at a fraction of its price.
__device__ __forceinline__ float gumbel(unsigned draw) {
  constexpr float kUnit = 1.f / 4294967296.f;
  bool is_low = draw < 0x80000000u;
  float p = ((float)(is_low ? draw : ~draw) + 0.5f) * kUnit;
  return -logf(is_low ? -logf(p) : -log1pf(-p));
}

struct Best {
  float score;
  int64_t id;
  // The smallest id among equal scores; NaN counts as infinity, so that the result is always an id.
  __device__ __forceinline__ void add(float other, int64_t other_id) {
    other = other != other ? INFINITY : other;
    if (other > score || (other == score && other_id < id)) {
      score = other;
      id = other_id;
    }
  }
};

// Valid in thread 0; the whole block takes part.
__device__ __forceinline__ Best best_of_block(Best own) {
  constexpr int kWarps = kRowThreads / 32;
  __shared__ Best of_warp[kWarps];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  auto merge_warp = [&] {
#pragma unroll
    for (int d = 16; d; d >>= 1) {
      float score = __shfl_xor_sync(kFullWarp, own.score, d);
      int64_t id = __shfl_xor_sync(kFullWarp, own.id, d);
      own.add(score, id);
    }
  };
  merge_warp();
  if (lane == 0) of_warp[warp] = own;
  __syncthreads();
  if (warp == 0) {
    if (lane < kWarps) own = of_warp[lane];
    merge_warp();
  }
  return own;
}

template <class T, bool kNoise>
__global__ void __launch_bounds__(kRowThreads)
    sample_kernel(Logits x, const uint64_t* keys, const int64_t* steps, const int64_t* samples,
                  const int64_t* positions, int64_t* ids, float* logps) {
  constexpr int N = Pack<T>::N;
  int64_t row = blockIdx.x;
  const T* logits = (const T*)x.data + row * x.stride;
  float inv_temperature = kNoise ? 1.f / x.temperature : 1.f;
  uint4 counter{};
  unsigned low = 0, high = 0;
  if (kNoise) {
    counter = {(unsigned)steps[row], (unsigned)samples[row], (unsigned)positions[row], 0};
    low = (unsigned)keys[row];
    high = (unsigned)(keys[row] >> 32);
  }
  Best best{-INFINITY, INT64_MAX};
  // one pack at a time: the noise, not the memory, takes the time here, and most registers
  auto visit = [&](int64_t i, const float* z) {
#pragma unroll
    for (int four = 0; four < N; four += 4) {
      int64_t id = i * N + four;
      uint4 draws{};
      counter.w = (unsigned)(id / 4);
      if (kNoise) draws = philox(counter, low, high);
      const unsigned words[4] = {draws.x, draws.y, draws.z, draws.w};
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (id + j < x.num_valid)
          best.add(kNoise ? z[four + j] + gumbel(words[j]) : z[four + j], id + j);
    }
  };
  Softmax s = reduce_row<1>(logits, x.num_valid, inv_temperature, visit);
  best = best_of_block(best);
  if (threadIdx.x == 0) {
    ids[row] = best.id;
    logps[row] = s.logp(tempered(to_float(logits[best.id]), inv_temperature));
  }
}

int sample_cuda(Logits x, const uint64_t* keys, const int64_t* steps, const int64_t* samples,
                const int64_t* positions, int64_t* ids, float* logps, void* stream) {
  if (x.rows == 0) return 0;
  if (x.num_valid < 1) return kInvalid;
  auto kernel = x.temperature > 0
                    ? (x.dtype ? sample_kernel<bf16, true> : sample_kernel<float, true>)
                    : (x.dtype ? sample_kernel<bf16, false> : sample_kernel<float, false>);
  return LAUNCH(kernel, dim3(x.rows), dim3(kRowThreads), 0, stream, x, keys, steps, samples,
                positions, ids, logps);
}

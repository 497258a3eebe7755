// Log-prob of one target a row, entropy and logsumexp of the row, and the log-prob's gradient: one
// block a row, the vocabulary is read once each way. Masked-out rows leave at once.
#include "softmax.h"

template <class T>
__global__ void __launch_bounds__(kRowThreads)
    logprob_kernel(Logits x, const int64_t* targets, const uint8_t* mask, float* logps,
                   float* entropy, float* lse) {
  int64_t row = blockIdx.x;
  if (mask && !mask[row]) {
    if (threadIdx.x == 0) logps[row] = entropy[row] = lse[row] = 0.f;
    return;
  }
  const T* logits = (const T*)x.data + row * x.stride;
  float inv_temperature = 1.f / x.temperature;
  Softmax s = reduce_row<4>(logits, x.num_valid, inv_temperature, [](int64_t, const float*) {});
  if (threadIdx.x == 0) {
    int64_t target = targets[row];  // one that does not exist has no log-prob, and is not read
    float logit = target >= 0 && target < x.num_valid ? to_float(logits[target]) : NAN;
    logps[row] = s.logp(tempered(logit, inv_temperature));
    entropy[row] = s.entropy();
    lse[row] = s.logsumexp();
  }
}

// The logits and their gradient may be one buffer: each pack is written by the thread that read it.
template <class T>
__global__ void __launch_bounds__(kRowThreads)
    logprob_backward_kernel(Logits x, const int64_t* targets, const uint8_t* mask,
                            const float* lse, const float* grad_logps, void* grads,
                            int64_t grad_stride) {
  constexpr int N = Pack<T>::N;
  int64_t row = blockIdx.x;
  const T* logits = (const T*)x.data + row * x.stride;
  T* grad = (T*)grads + row * grad_stride;
  bool is_on = !mask || mask[row];
  int64_t target = is_on ? targets[row] : -1;
  float inv_temperature = 1.f / x.temperature, norm = is_on ? lse[row] : 0.f;
  float scale = is_on ? grad_logps[row] * inv_temperature : 0.f;
  bool is_readable = is_aligned(logits), is_writable = is_aligned(grad);
  for (int64_t i = threadIdx.x; i * N < x.columns; i += kRowThreads) {
    Pack<T> p{};  // zeros
    if (is_on) {
      p = load_pack(logits, i, x.num_valid, is_readable, from_float<T>(-INFINITY));
#pragma unroll
      for (int j = 0; j < N; ++j) {
        float prob = __expf(tempered(to_float(p.v[j]), inv_temperature) - norm);
        float hit = i * N + j == target ? 1.f : 0.f;
        p.v[j] = from_float<T>(i * N + j < x.num_valid ? scale * (hit - prob) : 0.f);
      }
    }
    store_pack(grad, i, x.columns, is_writable, p);
  }
}

int logprob_cuda(Logits x, const int64_t* targets, const uint8_t* mask, float* logps,
                 float* entropy, float* lse, void* stream) {
  if (x.rows == 0) return 0;
  auto kernel = x.dtype ? logprob_kernel<bf16> : logprob_kernel<float>;
  return LAUNCH(kernel, dim3(x.rows), dim3(kRowThreads), 0, stream, x, targets, mask, logps,
                entropy, lse);
}

int logprob_backward_cuda(Logits x, const int64_t* targets, const uint8_t* mask, const float* lse,
                          const float* grad_logps, void* grad, int64_t grad_stride, void* stream) {
  if (x.rows == 0) return 0;
  auto kernel = x.dtype ? logprob_backward_kernel<bf16> : logprob_backward_kernel<float>;
  return LAUNCH(kernel, dim3(x.rows), dim3(kRowThreads), 0, stream, x, targets, mask, lse,
                grad_logps, grad, grad_stride);
}

// Gradients of packed attention by recomputation: the probability of a pair is e^(score - lse). No
// atomics: one block a query sums over its keys, then one block a key over its queries, each in a
// fixed order.
#include "attention.h"

struct Backward {
  const void *q, *k, *v, *out, *grad_out;
  const float* lse;
  Queries segments;
  int64_t tokens, heads, kv_heads;
  float scale;
  void *grad_q, *grad_k, *grad_v;
  float* delta;  // [tokens, heads]: sum of grad_out * out
};

// Sum over the slots, in their order, to the D numbers at `out`.
template <class T, int D>
__device__ __forceinline__ void store_sum(const float (&x)[Pack<T>::N], void* out, int64_t at) {
  using Tile = ::Tile<T, D>;
  __shared__ float of_slot[Tile::kSlots][D];
#pragma unroll
  for (int j = 0; j < Tile::N; ++j) of_slot[Tile::slot()][Tile::lane() * Tile::N + j] = x[j];
  __syncthreads();
  if (threadIdx.x < D) {
    float sum = 0;
    for (int s = 0; s < Tile::kSlots; ++s) sum += of_slot[s][threadIdx.x];
    ((T*)out)[at + threadIdx.x] = from_float<T>(sum);
  }
  __syncthreads();  // all have read before the next sum is written
}

// grid (tokens, heads)
template <class T, int D>
__global__ void __launch_bounds__(kThreads) grad_q_kernel(Backward b) {
  using Tile = ::Tile<T, D>;
  constexpr int N = Tile::N;
  int query = blockIdx.x, start = b.segments.cu_seqlens[b.segments.row(query)];
  int64_t kv_head = blockIdx.y / (b.heads / b.kv_heads);
  int64_t at = (int64_t)query * b.heads + blockIdx.y;
  float q[N], g[N], x[N], sum[N] = {};
  Tile::unpack(q, Tile::load(b.q, at * D, true), b.scale);
  Tile::unpack(g, Tile::load(b.grad_out, at * D, true));
  Tile::unpack(x, Tile::load(b.out, at * D, true));
  float delta = Tile::dot(g, x), lse = b.lse[at];
  if (threadIdx.x == 0) b.delta[at] = delta;
  // every lane runs the same rounds, so that all of a warp meet in the shuffles
  for (int base = start; base <= query; base += Tile::kSlots) {
    int key = base + Tile::slot();
    bool is_there = key <= query;
    int64_t at_key = (key * b.kv_heads + kv_head) * D;
    Tile::unpack(x, Tile::load(b.v, at_key, is_there));
    float slope = Tile::dot(g, x) - delta;
    Tile::unpack(x, Tile::load(b.k, at_key, is_there));
    float prob = __expf(Tile::dot(q, x) - lse);
    if (is_there) Tile::add(sum, prob * slope * b.scale, x);
  }
  store_sum<T, D>(sum, b.grad_q, at * D);
}

// grid (tokens, kv heads), after grad_q_kernel
template <class T, int D>
__global__ void __launch_bounds__(kThreads) grad_kv_kernel(Backward b) {
  using Tile = ::Tile<T, D>;
  constexpr int N = Tile::N;
  int key = blockIdx.x, end = b.segments.cu_seqlens[b.segments.row(key) + 1];
  int group = b.heads / b.kv_heads, pairs = (end - key) * group;  // (query, head), from the key on
  int64_t at = ((int64_t)key * b.kv_heads + blockIdx.y) * D;
  float k[N], v[N], q[N], g[N], sum_k[N] = {}, sum_v[N] = {};
  Tile::unpack(k, Tile::load(b.k, at, true));
  Tile::unpack(v, Tile::load(b.v, at, true));
  for (int base = 0; base < pairs; base += Tile::kSlots) {
    int pair = base + Tile::slot();
    bool is_there = pair < pairs;
    int64_t at_pair = (int64_t)(key + pair / group) * b.heads + blockIdx.y * group + pair % group;
    Tile::unpack(q, Tile::load(b.q, at_pair * D, is_there), b.scale);
    Tile::unpack(g, Tile::load(b.grad_out, at_pair * D, is_there));
    float score = Tile::dot(q, k), slope = Tile::dot(g, v);
    if (!is_there) continue;
    float prob = __expf(score - b.lse[at_pair]);
    Tile::add(sum_v, prob, g);
    Tile::add(sum_k, prob * (slope - b.delta[at_pair]), q);  // q is scaled already
  }
  store_sum<T, D>(sum_k, b.grad_k, at);
  store_sum<T, D>(sum_v, b.grad_v, at);
}

template <class T, int D>
static int launch(const Backward& b, void* stream) {
  int status = LAUNCH((grad_q_kernel<T, D>), dim3(b.tokens, b.heads), dim3(kThreads), 0, stream, b);
  if (status) return status;
  return LAUNCH((grad_kv_kernel<T, D>), dim3(b.tokens, b.kv_heads), dim3(kThreads), 0, stream, b);
}

int packed_attention_backward_cuda(const void* q, const void* k, const void* v, const void* out,
                                   const void* grad_out, const float* lse, int dtype,
                                   const int32_t* cu_seqlens, int64_t segments, int64_t tokens,
                                   int64_t heads, int64_t kv_heads, int64_t head_dim, float scale,
                                   void* grad_q, void* grad_k, void* grad_v, float* scratch,
                                   void* stream) {
  if (tokens == 0) return 0;
  Backward b{q, k, v, out, grad_out, lse, {(int)segments, cu_seqlens, nullptr}, tokens, heads,
             kv_heads, scale, grad_q, grad_k, grad_v, scratch};
  auto run = dtype ? FOR_HEAD_DIM(launch, bf16, head_dim) : FOR_HEAD_DIM(launch, float, head_dim);
  bool is_readable = is_aligned(q) && is_aligned(k) && is_aligned(v) && is_aligned(out) &&
                     is_aligned(grad_out);
  return run && is_readable && heads % kv_heads == 0 ? run(b, stream) : kInvalid;
}

// The backward pass of packed attention on the CPU. The weights are computed again, in tiles of
// queries and keys of one head. A thread owns a segment's kv head, so nothing is added up between
// threads.
#include "cpu_attention.h"

namespace {

// One head of one segment, as floats.
struct Head {
  int64_t length;
  const float *q, *grad_out, *lse, *delta;  // [length, D], [length, D], [length], [length]
  const float *k, *v;                       // [length, D]
  float *grad_q, *grad_k, *grad_v;          // added to
};

// Gradients by the queries [first, first + 32) and keys [base, base + 32); first >= base. The
// weights are computed again; q is scaled, so grad_q lacks the factor.
template <int D>
INLINE void backward_tile(const Head& h, int64_t first, int64_t base) {
  float p[kKeys * kQueries], ds[kKeys * kQueries], by_query[kKeys], of_value[kKeys];
  const float *q[kQueries], *grad_out[kQueries], *k[kKeys], *v[kKeys];
  int queries = (int)std::min<int64_t>(kQueries, h.length - first);
  int keys = (int)std::min<int64_t>(kKeys, h.length - base);
  for (int t = 0; t < kKeys; ++t) {  // `dots` reads whole eights
    int64_t at = (base + std::min(t, keys - 1)) * D;
    k[t] = h.k + at, v[t] = h.v + at;
  }
  for (int i = 0; i < queries; ++i) {
    int64_t at = first + i;
    int visible = (int)std::min<int64_t>(keys, at + 1 - base);
    q[i] = h.q + at * D, grad_out[i] = h.grad_out + at * D;
    dots<D>(q[i], k, visible, by_query);
    dots<D>(grad_out[i], v, visible, of_value);
    for (int t = visible; t < kKeys; ++t) by_query[t] = -kInf, of_value[t] = 0;
#pragma omp simd
    for (int t = 0; t < kKeys; ++t) {
      by_query[t] = exp_neg(by_query[t] - h.lse[at]);
      of_value[t] = by_query[t] * (of_value[t] - h.delta[at]);
    }
    for (int t = 0; t < kKeys; ++t)
      p[t * kQueries + i] = by_query[t], ds[t * kQueries + i] = of_value[t];
    mix<D>(of_value, k, visible, h.grad_q + at * D);
  }
  for (int t = 0; t < keys; ++t) {
    int from = (int)std::max<int64_t>(0, base + t - first);  // the first that sees this key
    if (from >= queries) continue;
    mix<D>(p + t * kQueries + from, grad_out + from, queries - from, h.grad_v + (base + t) * D);
    mix<D>(ds + t * kQueries + from, q + from, queries - from, h.grad_k + (base + t) * D);
  }
}

template <int D>
INLINE void backward_head(const Head& h) {
  for (int64_t base = 0; base < h.length; base += kKeys)
    for (int64_t first = base; first < h.length; first += kQueries)
      backward_tile<D>(h, first, base);
}

CLONES void backward_32(const Head& h) { backward_head<32>(h); }
CLONES void backward_64(const Head& h) { backward_head<64>(h); }
CLONES void backward_128(const Head& h) { backward_head<128>(h); }

// Rows [first, first + n) of one head of x [N, heads, D], as floats times `factor`.
void read_head(const void* x, int dtype, int64_t first, int64_t n, int64_t heads, int64_t head,
               int64_t D, float factor, float* out) {
  for (int64_t i = 0; i < n; ++i) {
    int64_t at = ((first + i) * heads + head) * D;
    if (dtype)
      widen((const bf16*)x + at, (int)D, factor, out + i * D);
    else
      widen((const float*)x + at, (int)D, factor, out + i * D);
  }
}

void write_head(const float* x, int dtype, int64_t first, int64_t n, int64_t heads, int64_t head,
                int64_t D, float factor, void* out) {
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < D; ++j) {
      int64_t at = ((first + i) * heads + head) * D + j;
      if (dtype)
        store((bf16*)out + at, x[i * D + j] * factor);
      else
        store((float*)out + at, x[i * D + j] * factor);
    }
}

}  // namespace

int packed_attention_backward_cpu(const void* q, const void* k, const void* v, const void* out,
                                  const void* grad_out, const float* lse, int dtype,
                                  const int32_t* cu_seqlens, int64_t segments, int64_t,
                                  int64_t heads, int64_t kv_heads, int64_t head_dim, float scale,
                                  void* grad_q, void* grad_k, void* grad_v, float*, void*) {
  int64_t D = head_dim, group = heads / kv_heads;
#pragma omp parallel for collapse(2) schedule(dynamic, 1)
  for (int64_t s = 0; s < segments; ++s)
    for (int64_t h = 0; h < kv_heads; ++h) {
      int64_t start = cu_seqlens[s], n = cu_seqlens[s + 1] - start;
      std::vector<float> memory(n * D * 8 + 2 * n);
      auto part = [&](int i) { return memory.data() + i * n * D; };
      float *lses = part(8), *delta = lses + n;
      Head head{n, part(0), part(1), lses, delta, part(2), part(3), part(4), part(5), part(6)};
      read_head(k, dtype, start, n, kv_heads, h, D, 1, part(2));
      read_head(v, dtype, start, n, kv_heads, h, D, 1, part(3));
      for (int64_t g = h * group; g < (h + 1) * group; ++g) {
        read_head(q, dtype, start, n, heads, g, D, scale, part(0));
        read_head(grad_out, dtype, start, n, heads, g, D, 1, part(1));
        read_head(out, dtype, start, n, heads, g, D, 1, part(7));
        std::fill(part(4), part(5), 0.0f);
        for (int64_t i = 0; i < n; ++i) {
          lses[i] = lse[(start + i) * heads + g], delta[i] = 0;
          for (int64_t j = 0; j < D; ++j) delta[i] += part(1)[i * D + j] * part(7)[i * D + j];
        }
        (D == 32 ? backward_32 : D == 64 ? backward_64 : backward_128)(head);
        write_head(part(4), dtype, start, n, heads, g, D, scale, grad_q);
      }
      write_head(part(5), dtype, start, n, kv_heads, h, D, 1, grad_k);
      write_head(part(6), dtype, start, n, kv_heads, h, D, 1, grad_v);
    }
  return 0;
}

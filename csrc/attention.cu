// Causal attention of packed queries, over pages of the cache (paged: the sampler's) or over their
// own segment (packed: the trainer's). Both are one kernel, in which a query's result depends on
// its keys and values alone: sampler and trainer agree bit for bit.
//
// A query takes its keys in chunks of kChunkKeys, from the first on. One block reduces a chunk. The
// chunks are folded from left to right: by the block that made them all, or, where several blocks
// share them (splits), by a second kernel from scratch memory.
#include "attention.h"

// Where keys and values lie; strides count elements.
struct Keys {
  const void *k, *v;
  const int32_t* tables;  // null: the keys are the segment's own
  int64_t table_stride, block_stride, head_stride, token_stride;
  unsigned block_size;
};

struct Attention {
  const void* q;
  Keys keys;
  Queries queries;
  int64_t num_queries, heads, kv_heads;
  float scale;
  void* out;
  float *lse, *scratch;  // either may be null
  int64_t splits, chunks;
};

// The softmax over some of the keys: largest score, sum of e^(score - max), and of the sums of
// e^(score - max) * value that of one column.
struct Partial {
  float max, sum, acc;
};

__device__ __forceinline__ Partial fold(Partial a, Partial b) {
  float top = fmaxf(a.max, b.max);
  float ea = __expf(a.max - exp_base(top)), eb = __expf(b.max - exp_base(top));
  return {top, fmaf(a.sum, ea, b.sum * eb), fmaf(a.acc, ea, b.acc * eb)};
}

template <class T>
__device__ __forceinline__ T finish(Partial p) {
  return from_float<T>(p.sum == 0.f ? 0.f : p.acc / p.sum);  // a row of padding has no keys
}

// What a slot has seen of a chunk, for G heads; a lane has its own part of the columns.
template <int G, int N>
struct Slot {
  float max[G], sum[G], acc[G][N];
};

template <class T, int D, int G>
__device__ __forceinline__ void reduce_keys(Slot<G, Pack<T>::N>& own,
                                            const float (&q)[G][Pack<T>::N], const Keys& keys,
                                            const int32_t* table, int64_t start, int begin,
                                            int end) {
  using Tile = ::Tile<T, D>;
  // Tokens of a slot in flight: as many as fit the registers.
  constexpr int N = Tile::N, kAhead = G * N < 32 ? 4 : G * N < 64 ? 3 : 2;
  // every lane runs the same rounds, so that all of a warp meet in the shuffles
  for (int base = begin + Tile::slot(); base - Tile::slot() < end; base += kAhead * Tile::kSlots) {
    Pack<T> k[kAhead], v[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      unsigned token = base + u * Tile::kSlots;
      bool is_there = (int)token < end;
      int64_t page = table && is_there ? table[token / keys.block_size] * keys.block_stride : 0;
      int64_t at = start + page + token % keys.block_size * keys.token_stride;
      k[u] = Tile::load(keys.k, at, is_there);
      v[u] = Tile::load(keys.v, at, is_there);
    }
#pragma unroll
    for (int g = 0; g < G; ++g) {
      float x[N], score[kAhead], top = own.max[g];
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        Tile::unpack(x, k[u]);
        score[u] = Tile::dot(q[g], x);
        if (base + u * Tile::kSlots >= end) score[u] = -INFINITY;
        top = fmaxf(top, score[u]);
      }
      float a = __expf(own.max[g] - exp_base(top));
      own.max[g] = top;
      own.sum[g] *= a;
#pragma unroll
      for (int j = 0; j < N; ++j) own.acc[g][j] *= a;
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        float e = __expf(score[u] - exp_base(top));
        own.sum[g] += e;
        Tile::unpack(x, v[u]);
        Tile::add(own.acc[g], e, x);
      }
    }
  }
}

// All slots of one head together: column threadIdx.x, in the first D threads.
template <class T, int D>
__device__ __forceinline__ Partial merge_slots(float max, float sum,
                                               const float (&acc)[Pack<T>::N]) {
  using Tile = ::Tile<T, D>;
  __shared__ float of_max[Tile::kSlots], of_sum[Tile::kSlots], of_acc[Tile::kSlots][D];
  if (Tile::lane() == 0) {
    of_max[Tile::slot()] = max;
    of_sum[Tile::slot()] = sum;
  }
#pragma unroll
  for (int j = 0; j < Tile::N; ++j) of_acc[Tile::slot()][Tile::lane() * Tile::N + j] = acc[j];
  __syncthreads();
  Partial p{-INFINITY, 0.f, 0.f};
  if (threadIdx.x < D) {
    for (int s = 0; s < Tile::kSlots; ++s) p.max = fmaxf(p.max, of_max[s]);
    for (int s = 0; s < Tile::kSlots; ++s) {
      float e = __expf(of_max[s] - exp_base(p.max));
      p.sum = fmaf(e, of_sum[s], p.sum);
      p.acc = fmaf(e, of_acc[s][threadIdx.x], p.acc);
    }
  }
  __syncthreads();  // all have read before the next head is written
  return p;
}

// Blocks that are to fit a multiprocessor at once: what registers allow without spilling.
constexpr int blocks_at_once(int group) { return group < 4 ? 4 : group == 4 ? 3 : 2; }

// grid (queries, kv heads, splits). The G query heads of a kv head share a block: its keys and
// values are read once.
template <class T, int D, int G>
__global__ void __launch_bounds__(kThreads, blocks_at_once(G)) attention_kernel(Attention a) {
  using Tile = ::Tile<T, D>;
  DYNAMIC_SHARED(Partial, total);  // [G][D] without scratch; a thread has its own column
  int query = blockIdx.x, row = a.queries.row(query), num_keys = a.queries.num_keys(query, row);
  int64_t first = ((int64_t)query * a.kv_heads + blockIdx.y) * G;  // of [queries, heads]
  const int32_t* table = a.keys.tables ? a.keys.tables + row * a.keys.table_stride : nullptr;
  int64_t start = blockIdx.y * a.keys.head_stride;
  if (!table) start += a.queries.cu_seqlens[row] * a.keys.token_stride;
  int d = threadIdx.x;
  bool is_last = !a.scratch && d < D;
  for (int g = 0; g < G && is_last; ++g) total[g * D + d] = {-INFINITY, 0.f, 0.f};

  float q[G][Tile::N];
#pragma unroll
  for (int g = 0; g < G; ++g) Tile::unpack(q[g], Tile::load(a.q, (first + g) * D, true), a.scale);
  for (int chunk = blockIdx.z; chunk * kChunkKeys < num_keys; chunk += gridDim.z) {
    Slot<G, Tile::N> own;
#pragma unroll
    for (int g = 0; g < G; ++g) {
      own.max[g] = -INFINITY;
      own.sum[g] = 0.f;
#pragma unroll
      for (int j = 0; j < Tile::N; ++j) own.acc[g][j] = 0.f;
    }
    int begin = chunk * kChunkKeys, end = min(num_keys, begin + (int)kChunkKeys);
    reduce_keys<T, D, G>(own, q, a.keys, table, start, begin, end);
#pragma unroll
    for (int g = 0; g < G; ++g) {
      Partial p = merge_slots<T, D>(own.max[g], own.sum[g], own.acc[g]);
      if (is_last) total[g * D + d] = fold(total[g * D + d], p);
      if (!a.scratch || d >= D) continue;
      float* part = a.scratch + ((first + g) * a.chunks + chunk) * (D + 2);
      part[d] = p.acc;
      if (d == 0) {
        part[D] = p.max;
        part[D + 1] = p.sum;
      }
    }
  }
  for (int g = 0; g < G && is_last; ++g) {
    Partial p = total[g * D + d];
    ((T*)a.out)[(first + g) * D + d] = finish<T>(p);
    if (a.lse && d == 0) a.lse[first + g] = p.max + logf(p.sum);
  }
}

// grid (queries, heads), D threads.
template <class T, int D>
__global__ void fold_kernel(Attention a) {
  int query = blockIdx.x, num_keys = a.queries.num_keys(query, a.queries.row(query));
  int64_t at = (int64_t)query * a.heads + blockIdx.y;
  Partial p{-INFINITY, 0.f, 0.f};
  for (int chunk = 0; chunk * kChunkKeys < num_keys; ++chunk) {
    const float* part = a.scratch + (at * a.chunks + chunk) * (D + 2);
    p = fold(p, {part[D], part[D + 1], part[threadIdx.x]});
  }
  ((T*)a.out)[at * D + threadIdx.x] = finish<T>(p);
}

template <class T, int D, int G>
static int run(const Attention& a, void* stream) {
  size_t total = a.scratch ? 0 : G * D * sizeof(Partial);
  int status = LAUNCH((attention_kernel<T, D, G>), dim3(a.num_queries, a.kv_heads, a.splits),
                      dim3(kThreads), total, stream, a);
  if (status || !a.scratch) return status;
  return LAUNCH((fold_kernel<T, D>), dim3(a.num_queries, a.heads), dim3(D), 0, stream, a);
}

template <class T, int D>
static int for_group(const Attention& a, void* stream) {
  if (a.heads % a.kv_heads) return kInvalid;
  switch (a.heads / a.kv_heads) {
    case 1: return run<T, D, 1>(a, stream);
    case 2: return run<T, D, 2>(a, stream);
    case 4: return run<T, D, 4>(a, stream);
    case 8: return run<T, D, 8>(a, stream);
    default: return kInvalid;
  }
}

static int launch(const Attention& a, int dtype, int64_t head_dim, void* stream) {
  if (a.num_queries == 0) return 0;
  auto run = dtype ? FOR_HEAD_DIM(for_group, bf16, head_dim)
                   : FOR_HEAD_DIM(for_group, float, head_dim);
  bool is_readable = is_aligned(a.q) && is_aligned(a.keys.k) && is_aligned(a.keys.v);
  return run && is_readable ? run(a, stream) : kInvalid;
}

int paged_attention_cuda(const void* q, Cache cache, Rows rows, int64_t heads, float scale,
                         void* out, float* scratch, int64_t splits, void* stream) {
  int64_t page = cache.block_size * cache.head_dim, values = cache.kv_heads * page;
  int64_t size = cache.dtype ? sizeof(bf16) : sizeof(float);
  Keys keys{cache.data, (const char*)cache.data + values * size, rows.tables, rows.table_stride,
            2 * values, page, cache.head_dim, (unsigned)cache.block_size};
  Queries queries{(int)rows.rows, rows.cu_seqlens, rows.lengths};
  if (splits < 2) scratch = nullptr;
  Attention a{q, keys, queries, rows.queries, heads, cache.kv_heads, scale, out, nullptr, scratch,
              splits, (rows.max_length + kChunkKeys - 1) / kChunkKeys};
  return launch(a, cache.dtype, cache.head_dim, stream);
}

int packed_attention_cuda(const void* q, const void* k, const void* v, int dtype,
                          const int32_t* cu_seqlens, int64_t segments, int64_t tokens,
                          int64_t heads, int64_t kv_heads, int64_t head_dim, float scale,
                          void* out, float* lse, void* stream) {
  Keys keys{k, v, nullptr, 0, 0, head_dim, kv_heads * head_dim, 1u << 31};  // one endless page
  Queries queries{(int)segments, cu_seqlens, nullptr};
  Attention a{q, keys, queries, tokens, heads, kv_heads, scale, out, lse, nullptr, 1, 0};
  return launch(a, dtype, head_dim, stream);
}

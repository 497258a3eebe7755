// KV cache and attention on the CPU.
//
// Each query folds its keys in chunks of kKeys from the first on, one online softmax step a chunk,
// whatever else is computed: paged and packed attention call the same function for a chunk, so that
// sampler and trainer get the same bits, whatever the batch, the block tables, the chunks of a
// prefill or the number of threads. Inside, a tile of queries shares the keys that it reads.
#include "cpu_attention.h"

namespace {

struct Tile {
  int count, dtype;
  int keys;                // of this chunk
  int visible[kQueries];   // how many of them each query sees
  const char* key[kKeys];  // a value stands `to_value` bytes after its key
  intptr_t to_value;
  float top[kQueries], sum[kQueries];
  alignas(64) float q[kQueries * 128], acc[kQueries * 128];
};

// Float rows of the keys (or values): the tensor's own, or a copy of bfloat16, and of floats that
// many queries share: rows 4 kB apart would fall on the same few lines of the first-level cache.
template <int D>
INLINE void float_rows(const Tile& tile, intptr_t offset, float* buffer, const float** rows) {
  bool is_copied = tile.dtype || tile.count > 8;
  for (int t = 0; t < tile.keys; ++t) {
    auto address = (const void*)((intptr_t)tile.key[t] + offset);
    rows[t] = is_copied ? buffer + t * D : (const float*)address;
    if (tile.dtype)
      widen((const bf16*)address, D, 1.0f, buffer + t * D);
    else if (is_copied)
      memcpy(buffer + t * D, address, D * sizeof(float));
  }
  for (int t = tile.keys; t < kKeys; ++t) rows[t] = rows[0];  // `dots` reads whole eights
}

// One step of the online softmax; scores become weights. Returns the factor of what came before.
INLINE float softmax_step(float* scores, int visible, float& top, float& sum) {
  for (int t = visible; t < kKeys; ++t) scores[t] = -kInf;
  float highest = top, added = 0;
#pragma omp simd reduction(max : highest)
  for (int t = 0; t < kKeys; ++t) highest = scores[t] > highest ? scores[t] : highest;
  float base = highest == -kInf ? 0 : highest;  // nothing but -inf or NaN so far
#pragma omp simd reduction(+ : added)
  for (int t = 0; t < kKeys; ++t) {
    scores[t] = exp_neg(scores[t] - base);
    added += scores[t];
  }
  float factor = exp_neg(top - base);
  top = highest;
  sum = sum * factor + added;
  return factor;
}

template <int D>
INLINE void fold(Tile& tile) {
  alignas(64) float buffer[kKeys * D], weights[kQueries * kKeys];
  const float* rows[kKeys];
  float_rows<D>(tile, 0, buffer, rows);
  for (int i = 0; i < tile.count; ++i)
    if (tile.visible[i] > 0) {
      float* w = weights + i * kKeys;
      dots<D>(tile.q + i * D, rows, tile.visible[i], w);
      float factor = softmax_step(w, tile.visible[i], tile.top[i], tile.sum[i]);
      if (factor != 1.0f)
        for (int j = 0; j < D; ++j) tile.acc[i * D + j] *= factor;
    }
  float_rows<D>(tile, tile.to_value, buffer, rows);
  for (int i = 0; i < tile.count; ++i)
    if (tile.visible[i] > 0)
      mix<D>(weights + i * kKeys, rows, tile.visible[i], tile.acc + i * D);
}

CLONES void fold_32(Tile& tile) { fold<32>(tile); }
CLONES void fold_64(Tile& tile) { fold<64>(tile); }
CLONES void fold_128(Tile& tile) { fold<128>(tile); }

void fold_chunk(Tile& tile, int64_t head_dim) {
  (head_dim == 32 ? fold_32 : head_dim == 64 ? fold_64 : fold_128)(tile);
}

// Queries of one tile: `tokens` tokens from `position` on, the group's heads of each.
struct Span {
  const void* q;  // [N, H, D]
  int64_t token;  // of the first in q
  int64_t position;
  int64_t tokens, heads, head, group, head_dim;  // head: the group's first
  int dtype;
  float scale;
  int64_t at(int i) const { return ((token + i / group) * heads + head + i % group) * head_dim; }
};

void open_tile(Tile& tile, const Span& span) {
  int D = (int)span.head_dim;
  tile.count = (int)(span.tokens * span.group);
  tile.dtype = span.dtype;
  for (int i = 0; i < tile.count; ++i) {
    float* q = tile.q + i * D;
    if (span.dtype)
      widen((const bf16*)span.q + span.at(i), D, span.scale, q);
    else
      widen((const float*)span.q + span.at(i), D, span.scale, q);
    tile.top[i] = -kInf, tile.sum[i] = 0;
  }
  std::fill(tile.acc, tile.acc + tile.count * D, 0.0f);
}

void close_tile(const Tile& tile, const Span& span, void* out, float* lse) {
  int64_t D = span.head_dim;
  for (int i = 0; i < tile.count; ++i) {
    for (int64_t j = 0; j < D; ++j) {
      float x = tile.acc[i * D + j] / tile.sum[i];
      if (span.dtype)
        store((bf16*)out + span.at(i) + j, x);
      else
        store((float*)out + span.at(i) + j, x);
    }
    if (lse) lse[span.at(i) / D] = tile.top[i] + std::log(tile.sum[i]);
  }
}

// Attention of a span over the keys that `next` points out, one call each in the order of keys.
template <class Next>
void attend(const Span& span, intptr_t to_value, Next next, void* out, float* lse) {
  Tile tile;
  open_tile(tile, span);
  tile.to_value = to_value;
  int64_t length = span.position + span.tokens;
  for (int64_t base = 0; base < length; base += kKeys) {
    tile.keys = (int)std::min<int64_t>(kKeys, length - base);
    for (int t = 0; t < tile.keys; ++t) tile.key[t] = next();
    for (int i = 0; i < tile.count; ++i) {
      int64_t seen = span.position + i / span.group + 1 - base;
      tile.visible[i] = (int)std::min<int64_t>(tile.keys, seen);
    }
    fold_chunk(tile, span.head_dim);
  }
  close_tile(tile, span, out, lse);
}

// Tiles of rows of queries: (row, first token) of each.
struct Part {
  int32_t row, first;
};

std::vector<Part> parts_of(const int32_t* cu_seqlens, int64_t rows, int64_t tokens) {
  std::vector<Part> parts;
  for (int32_t r = 0; r < rows; ++r)
    for (int32_t first = cu_seqlens[r]; first < cu_seqlens[r + 1]; first += (int32_t)tokens)
      parts.push_back({r, first});
  return parts;
}

}  // namespace

int kv_write_cpu(Cache cache, const void* k, const void* v, const int64_t* slots, int64_t n,
                 void*) {
  int64_t size = cache.head_dim * (cache.dtype ? 2 : 4);  // bytes of a key
  int64_t page = cache.block_size * size;
#pragma omp parallel for if (n > 64)
  for (int64_t i = 0; i < n; ++i) {
    if (slots[i] < 0) continue;
    int64_t block = slots[i] / cache.block_size, offset = slots[i] % cache.block_size;
    for (int64_t h = 0; h < cache.kv_heads; ++h) {
      char* key = (char*)cache.data + (2 * block * cache.kv_heads + h) * page + offset * size;
      int64_t from = (i * cache.kv_heads + h) * size;
      memcpy(key, (const char*)k + from, size);
      memcpy(key + cache.kv_heads * page, (const char*)v + from, size);
    }
  }
  return 0;
}

int kv_copy_cpu(Cache cache, const int64_t* sources, const int64_t* targets, int64_t n, void*) {
  int64_t size = 2 * cache.kv_heads * cache.block_size * cache.head_dim * (cache.dtype ? 2 : 4);
  for (int64_t i = 0; i < n; ++i)
    memcpy((char*)cache.data + targets[i] * size, (char*)cache.data + sources[i] * size, size);
  return 0;
}

int paged_attention_cpu(const void* q, Cache cache, Rows rows, int64_t heads, float scale,
                        void* out, float*, int64_t, void*) {
  int64_t D = cache.head_dim, group = heads / cache.kv_heads, size = D * (cache.dtype ? 2 : 4);
  int64_t page = cache.block_size * size;  // bytes of one head's keys in a block
  int64_t per_tile = std::max<int64_t>(1, kQueries / group);
  std::vector<Part> parts = parts_of(rows.cu_seqlens, rows.rows, per_tile);
#pragma omp parallel for collapse(2) schedule(dynamic, 1)
  for (size_t p = 0; p < parts.size(); ++p)
    for (int64_t h = 0; h < cache.kv_heads; ++h) {
      auto [row, first] = parts[p];
      int64_t end = rows.cu_seqlens[row + 1];
      Span span{q, first, rows.lengths[row] - (end - first), std::min(per_tile, end - first),
                heads, h * group, group, D, cache.dtype, scale};
      const int32_t* table = rows.tables + row * rows.table_stride;
      const char *head = (const char*)cache.data + h * page, *key = nullptr;
      int64_t left = 0;  // in the block that `key` stands in
      auto next = [&] {
        if (left == 0) {
          key = head + *table++ * 2 * cache.kv_heads * page;
          left = cache.block_size;
        }
        const char* this_key = key;
        key += size, --left;
        return this_key;
      };
      attend(span, cache.kv_heads * page, next, out, nullptr);
    }
  return 0;
}

int packed_attention_cpu(const void* q, const void* k, const void* v, int dtype,
                         const int32_t* cu_seqlens, int64_t segments, int64_t, int64_t heads,
                         int64_t kv_heads, int64_t head_dim, float scale, void* out, float* lse,
                         void*) {
  int64_t group = heads / kv_heads, size = head_dim * (dtype ? 2 : 4);
  int64_t per_tile = std::max<int64_t>(1, kQueries / group);
  std::vector<Part> parts = parts_of(cu_seqlens, segments, per_tile);
#pragma omp parallel for collapse(2) schedule(dynamic, 1)
  for (size_t p = 0; p < parts.size(); ++p)
    for (int64_t h = 0; h < kv_heads; ++h) {
      auto [row, first] = parts[p];
      int64_t start = cu_seqlens[row], end = cu_seqlens[row + 1];
      Span span{q, first, first - start, std::min(per_tile, end - first),
                heads, h * group, group, head_dim, dtype, scale};
      const char* key = (const char*)k + (start * kv_heads + h) * size;
      auto next = [&] {
        const char* this_key = key;
        key += kv_heads * size;
        return this_key;
      };
      attend(span, (intptr_t)v - (intptr_t)k, next, out, lse);
    }
  return 0;
}

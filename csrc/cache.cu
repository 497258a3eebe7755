// Writes to the paged KV cache: new keys and values into slots, whole blocks for forked rows.
#include "device.h"

constexpr int kCopyThreads = 128;

// One block a token. A Unit is 16 bytes, or one element.
template <class Unit>
__global__ void kv_write_kernel(Cache cache, const void* k, const void* v, const int64_t* slots,
                                int64_t head_units) {
  int64_t token = blockIdx.x, slot = slots[token], all = cache.kv_heads * head_units;
  if (slot < 0) return;
  int64_t block = slot / cache.block_size, offset = slot % cache.block_size;
  for (int64_t i = threadIdx.x; i < 2 * all; i += kCopyThreads) {
    const Unit* from = i < all ? (const Unit*)k + i : (const Unit*)v + i - all;
    int64_t head = block * 2 * cache.kv_heads + i / head_units;  // the values' follow the keys'
    int64_t to = (head * cache.block_size + offset) * head_units + i % head_units;
    ((Unit*)cache.data)[to] = from[token * all];
  }
}

template <class Unit>
__global__ void kv_copy_kernel(Cache cache, const int64_t* sources, const int64_t* targets,
                               int64_t head_units) {
  int64_t units = 2 * cache.kv_heads * cache.block_size * head_units;
  const Unit* from = (const Unit*)cache.data + sources[blockIdx.x] * units;
  Unit* to = (Unit*)cache.data + targets[blockIdx.x] * units;
  for (int64_t i = threadIdx.x; i < units; i += kCopyThreads) to[i] = from[i];
}

static int64_t head_bytes(Cache c) {
  return c.head_dim * (int64_t)(c.dtype ? sizeof(bf16) : sizeof(float));
}

int kv_write_cuda(Cache cache, const void* k, const void* v, const int64_t* slots, int64_t n,
                  void* stream) {
  if (n == 0) return 0;
  bool is_wide = is_aligned(cache.data) && is_aligned(k) && is_aligned(v) &&
                 head_bytes(cache) % 16 == 0;
  auto kernel = is_wide       ? kv_write_kernel<uint4>
                : cache.dtype ? kv_write_kernel<uint16_t>
                              : kv_write_kernel<uint32_t>;
  int64_t units = is_wide ? head_bytes(cache) / 16 : cache.head_dim;
  return LAUNCH(kernel, dim3(n), dim3(kCopyThreads), 0, stream, cache, k, v, slots, units);
}

int kv_copy_cuda(Cache cache, const int64_t* sources, const int64_t* targets, int64_t n,
                 void* stream) {
  if (n == 0) return 0;
  bool is_wide = is_aligned(cache.data) && head_bytes(cache) % 16 == 0;
  auto kernel = is_wide       ? kv_copy_kernel<uint4>
                : cache.dtype ? kv_copy_kernel<uint16_t>
                              : kv_copy_kernel<uint32_t>;
  int64_t units = is_wide ? head_bytes(cache) / 16 : cache.head_dim;
  return LAUNCH(kernel, dim3(n), dim3(kCopyThreads), 0, stream, cache, sources, targets, units);
}

// What attention's forward and backward kernels share: how a thread block is divided, and which row
// a packed query belongs to.
#pragma once
#include "device.h"

constexpr int kThreads = 128;

// kLanes neighbouring threads share a token, each holds 16 bytes of its D numbers; the block works
// on kSlots tokens at once.
template <class T, int D>
struct Tile {
  static constexpr int N = Pack<T>::N, kLanes = D / N, kSlots = kThreads / kLanes;
  static __device__ __forceinline__ int lane() { return threadIdx.x % kLanes; }
  static __device__ __forceinline__ int slot() { return threadIdx.x / kLanes; }

  // This lane's part of the D numbers at `at`, or zeros.
  static __device__ __forceinline__ Pack<T> load(const void* tensor, int64_t at, bool is_there) {
    return is_there ? ((const Pack<T>*)((const T*)tensor + at))[lane()] : Pack<T>{};
  }
  static __device__ __forceinline__ void unpack(float (&x)[N], const Pack<T>& p, float scale = 1) {
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] = to_float(p.v[j]) * scale;
  }
  // In every lane of the token; all lanes of the warp take part.
  static __device__ __forceinline__ float dot(const float (&x)[N], const float (&y)[N]) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) sum = fmaf(x[j], y[j], sum);
    return warp_sum(sum, kLanes);
  }
  static __device__ __forceinline__ void add(float (&sum)[N], float a, const float (&x)[N]) {
#pragma unroll
    for (int j = 0; j < N; ++j) sum[j] = fmaf(a, x[j], sum[j]);
  }
};

struct Queries {
  int rows;
  const int32_t* cu_seqlens;
  const int32_t* lengths;  // null: a row's tokens are its queries

  // The row of a query: the last one that starts at or before it.
  __device__ __forceinline__ int row(int query) const {
    int low = 0, high = rows;  // cu_seqlens[low] <= query < cu_seqlens[high]
    if (query < rows && cu_seqlens[query] == query && cu_seqlens[query + 1] > query)
      return query;  // decoding: nothing to search
    while (high - low > 1) {
      int middle = (low + high) / 2;
      (cu_seqlens[middle] <= query ? low : high) = middle;
    }
    return low;
  }
  // Keys that a query of the row sees: its own token's and those before.
  __device__ __forceinline__ int num_keys(int query, int row) const {
    int start = cu_seqlens[row], end = cu_seqlens[row + 1];
    return (lengths ? lengths[row] : end - start) - (end - 1 - query);
  }
};

// The instance of `launch` for a head size, or null.
#define FOR_HEAD_DIM(launch, T, head_dim)  \
  ((head_dim) == 32    ? launch<T, 32>     \
   : (head_dim) == 64  ? launch<T, 64>     \
   : (head_dim) == 128 ? launch<T, 128>    \
                       : nullptr)

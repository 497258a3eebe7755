// Every kernel's launcher: C functions over raw pointers, sizes and a stream, no torch. Each exists
// twice, as NAME_cpu (cpu.cpp: OpenMP, the stream is ignored) and NAME_cuda (the .cu files). All
// return 0, or a CUDA error. `dtype` is 0 for float32 and 1 for bfloat16; strides count elements.
#pragma once
#include <cstdint>

// Attention folds the keys of a query in chunks of so many, from the first on, whatever the splits.
constexpr int64_t kChunkKeys = 256;

// Rows of the one reduction over a vocabulary. `mask` may be null; masked-out rows are not read,
// and their results are 0.
struct Logits {
  const void* data;  // [N, columns], rows `stride` apart
  int dtype;
  int64_t rows, columns, stride;
  int64_t num_valid;  // the softmax is over the first so many columns
  float temperature;
};

struct Cache {  // of one layer, [blocks, 2, kv_heads, block_size, head_dim]: keys, then values
  void* data;
  int dtype;
  int64_t blocks, kv_heads, block_size, head_dim;
};

// Queries of R rows, packed: row r has q_len = cu_seqlens[r + 1] - cu_seqlens[r] of them, which are
// the last of its lengths[r] tokens.
struct Rows {
  int64_t rows, queries;  // queries: cu_seqlens[rows], which the host cannot read without waiting
  const int32_t* cu_seqlens;  // [R + 1]
  const int32_t* lengths;     // [R] tokens, the queries' own included
  const int32_t* tables;      // [R, table_stride] block of each block_size tokens
  int64_t table_stride, max_length;
};

#define KERNELS(S)                                                                                 \
  int logprob##S(Logits x, const int64_t* targets, const uint8_t* mask, float* logps,              \
                 float* entropy, float* lse, void* stream);                                        \
  /* grad [N, columns] may be x.data itself; masked-out rows, columns past num_valid become 0 */   \
  int logprob_backward##S(Logits x, const int64_t* targets, const uint8_t* mask, const float* lse, \
                          const float* grad_logps, void* grad, int64_t grad_stride, void* stream); \
  /* groups as offsets [P + 1] into rewards [R], sorted by group; normalize: 0 none, 1 std of the  \
     population, 2 of a sample */                                                                  \
  int group_advantages##S(const double* rewards, const int64_t* offsets, const uint8_t* scored,    \
                          int64_t num_groups, int normalize, double eps, double flat,              \
                          float* advantages, void* stream);                                        \
  /* noise counter (step, sample, position, token / 4) under key; temperature 0: argmax */         \
  int sample##S(Logits x, const uint64_t* keys, const int64_t* steps, const int64_t* samples,      \
                const int64_t* positions, int64_t* ids, float* logps, void* stream);               \
  int kv_write##S(Cache cache, const void* k, const void* v, const int64_t* slots, int64_t n,      \
                  void* stream);                                                                   \
  /* blocks, none of them both a source and a target; kv_write skips slots below 0 */              \
  int kv_copy##S(Cache cache, const int64_t* sources, const int64_t* targets, int64_t n,           \
                 void* stream);                                                                    \
  /* scratch, for more than one split: queries * heads * chunks * (head_dim + 2) floats, where     \
     chunks = ceil(max_length / kChunkKeys); the result does not depend on the splits */           \
  int paged_attention##S(const void* q, Cache cache, Rows rows, int64_t heads, float scale,        \
                         void* out, float* scratch, int64_t splits, void* stream);                 \
  /* lse [tokens, heads]; of the backward's, scratch has the same shape */                         \
  int packed_attention##S(const void* q, const void* k, const void* v, int dtype,                  \
                          const int32_t* cu_seqlens, int64_t segments, int64_t tokens,             \
                          int64_t heads, int64_t kv_heads, int64_t head_dim, float scale,          \
                          void* out, float* lse, void* stream);                                    \
  int packed_attention_backward##S(                                                                \
      const void* q, const void* k, const void* v, const void* out, const void* grad_out,          \
      const float* lse, int dtype, const int32_t* cu_seqlens, int64_t segments, int64_t tokens,    \
      int64_t heads, int64_t kv_heads, int64_t head_dim, float scale, void* grad_q, void* grad_k,  \
      void* grad_v, float* scratch, void* stream);

extern "C" {
KERNELS(_cpu)
KERNELS(_cuda)
}

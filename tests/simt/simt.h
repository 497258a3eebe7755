// Runs plain CUDA C++ on the CPU, for tests: one fiber a CUDA thread, one block after the other.
//
// A fiber runs until it meets a barrier or a warp primitive. What hangs or is undefined on a GPU is
// an error here: the launch returns kFailed and simt_error() says what and where. Static shared
// memory is a static array (bounds: -fsanitize=undefined), dynamic shared memory a heap block of
// exactly the bytes asked for, full of NaN (bounds: -fsanitize=address). Under -fsanitize=thread a
// fiber is a thread that only __syncthreads and __syncwarp order, as on a GPU. SIMT_SEED=n runs
// threads and blocks in another order.
//
// Not seen: races between blocks, missing fences, contention, and whatever concerns speed.
#pragma once
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#define SIMT_TSAN(code) code
#define SIMT_HIDDEN __attribute__((no_sanitize("thread"), noinline)) inline
#else
#define SIMT_TSAN(code)
#define SIMT_HIDDEN inline
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __expf expf
using std::max;
using std::min;

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float __uint_as_float(unsigned u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
inline unsigned __float_as_uint(float f) {
  unsigned u;
  memcpy(&u, &f, 4);
  return u;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return (uint64_t)a * b >> 32; }

namespace simt {
constexpr int kFailed = 999, kMaxThreads = 1024;
constexpr size_t kStack = 128 << 10, kGuard = 4096;  // a stack that overflows is a segfault
enum State { kReady, kAtBarrier, kInWarp, kDone };

struct Fiber {
  ucontext_t context;
  char* stack;
  dim3 index;
  int id;
  State state;
  const char* file;  // where it waits
  int line;
  unsigned mask;  // the lanes that it waits for
  int source;     // the lane whose value it wants
  uint64_t value, result;
  void* tsan;
};

inline Fiber fibers[kMaxThreads];
inline Fiber* current;
inline ucontext_t scheduler;
inline int threads, alive, at_barrier;
inline dim3 grid_dim, block_dim, block_index;
inline void (*entry)(void*);
inline void* argument;
inline void* dynamic_shared;
inline uint32_t random_state;
inline char error[512];
// What the race detector synchronises on. A late thread must not acquire what an early one releases
// at the *next* barrier, or write-after-read races vanish: two objects, by turns. Nor may a thread
// that starts acquire what one releases that has ended.
inline char block_start, block_end, block_sync[2], warp_sync[kMaxThreads / 32][2];
inline unsigned block_turn, warp_turn[kMaxThreads / 32];
SIMT_TSAN(inline void* scheduler_tsan;)

template <class... Values>
SIMT_HIDDEN void fail(const char* format, Values... values) {
  if (*error) return;
  int n = snprintf(error, sizeof error, "simt: block %u,%u,%u: ", block_index.x, block_index.y,
                   block_index.z);
  snprintf(error + n, sizeof error - n, format, values...);
}

SIMT_HIDDEN void wait() {
  SIMT_TSAN(__tsan_switch_to_fiber(scheduler_tsan, __tsan_switch_to_fiber_no_sync));
  swapcontext(&current->context, &scheduler);
}

SIMT_HIDDEN void run_thread() {
  SIMT_TSAN(__tsan_acquire(&block_start));
  entry(argument);
  SIMT_TSAN(__tsan_release(&block_end));
  current->state = kDone;
  --alive;
  wait();
}

SIMT_HIDDEN void start(int id) {
  Fiber& f = fibers[id];
  if (!f.stack) {
    f.stack = (char*)mmap(nullptr, kGuard + kStack, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(f.stack, kGuard, PROT_NONE);
    SIMT_TSAN(f.tsan = __tsan_create_fiber(0));
  }
  f.id = id;
  f.index = dim3(id % block_dim.x, id / block_dim.x % block_dim.y, id / block_dim.x / block_dim.y);
  f.state = kReady;
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = f.stack + kGuard;
  f.context.uc_stack.ss_size = kStack;
  makecontext(&f.context, run_thread, 0);
}

SIMT_HIDDEN void sync_threads(const char* file, int line) {
  current->state = kAtBarrier;
  current->file = file;
  current->line = line;
  ++at_barrier;
  SIMT_TSAN(char* sync = &block_sync[block_turn & 1]; __tsan_release(sync));
  wait();
  SIMT_TSAN(__tsan_acquire(sync));
}

// Every warp primitive: publish a value, wait for all lanes of the mask, take one lane's value.
SIMT_HIDDEN uint64_t exchange(unsigned mask, uint64_t value, int source, const char* file,
                              int line) {
  Fiber& f = *current;
  Fiber* warp = &fibers[f.id / 32 * 32];
  f.state = kInWarp;
  f.mask = mask;
  f.source = source;
  f.value = value;
  f.file = file;
  f.line = line;
  if (!(mask >> f.id % 32 & 1)) fail("%s:%d: thread %d is not in its mask", file, line, f.id);
  if (!(mask >> source & 1)) fail("%s:%d: lane %d is not in the mask", file, line, source);
  unsigned here = 0;
  for (int l = 0; l < 32 && warp + l < fibers + threads; ++l)
    if (warp[l].state == kInWarp && warp[l].mask == mask && warp[l].line == line) here |= 1u << l;
  if (here != mask || *error) {
    wait();
    return f.result;
  }
  for (int l = 0; l < 32; ++l)  // the last lane to come serves all
    if (mask >> l & 1) {
      warp[l].result = warp[warp[l].source].value;
      warp[l].state = kReady;
    }
  ++warp_turn[f.id / 32];
  return f.result;
}

SIMT_HIDDEN void sync_warp(unsigned mask, const char* file, int line) {  // shuffles order no memory
  int warp = current->id / 32;
  SIMT_TSAN(char* sync = &warp_sync[warp][warp_turn[warp] & 1]; __tsan_release(sync));
  exchange(mask, 0, current->id % 32, file, line);
  SIMT_TSAN(__tsan_acquire(sync));
  (void)warp;
}

template <class T>
T shuffle(unsigned mask, T value, int source, const char* file, int line) {
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  bits = exchange(mask, bits, source, file, line);
  memcpy(&value, &bits, sizeof value);
  return value;
}

SIMT_HIDDEN unsigned draw() {  // 0 without a seed
  return random_state ? (random_state = random_state * 1664525u + 1013904223u) >> 8 : 0;
}

SIMT_HIDDEN bool open_barrier() {
  if (!at_barrier || at_barrier != alive) return false;
  Fiber* first = nullptr;
  for (Fiber* f = fibers; f < fibers + threads; ++f) {
    if (f->state != kAtBarrier) continue;
    if (!first) first = f;
    if (f->line != first->line)
      fail("threads %d and %d wait at different __syncthreads, %s:%d and %s:%d", first->id, f->id,
           first->file, first->line, f->file, f->line);
    f->state = kReady;
  }
  at_barrier = 0;
  ++block_turn;
  return true;
}

SIMT_HIDDEN void run_block() {
  alive = threads;
  at_barrier = 0;
  for (int i = 0; i < threads; ++i) start(i);
  SIMT_TSAN(scheduler_tsan = __tsan_get_current_fiber(); __tsan_release(&block_start));
  while (alive && !*error) {
    bool has_moved = false;
    unsigned first = draw() % threads, step = draw() % threads;  // a permutation, new on each pass
    while (std::gcd(step, (unsigned)threads) != 1) ++step;
    for (unsigned k = 0, i = first; k < (unsigned)threads; ++k, i = (i + step) % threads) {
      current = &fibers[i];
      if (current->state != kReady) continue;
      has_moved = true;
      SIMT_TSAN(__tsan_switch_to_fiber(current->tsan, __tsan_switch_to_fiber_no_sync));
      swapcontext(&scheduler, &current->context);
      if (*error) break;
    }
    if (open_barrier() || has_moved || !alive) continue;
    Fiber* f = fibers;
    while (f->state == kDone) ++f;
    fail("deadlock, %d of %d live threads are at __syncthreads, thread %d waits at %s:%d",
         at_barrier, alive, f->id, f->file, f->line);
  }
  SIMT_TSAN(__tsan_acquire(&block_end));
}

// 0 or kFailed.
template <class Call>
int launch(dim3 grid, dim3 block, size_t shared_bytes, Call call) {
  const char* seed = getenv("SIMT_SEED");
  random_state = seed ? atoi(seed) : 0;
  *error = 0;
  threads = block.x * block.y * block.z;
  grid_dim = grid;
  block_dim = block;
  entry = [](void* p) { (*(Call*)p)(); };
  argument = &call;
  uint64_t blocks = (uint64_t)grid.x * grid.y * grid.z;
  if (!threads || threads > kMaxThreads || block.z > 64 || shared_bytes > 48 << 10 || !blocks ||
      grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535)
    fail("no such launch: grid %u,%u,%u block %u,%u,%u, %zu shared bytes", grid.x, grid.y, grid.z,
         block.x, block.y, block.z, shared_bytes);
  bool is_backwards = draw() & 1;
  for (uint64_t i = 0; i < blocks && !*error; ++i) {
    uint64_t b = is_backwards ? blocks - 1 - i : i;
    block_index = dim3(b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y);
    dynamic_shared = memset(malloc(shared_bytes), 0xff, shared_bytes);
    run_block();
    free(dynamic_shared);
  }
  return *error ? kFailed : 0;
}
}  // namespace simt

extern "C" __attribute__((weak)) const char* simt_error() { return simt::error; }

#define threadIdx (simt::current->index)
#define blockIdx (simt::block_index)
#define blockDim (simt::block_dim)
#define gridDim (simt::grid_dim)
#define __syncthreads() simt::sync_threads(__FILE__, __LINE__)
#define __syncwarp(...) simt::sync_warp(~0u, __FILE__, __LINE__)
#define __shfl_sync(mask, v, lane) simt::shuffle(mask, v, (lane) & 31, __FILE__, __LINE__)
#define __shfl_xor_sync(mask, v, bits) \
  simt::shuffle(mask, v, simt::current->id % 32 ^ (bits), __FILE__, __LINE__)

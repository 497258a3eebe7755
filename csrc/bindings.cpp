// The module minirler._C: every launcher of kernels.h as NAME_cpu and, built with nvcc, NAME_cuda.
//
// Arguments are those of kernels.h, structs field by field, pointers as integers (0 is null).
// Nothing is checked here: `minirler/ops.py`, the only caller, does that. Calls release the GIL; a
// status other than 0 becomes a RuntimeError.
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "kernels.h"

#ifdef MINIRLER_CUDA
extern "C" const char* cudaGetErrorString(int);
#else
static const char* cudaGetErrorString(int) { return "built without CUDA"; }
#endif

namespace {

// The types of a parameter's fields as Python passes them, and the way back.
template <class T>
struct Flat {
  using Fields = std::tuple<std::conditional_t<std::is_pointer_v<T>, uintptr_t, T>>;
  static T make(std::tuple_element_t<0, Fields> x) {
    if constexpr (std::is_pointer_v<T>)
      return reinterpret_cast<T>(x);
    else
      return x;
  }
};

template <class T>
auto pointer(uintptr_t p) {
  return reinterpret_cast<const T*>(p);
}

template <>
struct Flat<Logits> {
  using Fields = std::tuple<uintptr_t, int, int64_t, int64_t, int64_t, int64_t, float>;
  static Logits make(uintptr_t data, int dtype, int64_t rows, int64_t columns, int64_t stride,
                     int64_t num_valid, float temperature) {
    return {pointer<void>(data), dtype, rows, columns, stride, num_valid, temperature};
  }
};

template <>
struct Flat<Cache> {
  using Fields = std::tuple<uintptr_t, int, int64_t, int64_t, int64_t, int64_t>;
  static Cache make(uintptr_t data, int dtype, int64_t blocks, int64_t kv_heads,
                    int64_t block_size, int64_t head_dim) {
    return {reinterpret_cast<void*>(data), dtype, blocks, kv_heads, block_size, head_dim};
  }
};

template <>
struct Flat<Rows> {
  using Fields = std::tuple<int64_t, int64_t, uintptr_t, uintptr_t, uintptr_t, int64_t, int64_t>;
  static Rows make(int64_t rows, int64_t queries, uintptr_t cu_seqlens, uintptr_t lengths,
                   uintptr_t tables, int64_t table_stride, int64_t max_length) {
    return {rows, queries, pointer<int32_t>(cu_seqlens), pointer<int32_t>(lengths),
            pointer<int32_t>(tables), table_stride, max_length};
  }
};

template <class T>
constexpr size_t kFields = std::tuple_size_v<typename Flat<T>::Fields>;

// One parameter from the fields [first, first + kFields<T>) of all.
template <class T, size_t first, class All, size_t... I>
T gather(const All& all, std::index_sequence<I...>) {
  return Flat<T>::make(std::get<first + I>(all)...);
}

// Position of the first field of parameter `index`.
template <class... T>
constexpr size_t start(size_t index) {
  size_t sizes[] = {kFields<T>...}, sum = 0;
  for (size_t i = 0; i < index; ++i) sum += sizes[i];
  return sum;
}

template <class... T, size_t... I, class All>
int call(int (*launcher)(T...), const All& all, std::index_sequence<I...>) {
  return launcher(
      gather<T, start<T...>(I)>(all, std::make_index_sequence<kFields<T>>{})...);
}

template <class... T, class... Field>
void define(pybind11::module_& m, const char* name, int (*launcher)(T...),
            std::tuple<Field...>*) {
  auto run = [name, launcher](Field... fields) {
    int status = call(launcher, std::make_tuple(fields...), std::index_sequence_for<T...>{});
    if (status)
      throw std::runtime_error(std::string(name) + ": error " + std::to_string(status) + ", " +
                               cudaGetErrorString(status));
  };
  m.def(name, run, pybind11::call_guard<pybind11::gil_scoped_release>());
}

template <class... T>
void define(pybind11::module_& m, const char* name, int (*launcher)(T...)) {
  using Fields = decltype(std::tuple_cat(std::declval<typename Flat<T>::Fields>()...));
  define(m, name, launcher, static_cast<Fields*>(nullptr));
}

}  // namespace

#define DEFINE(NAME) define(m, #NAME, NAME)
#define DEFINE_ALL(S)              \
  DEFINE(logprob##S);              \
  DEFINE(logprob_backward##S);     \
  DEFINE(group_advantages##S);     \
  DEFINE(sample##S);               \
  DEFINE(kv_write##S);             \
  DEFINE(kv_copy##S);              \
  DEFINE(paged_attention##S);      \
  DEFINE(packed_attention##S);     \
  DEFINE(packed_attention_backward##S)

PYBIND11_MODULE(_C, m) {
  m.doc() = "Launchers of the kernels; see csrc/kernels.h.";
  DEFINE_ALL(_cpu);
#ifdef MINIRLER_CUDA
  DEFINE_ALL(_cuda);
#endif
}

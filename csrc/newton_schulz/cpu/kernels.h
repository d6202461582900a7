// The inner loops of Newton-Schulz on a CPU, compiled once per instruction set.
//
// Everything is kept in one format, panels: a matrix is cut into vertical strips of Kernels::panel
// columns (32 or more bytes times two: two vector registers), each stored row by row, the last one
// padded with zero columns.
//
//   element (i, j) of a matrix with `rows` rows:  data[(j / panel) * rows * panel
//                                                      + i * panel + j % panel]
//
// It is what a matrix product wants of its right factor, and an upright matrix T (long side down),
// its Gram matrix T'T and T times a symmetric matrix can all be computed in it without packing
// anything again.
#pragma once

#include <cstdint>

namespace megatron_ext::cpu {

// Elements of a strided matrix: (i, j) at data + i * row_stride + j * column_stride.
template <class S>
struct Strided {
  S* data;
  int64_t row_stride;
  int64_t column_stride;
};

// Half-open.
struct Range {
  int64_t begin;
  int64_t end;
};

// d = alpha (a b) + beta c, all in panels. The sum over the depth runs in ascending order in blocks
// of a fixed size, so that the bits of an element depend neither on the part of d that is computed
// with it nor on the thread. d may be c.
template <class T>
struct Product {
  const T* a;
  const T* b;
  const T* c;  // not read if beta is 0
  T* d;
  int64_t rows;     // of d, and of c
  int64_t columns;  // of d, c and b
  int64_t depth;
  T alpha;
  T beta;
};

template <class T>
struct Kernels {
  const char* name;
  int64_t panel;

  // Each computes the part of d in the given rows (from a multiple of `panel` on) and panels.

  // a is (rows, depth), b (depth, columns).
  void (*general)(const Product<T>&, Range rows, Range panels);
  // The same for a product that is symmetric; only what lies on and below the diagonal is computed,
  // and stored a second time above. c is symmetric.
  void (*symmetric)(const Product<T>&, Range rows, Range panels);
  // d = alpha a'b + beta c for a of shape (depth, rows), symmetric too: the Gram matrix if a is b.
  void (*gram)(const Product<T>&, Range rows, Range panels);

  // The largest magnitude in `lines` lines of `length` adjacent elements, `stride` apart; NaN if an
  // element is NaN or infinite.
  T (*largest)(const T* data, int64_t stride, int64_t lines, int64_t length);
  // Panels of x * scale, of which `rows` are written, and back. One of x's strides is 1.
  void (*pack)(const Strided<const T>& x, T scale, Range rows, int64_t row_count, int64_t columns,
               T* panels);
  void (*unpack)(const T* panels, Range rows, int64_t row_count, int64_t columns,
                 const Strided<T>& x);
};

// The fastest that the processor has (see at::get_cpu_capability, ATEN_CPU_CAPABILITY limits it).
template <class T>
const Kernels<T>& kernels();

// One function for each instruction set that the compiler knows.
template <class T>
const Kernels<T>& portable_kernels();
#if defined(__x86_64__)
template <class T>
const Kernels<T>& avx2_kernels();
template <class T>
const Kernels<T>& avx512_kernels();
#endif

}  // namespace megatron_ext::cpu

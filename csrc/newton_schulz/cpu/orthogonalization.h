// The iteration for one matrix, on the kernels.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "kernels.h"

namespace megatron_ext::cpu {

// (a, b, c) of one step.
struct Step {
  double a, b, c;
};
using Segment = std::vector<Step>;

// The size of a matrix that stands upright, the long side down.
struct Shape {
  int64_t rows;
  int64_t columns;

  double cost() const { return 1.0 * rows * columns * columns; }
};

struct Matrix {
  Shape shape;
  at::ScalarType dtype;
  Strided<const void> source;
  Strided<void> target;  // contiguous, in one of the two orders
};

// Threads that work on one matrix together, or one that works alone.
class Team {
 public:
  explicit Team(int threads) : threads_(threads) {}

  bool alone() const { return threads_ == 1; }
  int threads() const { return threads_; }

  // task(0) ... task(count - 1), each started by the next thread that is free.
  template <class F>
  void run(int64_t count, const F& task) const {
    if (alone() || count == 1) {
      for (int64_t i = 0; i < count; ++i) task(i);
      return;
    }
    std::atomic<int64_t> next{0};
    at::parallel_for(0, threads_, 1, [&](int64_t, int64_t) {
      for (int64_t i = next++; i < count; i = next++) task(i);
    });
  }

  // Rows [0, count) in parts that start at multiples of `step`.
  template <class F>
  void run_rows(int64_t count, int64_t step, const F& task) const {
    // Enough for every thread, but no more than fit into a second-level cache.
    const int64_t rounds = (count + kRows * threads_ - 1) / (kRows * threads_);
    const int64_t parts = rounds * threads_;
    const int64_t height = ((count + parts - 1) / parts + step - 1) / step * step;
    run((count + height - 1) / height,
        [&](int64_t i) { task(Range{i * height, std::min(count, (i + 1) * height)}); });
  }

  static constexpr int64_t kRows = 384;

 private:
  int threads_;
};

template <class T>
class Orthogonalization {
 public:
  // How many T it needs.
  static int64_t workspace(Shape shape) {
    const int64_t width = padded(shape.columns);
    return 2 * align(shape.rows * width) + 4 * align(shape.columns * width);
  }

  Orthogonalization(const Matrix& matrix, T* workspace, const Team& team)
      : matrix_(matrix), rows_(matrix.shape.rows), columns_(matrix.shape.columns), team_(team) {
    for (T** buffer : {&x_, &next_x_}) {
      *buffer = std::exchange(workspace, workspace + align(rows_ * padded(columns_)));
    }
    for (T** buffer : {&r_, &y_, &q_, &w_}) {
      *buffer = std::exchange(workspace, workspace + align(columns_ * padded(columns_)));
    }
  }

  // Returns whether all entries are finite.
  bool run(const std::vector<Segment>& segments) {
    const Strided<const T> source = readable_source();
    const T most = largest(source);
    if (std::isnan(most) || most == 0) {
      fill(most);
      return most == 0;
    }
    // Powers of two are exact: the largest entry becomes about one, so that no square overflows.
    constexpr int kLimit = std::numeric_limits<T>::max_exponent - 2;
    const T scale = std::ldexp(T{1}, -std::clamp(std::ilogb(most), -kLimit, kLimit));
    team_.run_rows(rows_, kernels_.panel,
                   [&](Range rows) { kernels_.pack(source, scale, rows, rows_, columns_, x_); });

    double norm = 0;
    for (const Segment& segment : segments) {
      symmetric(kernels_.gram, x_, x_, rows_, 1, 0, nullptr, r_);
      // The squared norm of X is the trace of its Gram matrix: X itself need not be divided.
      double x_scale = 1;
      if (norm == 0) {
        const double trace = this->trace(r_);
        norm = std::sqrt(trace);
        scale_gram(1 / trace);
        x_scale = 1 / norm;
      }
      run_segment(segment, x_scale);
    }
    write_target();
    return true;
  }

 private:
  static int64_t padded(int64_t columns) {
    const int64_t panel = kernels<T>().panel;
    return (columns + panel - 1) / panel * panel;
  }
  // Whole cache lines.
  static int64_t align(int64_t elements) {
    constexpr int64_t kLine = 64 / sizeof(T);
    return (elements + kLine - 1) / kLine * kLine;
  }

  void run_segment(const Segment& segment, double x_scale) {
    const size_t last = segment.size() - 1;
    for (size_t i = 0; i <= last; ++i) {
      const auto [a, b, c] = segment[i];
      symmetric(kernels_.symmetric, r_, r_, columns_, c, b, r_, y_);  // Y = b R + c R^2
      if (last == 0) {  // Q = a I + Y need not be formed
        general(x_, y_, x_scale, a * x_scale, next_x_);
        break;
      }
      if (i == 0) {
        add_to_diagonal(y_, a, q_);
      } else {
        symmetric(kernels_.symmetric, q_, y_, columns_, 1, a, q_, w_);
        std::swap(q_, w_);
      }
      if (i == last) {
        general(x_, q_, x_scale, 0, next_x_);
        break;
      }
      symmetric(kernels_.symmetric, r_, y_, columns_, 1, a, r_, w_);  // W = R (a I + Y)
      symmetric(kernels_.symmetric, w_, y_, columns_, 1, a, w_, r_);  // R = W (a I + Y)
    }
    std::swap(x_, next_x_);
  }

  // d = alpha a b + beta c, symmetric, of side `columns_`.
  template <class Kernel>
  void symmetric(Kernel kernel, const T* a, const T* b, int64_t depth, double alpha, double beta,
                 const T* c, T* d) const {
    const Product<T> product{
        a, b, c, d, columns_, columns_, depth, static_cast<T>(alpha), static_cast<T>(beta)};
    const int64_t panels = padded(columns_) / kernels_.panel;
    if (team_.alone()) {
      for (int64_t i = 0; i < columns_; i += Team::kRows) {
        kernel(product, {i, std::min(columns_, i + Team::kRows)}, {0, panels});
      }
      return;
    }
    constexpr int64_t kSide = 192;
    const int64_t width = kSide / kernels_.panel;
    std::vector<std::pair<int64_t, int64_t>> parts;
    for (int64_t i = 0; i < columns_; i += kSide) {
      for (int64_t j = 0; j * kernels_.panel <= i; j += width) parts.emplace_back(i, j);
    }
    team_.run(parts.size(), [&](int64_t index) {
      const auto [i, j] = parts[index];
      kernel(product, {i, std::min(columns_, i + kSide)}, {j, std::min(panels, j + width)});
    });
  }

  // d = alpha x q + beta x, for a symmetric q of side `columns_`.
  void general(const T* x, const T* q, double alpha, double beta, T* d) const {
    const Product<T> product{
        x, q, x, d, rows_, columns_, columns_, static_cast<T>(alpha), static_cast<T>(beta)};
    const int64_t panels = padded(columns_) / kernels_.panel;
    team_.run_rows(rows_, 1, [&](Range rows) { kernels_.general(product, rows, {0, panels}); });
  }

  int64_t diagonal(int64_t i) const {
    return (i / kernels_.panel * columns_ + i) * kernels_.panel + i % kernels_.panel;
  }

  double trace(const T* r) const {
    double sum = 0;
    for (int64_t i = 0; i < columns_; ++i) sum += r[diagonal(i)];
    return sum;
  }

  void scale_gram(double factor) const {
    const T by = static_cast<T>(factor);
    const int64_t count = columns_ * padded(columns_);
    for (int64_t i = 0; i < count; ++i) r_[i] *= by;
  }

  void add_to_diagonal(const T* y, double a, T* q) const {
    std::copy_n(y, columns_ * padded(columns_), q);
    for (int64_t i = 0; i < columns_; ++i) q[diagonal(i)] += static_cast<T>(a);
  }

  T largest(const Strided<const T>& source) const {
    const bool by_rows = source.column_stride == 1;
    const int64_t lines = by_rows ? rows_ : columns_;
    const int64_t length = by_rows ? columns_ : rows_;
    const int64_t stride = by_rows ? source.row_stride : source.column_stride;
    std::vector<T> parts((lines + kLines - 1) / kLines);
    team_.run(parts.size(), [&](int64_t i) {
      const int64_t begin = i * kLines;
      parts[i] = kernels_.largest(source.data + begin * stride, stride,
                                  std::min(kLines, lines - begin), length);
    });
    T most = 0;
    for (const T part : parts) most = part > most || std::isnan(part) ? part : most;
    return most;
  }
  static constexpr int64_t kLines = 64;

  // --- the ends: any dtype and strides ---

  // X as the kernels read it: of type T, with lines of adjacent elements. Copied if it is not.
  Strided<const T> readable_source() const {
    const auto& [data, row_stride, column_stride] = matrix_.source;
    if (matrix_.dtype == c10::CppTypeToScalarType<T>::value) {
      const auto* values = static_cast<const T*>(data);
      if (column_stride == 1 && row_stride >= columns_) return {values, row_stride, 1};
      if (row_stride == 1 && column_stride >= rows_) return {values, 1, column_stride};
    }
    const bool by_rows = row_stride >= column_stride;
    const Strided<T> copy{next_x_, by_rows ? columns_ : 1, by_rows ? 1 : rows_};
    with_dtype([&](auto zero) {
      using S = decltype(zero);
      convert(Strided<const S>{static_cast<const S*>(data), row_stride, column_stride}, copy);
    });
    return {copy.data, copy.row_stride, copy.column_stride};
  }

  void write_target() const {
    const auto& [data, row_stride, column_stride] = matrix_.target;
    const bool same_type = matrix_.dtype == c10::CppTypeToScalarType<T>::value;
    const Strided<T> values{same_type ? static_cast<T*>(data) : next_x_, row_stride, column_stride};
    team_.run_rows(rows_, kernels_.panel,
                   [&](Range rows) { kernels_.unpack(x_, rows, rows_, columns_, values); });
    if (same_type) return;
    with_dtype([&](auto zero) {
      using S = decltype(zero);
      convert(Strided<const T>{values.data, row_stride, column_stride},
              Strided<S>{static_cast<S*>(data), row_stride, column_stride});
    });
  }

  void fill(T value) const {
    with_dtype([&](auto zero) {
      using S = decltype(zero);
      std::fill_n(static_cast<S*>(matrix_.target.data), rows_ * columns_, static_cast<S>(value));
    });
  }

  // Calls f with a zero of the matrix's dtype.
  template <class F>
  void with_dtype(const F& f) const {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, matrix_.dtype, "newton_schulz",
                                    [&] { f(scalar_t{}); });
  }

  template <class From, class To>
  void convert(const Strided<const From>& from, const Strided<To>& to) const {
    const bool by_rows = to.column_stride == 1;
    const int64_t lines = by_rows ? rows_ : columns_;
    const int64_t length = by_rows ? columns_ : rows_;
    const int64_t from_line = by_rows ? from.row_stride : from.column_stride;
    const int64_t from_step = by_rows ? from.column_stride : from.row_stride;
    team_.run((lines + kLines - 1) / kLines, [&](int64_t part) {
      const int64_t end = std::min(lines, (part + 1) * kLines);
      for (int64_t line = part * kLines; line < end; ++line) {
        const From* source = from.data + line * from_line;
        To* target = to.data + line * length;
        if (from_step == 1) {
          for (int64_t i = 0; i < length; ++i) target[i] = static_cast<To>(source[i]);
        } else {
          for (int64_t i = 0; i < length; ++i) target[i] = static_cast<To>(source[i * from_step]);
        }
      }
    });
  }

  const Kernels<T>& kernels_ = kernels<T>();
  const Matrix& matrix_;
  int64_t rows_;
  int64_t columns_;
  const Team& team_;
  T *x_, *next_x_;       // rows_ x columns_
  T *r_, *y_, *q_, *w_;  // columns_ x columns_
};

}  // namespace megatron_ext::cpu

#include "gram.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "prepare.h"

namespace megatron_ext {
namespace {

// Rounding makes eigenvalues of R, which are squares, negative, by at most about this much of the
// largest: fp16's rounding errors are up to 2^-11 of an entry each, but not all of one sign. The
// polynomials are bounded for those too; far below zero they grow fast.
constexpr double kNegative = 1.0 / 4096;

// With a larger bound, so a smaller scale, entries of a stable iteration would be subnormal in
// fp16.
constexpr double kMaxBound = 1 << 30;

// The largest |function| in an interval, on a grid: for polynomials of degree 5, and for scales
// that leave a factor of 2, a coarse one does.
template <typename Function>
double max_abs(double low, double high, Function function) {
  constexpr int kPoints = 256;
  double bound = 0;
  for (int i = 0; i <= kPoints; ++i) {
    const double value = std::abs(function(low + (high - low) * i / kPoints));
    bound = std::isnan(value) ? INFINITY : std::max(bound, value);
  }
  return bound;
}

// The power of two to store a matrix with, given a bound on its spectral norm.
double fp16_scale(double bound) {
  if (!(bound <= kMaxBound)) {
    throw std::invalid_argument(
        "newton_schulz: in half precision these coefficients need more restarts, or shorter "
        "segments: rounding errors would grow without bound");
  }
  // bound * scale is in [2^14, 2^15); fp16 ends at 2^16. Smaller bounds gain nothing.
  return std::ldexp(1.0, 14 - std::ilogb(std::max(bound, std::ldexp(1.0, -15))));
}

// A matrix in a buffer that holds `scale` times it.
struct Scaled {
  Buffer buffer;
  double scale;
};

// d = alpha a b + beta c, of the matrices without their scales.
Operation product(Operation::Kind kind, double alpha, Scaled a, Scaled b, double beta, Scaled c,
                  Scaled d) {
  return {kind,
          alpha * d.scale / (a.scale * b.scale),
          beta * d.scale / c.scale,
          a.buffer,
          b.buffer,
          c.buffer,
          d.buffer};
}

}  // namespace

Schedule make_schedule(const std::vector<double>& coefficients,
                       const std::vector<int64_t>& segments, bool fit_fp16) {
  int64_t steps = 0;
  for (const int64_t length : segments) {
    if (length < 1) throw std::invalid_argument("newton_schulz: a segment has no steps");
    steps += length;
  }
  if (static_cast<int64_t>(coefficients.size()) != 3 * steps) {
    throw std::invalid_argument("newton_schulz: the segments do not add up to the steps");
  }

  constexpr auto kSymmetric = Operation::kSymmetricProduct;
  constexpr auto kGeneral = Operation::kGeneralProduct;
  const auto scaled = [&](Buffer buffer, double bound) {
    return Scaled{buffer, fit_fp16 ? fp16_scale(bound) : 1};
  };
  std::vector<Buffer> free;
  const auto take = [&](double bound) {
    const Buffer buffer = free.back();
    free.pop_back();
    return scaled(buffer, bound);
  };
  double x_bound = 1;  // on the singular values of X
  Scaled x = scaled(kX0, x_bound);
  Schedule schedule = {};
  schedule.input_scale = x.scale;
  std::vector<Stage>& stages = schedule.stages;
  const double* step = coefficients.data();
  for (const int64_t length : segments) {
    free = {kSquare4, kSquare3, kSquare2, kSquare1, kSquare0};
    double negative = kNegative * x_bound * x_bound;  // no eigenvalue of R is below -negative
    double q_bound = 1;
    Scaled r = take(x_bound * x_bound);
    Scaled q = {};  // from the second step on; it starts as I
    stages.push_back({product(kSymmetric, 1, x, x, 0, x, r)});

    for (int64_t i = 0; i < length; ++i, step += 3) {
      const bool first = i == 0;
      const bool last = i == length - 1;
      const double a = step[0], b = step[1], c = step[2];
      const auto y_at = [=](double r) { return (b + c * r) * r; };
      const auto z_at = [=](double r) { return a + y_at(r); };
      const double r_bound = x_bound * x_bound;
      const double y_bound = max_abs(-negative, r_bound, y_at);
      const double z_bound = max_abs(-negative, r_bound, z_at);
      const double w_bound = max_abs(-negative, r_bound, [=](double r) { return r * z_at(r); });
      q_bound *= z_bound;
      x_bound = max_abs(0, x_bound, [=](double x) { return x * z_at(x * x); });
      negative = max_abs(-negative, 0, [=](double r) { return r * z_at(r) * z_at(r); }) +
                 kNegative * x_bound * x_bound;

      // The first Y turns into Q = a I + Y, in its place.
      const Scaled y = take(first ? std::max(y_bound, q_bound) : y_bound);
      stages.push_back({product(kSymmetric, c, r, r, b, r, y)});
      if (length == 1) {
        const Scaled next = scaled(x.buffer == kX0 ? kX1 : kX0, x_bound);
        stages.push_back({product(kGeneral, 1, y, x, a, x, next)});
        x = next;
        continue;
      }

      Stage updates;
      Scaled next_q = y;
      if (!first) {
        next_q = take(q_bound);
        updates.push_back(product(kSymmetric, 1, q, y, a, q, next_q));
      }
      if (!last) {
        const Scaled w = take(w_bound);
        updates.push_back(product(kSymmetric, 1, r, y, a, r, w));
        stages.push_back(updates);
        r = scaled(r.buffer, std::max(x_bound * x_bound, negative));
        stages.push_back({product(kSymmetric, 1, w, y, a, w, r)});
        free.push_back(w.buffer);
        if (first) {
          stages.push_back({{Operation::kAddToDiagonal, a * y.scale, 0, y.buffer, y.buffer,
                             y.buffer, y.buffer}});
        } else {
          free.push_back(y.buffer);
          free.push_back(q.buffer);
        }
        q = next_q;
      } else {
        stages.push_back(updates);
        const Scaled next = scaled(x.buffer == kX0 ? kX1 : kX0, x_bound);
        stages.push_back({product(kGeneral, 1, next_q, x, 0, x, next)});
        x = next;
      }
    }
  }
  schedule.output = x.buffer;
  schedule.output_scale = 1 / x.scale;
  return schedule;
}

int squares_used(const std::vector<int64_t>& segments) {
  const int64_t longest = *std::max_element(segments.begin(), segments.end());
  // R and Y; from two steps on two Q, and W where there is no second Q; from three on all.
  return longest == 1 ? 2 : longest == 2 ? 4 : 5;
}

cudaError_t run_fp16(const Stage& stage, const std::vector<Batch>& batches, cudaStream_t stream) {
  const Operation::Kind kind = stage.front().kind;
  std::vector<Product> products;
  for (const Batch& batch : batches) {
    for (const Operation& operation : stage) {
      const Matrices& d = batch.buffers[operation.d];
      if (kind == Operation::kAddToDiagonal) {
        if (const cudaError_t error =
                add_to_diagonal({d.data, d.ld, d.batch_stride}, batch.count, ElementType::kFloat16,
                                batch.rows, operation.alpha, stream)) {
          return error;
        }
        continue;
      }
      products.push_back({.batch = batch.count,
                          .rows = batch.rows,
                          .columns = operation.d <= kX1 ? batch.columns : batch.rows,
                          .depth = operation.a <= kX1 ? batch.columns : batch.rows,
                          .alpha = static_cast<float>(operation.alpha),
                          .beta = static_cast<float>(operation.beta),
                          .a = batch.buffers[operation.a],
                          .b = batch.buffers[operation.b],
                          .c = batch.buffers[operation.c],
                          .d = d});
    }
  }
  const auto launch = kind == Operation::kSymmetricProduct ? symmetric_products : general_products;
  for (size_t first = 0; first < products.size(); first += kMaxProducts) {
    const size_t count = std::min<size_t>(kMaxProducts, products.size() - first);
    if (const cudaError_t error = launch(&products[first], static_cast<int>(count), stream)) {
      return error;
    }
  }
  return cudaSuccess;
}

}  // namespace megatron_ext

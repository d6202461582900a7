// Tests of the CUDA kernels on the emulator; the name of the test is the argument. Prints what is
// wrong and exits 1.
#include <cuda_bf16.h>

#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "emulator.h"
#include "gram.h"
#include "prepare.h"
#include "products.cu"  // for the choice of the tile size, which is internal

using namespace megatron_ext;

namespace {

int failures = 0;

template <typename... Values>
void expect(bool condition, const char* format, Values... values) {
  if (condition || ++failures > 20) return;
  std::printf(format, values...);
  std::printf("\n");
}

std::mt19937 generator(0);

double random_value() { return std::normal_distribution<double>()(generator); }

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// fp16 matrices as products.h wants them. Whatever is outside of them is NaN: that it is not read
// shows in the results, that it is not written in intact().
class HalfMatrices {
 public:
  HalfMatrices(int batch, int rows, int columns)
      : batch_(batch), rows_(rows), columns_(columns), ld_(round_up(columns, 64) + 64) {
    stride_ = (rows + 1) * ld_;
    memory_.resize(batch * stride_ + 64, __float2half_rn(NAN));
    data_ =
        reinterpret_cast<__half*>((reinterpret_cast<uintptr_t>(memory_.data()) + 127) / 128 * 128);
  }

  __half& at(int item, int row, int column) { return data_[item * stride_ + row * ld_ + column]; }
  double value(int item, int row, int column) { return __half2float(at(item, row, column)); }
  Matrices view() { return {data_, ld_, stride_}; }

  void randomize(bool lower_only = false) {
    for (int item = 0; item < batch_; ++item) {
      for (int row = 0; row < rows_; ++row) {
        for (int column = 0; column < (lower_only ? row + 1 : columns_); ++column) {
          at(item, row, column) = __float2half_rn(static_cast<float>(random_value()));
        }
      }
    }
  }

  // Columns up to the next 16 bytes may be overwritten.
  bool intact() {
    for (int item = 0; item < batch_; ++item) {
      for (int row = 0; row <= rows_; ++row) {
        const int64_t first = row < rows_ ? round_up(columns_, 8) : 0;
        for (int64_t i = first; i < ld_; ++i) {
          if (!std::isnan(value(item, row, static_cast<int>(i)))) return false;
        }
      }
    }
    return true;
  }

 private:
  int batch_, rows_, columns_;
  int64_t ld_, stride_;
  std::vector<__half> memory_;
  __half* data_;
};

// --- products
// -------------------------------------------------------------------------------------

struct Case {
  int batch, rows, columns, depth;
  float alpha, beta;
  bool in_place;  // d is c
};

// One launch of all cases; symmetric ones have columns = rows.
void check_products(const Variant& variant, const std::vector<Case>& cases) {
  std::vector<HalfMatrices> a, b, c, d;
  std::vector<Product> products;
  for (const Case& it : cases) {
    a.emplace_back(it.batch, it.rows, it.depth).randomize();
    const bool transposed = variant.symmetric;
    b.emplace_back(it.batch, transposed ? it.columns : it.depth, transposed ? it.depth : it.columns)
        .randomize();
    c.emplace_back(it.batch, it.rows, it.columns);
    if (it.beta != 0) c.back().randomize(/*lower_only=*/variant.symmetric);
    d.emplace_back(it.batch, it.rows, it.columns);
  }
  std::vector<HalfMatrices> original_c = c;
  for (size_t i = 0; i < cases.size(); ++i) {
    original_c[i] = HalfMatrices(cases[i].batch, cases[i].rows, cases[i].columns);
    for (int item = 0; item < cases[i].batch; ++item) {
      for (int row = 0; row < cases[i].rows; ++row) {
        for (int column = 0; column < cases[i].columns; ++column) {
          original_c[i].at(item, row, column) = c[i].at(item, row, column);
        }
      }
    }
    products.push_back({cases[i].batch, cases[i].rows, cases[i].columns, cases[i].depth,
                        cases[i].alpha, cases[i].beta, a[i].view(), b[i].view(), c[i].view(),
                        cases[i].in_place ? c[i].view() : d[i].view()});
  }
  const cudaError_t error =
      launch_variant(variant, products.data(), static_cast<int>(products.size()), 3, nullptr);
  expect(error == cudaSuccess, "launch: error %d", error);

  for (size_t i = 0; i < cases.size(); ++i) {
    const Case& it = cases[i];
    HalfMatrices& result = it.in_place ? c[i] : d[i];
    expect(result.intact(), "%d x %d: written outside", it.rows, it.columns);
    for (int item = 0; item < it.batch; ++item) {
      for (int row = 0; row < it.rows; ++row) {
        for (int column = 0; column < it.columns; ++column) {
          const bool mirrored = variant.symmetric && row < column;
          const int r = mirrored ? column : row, s = mirrored ? row : column;
          double sum = 0, magnitude = 0;
          for (int k = 0; k < it.depth; ++k) {
            const double term =
                a[i].value(item, r, k) *
                (variant.symmetric ? b[i].value(item, s, k) : b[i].value(item, k, s));
            sum += term;
            magnitude += std::abs(term);
          }
          double expected = it.alpha * sum;
          if (it.beta != 0) expected += it.beta * original_c[i].value(item, r, s);
          const double actual = result.value(item, row, column);
          // fp16's rounding of the result, fp32's of the sum.
          const double tolerance =
              std::abs(expected) / 2000 + 1e-6 * std::abs(it.alpha) * magnitude + 1e-7;
          expect(std::abs(actual - expected) <= tolerance,
                 "tile %d, %d x %d x %d, item %d, (%d, %d): %g instead of %g", variant.tile,
                 it.rows, it.columns, it.depth, item, row, column, actual, expected);
          if (mirrored) {
            expect(actual == result.value(item, column, row), "%d: not symmetric at (%d, %d)",
                   it.rows, row, column);
          }
        }
      }
    }
  }
}

void test_products(bool symmetric) {
  for (const bool at_once : {false, true}) {
    emulator::options.copies_arrive_at_once = at_once;
    emulator::options.descending = at_once;
    for (const Variant& variant : kVariants[symmetric]) {
      if (symmetric) {
        check_products(variant, {{1, 1, 1, 1, 1.0f, 0.0f, false},
                                 {2, 7, 7, 33, 0.5f, 2.0f, false},
                                 {1, 64, 64, 64, -1.0f, 1.0f, true},
                                 {2, 65, 65, 1, 2.0f, 0.0f, false},
                                 {1, 200, 200, 70, 0.25f, -0.5f, true}});
        check_products(variant, {{1, 257, 257, 200, 0.125f, 1.5f, false}});
      } else {
        check_products(variant, {{1, 1, 1, 1, 1.0f, 0.0f, false},
                                 {2, 7, 65, 33, 0.5f, 2.0f, false},
                                 {1, 64, 64, 64, -1.0f, 1.0f, true},
                                 {2, 65, 9, 1, 2.0f, 0.0f, false},
                                 {1, 70, 200, 129, 0.25f, -0.5f, true}});
        check_products(variant, {{1, 200, 257, 96, 0.125f, 1.5f, false}});
        // More than one band of tile rows.
        if (variant.tile == kSmallTile) {
          check_products(variant, {{1, 600, 130, 8, 1.0f, 0.0f, false}});
        }
      }
    }
  }
}

// Every tile of the triangle once, also where the square root is rounded.
void test_triangle() {
  int index = 0;
  for (int row = 0; row < 3000; ++row) {
    for (int column = 0; column <= row; ++column, ++index) {
      const Tile tile = lower_tile(index, 1);
      expect(tile.row == row && tile.column == column, "tile %d is (%d, %d)", index, tile.row,
             tile.column);
    }
  }
}

// --- elements on the host
// -------------------------------------------------------------------------

size_t size_of(ElementType type) {
  return type == ElementType::kFloat64 ? 8 : type == ElementType::kFloat32 ? 4 : 2;
}

double read(const void* data, int64_t index, ElementType type) {
  switch (type) {
    case ElementType::kFloat16:
      return __half2float(static_cast<const __half*>(data)[index]);
    case ElementType::kBFloat16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
    case ElementType::kFloat32:
      return static_cast<const float*>(data)[index];
    default:
      return static_cast<const double*>(data)[index];
  }
}

void write(void* data, int64_t index, ElementType type, double value) {
  const float single = static_cast<float>(value);
  switch (type) {
    case ElementType::kFloat16:
      static_cast<__half*>(data)[index] = __float2half_rn(single);
      break;
    case ElementType::kBFloat16:
      static_cast<__nv_bfloat16*>(data)[index] = __float2bfloat16_rn(single);
      break;
    case ElementType::kFloat32:
      static_cast<float*>(data)[index] = single;
      break;
    default:
      static_cast<double*>(data)[index] = value;
  }
}

// A matrix somewhere in memory, seen wide.
struct HostMatrix {
  ElementType type;
  int rows, columns;
  int64_t row_stride, column_stride;
  std::vector<char> memory;

  HostMatrix(ElementType type, int rows, int columns, bool tall, int gap)
      : type(type),
        rows(rows),
        columns(columns),
        row_stride(tall ? 1 + gap : columns * (1 + gap)),
        column_stride(tall ? rows * (1 + gap) : 1 + gap),
        memory(static_cast<size_t>(rows) * columns * (1 + gap) * size_of(type)) {}

  WideMatrix view() { return {memory.data(), row_stride, column_stride}; }
  double get(int row, int column) const {
    return read(memory.data(), row * row_stride + column * column_stride, type);
  }
  void set(int row, int column, double value) {
    write(memory.data(), row * row_stride + column * column_stride, type, value);
  }
  template <typename Function>
  void fill(Function function) {
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < columns; ++c) set(r, c, function(r, c));
    }
  }
};

std::vector<WideMatrix> views(std::vector<HostMatrix>& matrices) {
  std::vector<WideMatrix> result;
  for (HostMatrix& matrix : matrices) result.push_back(matrix.view());
  return result;
}

// The copies that normalize makes, as bytes.
std::vector<char> normalized(std::vector<HostMatrix>& matrices, double scale, int64_t ld) {
  const HostMatrix& first = matrices[0];
  const ElementType working =
      first.type == ElementType::kBFloat16 ? ElementType::kFloat16 : first.type;
  std::vector<char> copies(matrices.size() * first.rows * ld * size_of(working));
  const std::vector<WideMatrix> list = views(matrices);
  const WideMatrices x = {list.data(), static_cast<int>(list.size()), first.type, first.rows,
                          first.columns};
  std::vector<double> scratch(normalize_scratch(x));
  expect(normalize(x, scale, {copies.data(), ld, first.rows * ld}, scratch.data(), nullptr) ==
             cudaSuccess,
         "normalize failed");
  return copies;
}

void test_prepare() {
  constexpr int kRows = 70, kColumns = 131, kItems = 130;  // more than one launch holds
  constexpr int64_t kLd = 192;
  constexpr double kScale = 32768;
  for (const ElementType type : {ElementType::kFloat16, ElementType::kBFloat16,
                                 ElementType::kFloat32, ElementType::kFloat64}) {
    const ElementType working = type == ElementType::kBFloat16 ? ElementType::kFloat16 : type;
    const double epsilon = working == ElementType::kFloat16   ? 1.0 / 2048
                           : working == ElementType::kFloat32 ? 1e-7
                                                              : 1e-15;
    const size_t item_bytes = kRows * kLd * size_of(working);
    std::vector<double> values(kRows * kColumns);
    for (double& value : values) value = random_value();
    const auto value_at = [&](int r, int c) { return values[r * kColumns + c]; };
    HostMatrix base(type, kRows, kColumns, false, 0);
    base.fill(value_at);
    std::vector<HostMatrix> alone = {base};
    const std::vector<char> expected = normalized(alone, kScale, kLd);
    double norm = 0;
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < kColumns; ++c) norm += base.get(r, c) * base.get(r, c);
    }
    norm = std::sqrt(norm);
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < kColumns; ++c) {
        const double exact = kScale * base.get(r, c) / norm;
        const double actual = read(expected.data(), r * kLd + c, working);
        expect(std::abs(actual - exact) <= epsilon * std::abs(exact), "normalize (%d, %d): %g, %g",
               r, c, actual, exact);
      }
    }

    // In a batch, transposed in memory, strided, scaled: the same bits.
    std::vector<HostMatrix> batch;
    for (int i = 0; i < kItems; ++i) {
      batch.emplace_back(type, kRows, kColumns, /*tall=*/i % 2 == 1, /*gap=*/i % 3);
      const double factor = i % 5 == 4 ? 8 : 1;
      if (i % 7 == 3) {
        batch.back().fill([](int, int) { return 0; });
      } else {
        batch.back().fill([&](int r, int c) { return factor * base.get(r, c); });
        if (i % 7 == 5) batch.back().set(kRows - 1, i % kColumns, i % 2 ? NAN : -INFINITY);
      }
    }
    std::vector<char> copies = normalized(batch, kScale, kLd);
    for (int i = 0; i < kItems; ++i) {
      const char* copy = copies.data() + i * item_bytes;
      for (int r = 0; r < kRows; ++r) {
        for (int c = 0; c < kColumns; ++c) {
          const double actual = read(copy, r * kLd + c, working);
          if (i % 7 == 3) {
            expect(actual == 0, "zero matrix: %g", actual);
          } else if (i % 7 == 5) {
            expect(std::isnan(actual), "matrix with NaN: %g", actual);
          } else {
            expect(actual == read(expected.data(), r * kLd + c, working),
                   "item %d has other bits at (%d, %d)", i, r, c);
          }
        }
      }
    }

    // And back, into the same layouts.
    const std::vector<WideMatrix> list = views(batch);
    expect(restore({copies.data(), kLd, kRows * kLd}, 1 / kScale,
                   {list.data(), kItems, type, kRows, kColumns}, nullptr) == cudaSuccess,
           "restore failed");
    const double out_epsilon = type == ElementType::kBFloat16 ? 1.0 / 256 : epsilon;
    for (const int i : {0, 1, 2, 127}) {
      for (int r = 0; r < kRows; ++r) {
        for (int c = 0; c < kColumns; ++c) {
          const double exact = read(expected.data(), r * kLd + c, working) / kScale;
          // Small ones are subnormal in fp16.
          expect(std::abs(batch[i].get(r, c) - exact) <=
                     out_epsilon * std::abs(exact) + (type == ElementType::kFloat16 ? 6e-8 : 0),
                 "restore (%d, %d): %g, %g", r, c, batch[i].get(r, c), exact);
        }
      }
    }
  }

  // Any magnitude.
  for (const double magnitude : {1e-39, 1e-30, 1e-9, 1e19, 1e30, 1e37}) {
    HostMatrix matrix(ElementType::kBFloat16, 3, 5, false, 0);
    matrix.fill([&](int r, int c) { return r == c ? magnitude : 0; });
    std::vector<HostMatrix> list = {matrix};
    const std::vector<char> copy = normalized(list, kScale, 64);
    const double actual = read(copy.data(), 65, ElementType::kFloat16) / kScale;
    expect(std::abs(actual - 1 / std::sqrt(3.0)) < 1e-3, "magnitude %g: %g", magnitude, actual);
  }
}

// --- all together
// ---------------------------------------------------------------------------------

using Dense = std::vector<std::vector<double>>;

Dense multiply(const Dense& a, const Dense& b, bool b_transposed) {
  const size_t depth = a[0].size(), columns = b_transposed ? b.size() : b[0].size();
  Dense d(a.size(), std::vector<double>(columns));
  for (size_t i = 0; i < a.size(); ++i) {
    for (size_t j = 0; j < columns; ++j) {
      for (size_t k = 0; k < depth; ++k) d[i][j] += a[i][k] * (b_transposed ? b[j][k] : b[k][j]);
    }
  }
  return d;
}

// The plain iteration in fp64.
Dense reference(const HostMatrix& matrix, const std::vector<double>& coefficients) {
  Dense x(matrix.rows, std::vector<double>(matrix.columns));
  double norm = 0;
  for (int r = 0; r < matrix.rows; ++r) {
    for (int c = 0; c < matrix.columns; ++c) {
      x[r][c] = matrix.get(r, c);
      norm += x[r][c] * x[r][c];
    }
  }
  if (norm == 0) return x;
  for (auto& row : x) {
    for (double& value : row) value /= std::sqrt(norm);
  }
  for (size_t step = 0; step < coefficients.size(); step += 3) {
    Dense polynomial = multiply(x, x, true);
    const Dense square = multiply(polynomial, polynomial, true);
    for (size_t i = 0; i < square.size(); ++i) {
      for (size_t j = 0; j < square.size(); ++j) {
        polynomial[i][j] = (i == j ? coefficients[step] : 0) +
                           coefficients[step + 1] * polynomial[i][j] +
                           coefficients[step + 2] * square[i][j];
      }
    }
    x = multiply(polynomial, x, false);
  }
  return x;
}

// What newton_schulz.cpp does for matrices in half precision, with its buffers.
void run_all(std::vector<std::vector<HostMatrix>>& groups, const Schedule& schedule) {
  std::vector<std::vector<HalfMatrices>> buffers;
  std::vector<Batch> batches;
  for (std::vector<HostMatrix>& group : groups) {
    const int count = static_cast<int>(group.size());
    const int rows = group[0].rows, columns = group[0].columns;
    std::vector<HalfMatrices>& own = buffers.emplace_back();
    Batch batch = {count, rows, columns, {}};
    for (int i = 0; i < kBuffers; ++i) {
      batch.buffers[i] = own.emplace_back(count, rows, i <= kX1 ? columns : rows).view();
    }
    batches.push_back(batch);
    const std::vector<WideMatrix> list = views(group);
    const WideMatrices x = {list.data(), count, group[0].type, rows, columns};
    std::vector<double> scratch(normalize_scratch(x));
    const Matrices& copies = batch.buffers[kX0];
    normalize(x, schedule.input_scale, {copies.data, copies.ld, copies.batch_stride},
              scratch.data(), nullptr);
  }
  for (const Stage& stage : schedule.stages) {
    expect(run_fp16(stage, batches, nullptr) == cudaSuccess, "run_fp16 failed");
  }
  for (size_t i = 0; i < groups.size(); ++i) {
    const std::vector<WideMatrix> list = views(groups[i]);
    const Matrices& copies = batches[i].buffers[schedule.output];
    restore({copies.data, copies.ld, copies.batch_stride}, schedule.output_scale,
            {list.data(), batches[i].count, groups[i][0].type, batches[i].rows, batches[i].columns},
            nullptr);
  }
}

void test_newton_schulz() {
  const std::vector<double> simple = {3.4445, -4.7750, 2.0315};
  for (const std::vector<int64_t>& segments :
       std::vector<std::vector<int64_t>>{{2, 3}, {1, 2, 2}, {5}, {1, 1, 1, 1, 1}}) {
    std::vector<double> coefficients;
    for (int i = 0; i < 5; ++i)
      coefficients.insert(coefficients.end(), simple.begin(), simple.end());
    std::vector<std::vector<HostMatrix>> groups;
    std::vector<HostMatrix> batch;  // Gaussian, zero, NaN, tall in memory
    for (int i = 0; i < 4; ++i) batch.emplace_back(ElementType::kBFloat16, 40, 150, i == 3, i);
    for (HostMatrix& matrix : batch) matrix.fill([](int, int) { return random_value(); });
    batch[1].fill([](int, int) { return 0; });
    batch[2].set(3, 4, NAN);
    groups.push_back(batch);
    groups.push_back({HostMatrix(ElementType::kFloat16, 70, 70, true, 0)});
    groups.back()[0].fill([](int, int) { return random_value(); });
    groups.push_back({HostMatrix(ElementType::kFloat16, 1, 9, false, 0)});
    groups.back()[0].fill([](int, int) { return random_value(); });
    std::vector<std::vector<HostMatrix>> results = groups;
    // Measured with the roundings emulated on random matrices: 4e-3, and 2e-2 without a restart.
    const double tolerance = segments.size() > 1 ? 8e-3 : 4e-2;
    run_all(results, make_schedule(coefficients, segments, /*fit_fp16=*/true));
    for (size_t g = 0; g < groups.size(); ++g) {
      for (size_t i = 0; i < groups[g].size(); ++i) {
        const HostMatrix& x = groups[g][i];
        const bool has_nan = g == 0 && i == 2;
        const Dense expected = reference(x, coefficients);
        for (int r = 0; r < x.rows; ++r) {
          for (int c = 0; c < x.columns; ++c) {
            const double actual = results[g][i].get(r, c);
            if (has_nan) {
              expect(std::isnan(actual), "NaN has become %g", actual);
            } else {
              expect(std::abs(actual - expected[r][c]) <= tolerance,
                     "%zu segments, group %zu, item %zu, (%d, %d): %g instead of %g",
                     segments.size(), g, i, r, c, actual, expected[r][c]);
            }
          }
        }
      }
    }
  }
}

// What a schedule reads has been written, d is no operand, and squares_used is the truth.
void test_schedule() {
  const std::vector<double> triple = {1.5, -0.5, 0.0};
  for (const std::vector<int64_t>& segments : std::vector<std::vector<int64_t>>{
           {1}, {2}, {3}, {4}, {1, 1}, {2, 1}, {1, 2}, {2, 3}, {3, 2, 3}, {1, 8}}) {
    std::vector<double> coefficients;
    for (const int64_t length : segments) {
      for (int64_t i = 0; i < length; ++i) {
        coefficients.insert(coefficients.end(), triple.begin(), triple.end());
      }
    }
    const Schedule schedule = make_schedule(coefficients, segments, false);
    std::vector<bool> written(kBuffers);
    written[kX0] = true;
    int highest = 0;
    for (const Stage& stage : schedule.stages) {
      for (const Operation& operation : stage) {
        expect(written[operation.a] && written[operation.b] &&
                   (operation.beta == 0 || written[operation.c]),
               "read before written");
        expect(operation.kind == stage[0].kind, "two kinds in a stage");
        if (operation.kind != Operation::kAddToDiagonal) {
          expect(operation.d != operation.a && operation.d != operation.b, "d is an operand");
        }
        for (const Operation& other : stage) {
          if (&other == &operation) continue;
          expect(other.d != operation.a && other.d != operation.b && other.d != operation.c &&
                     other.d != operation.d,
                 "a stage depends on itself");
        }
      }
      for (const Operation& operation : stage) {
        written[operation.d] = true;
        highest = std::max(highest, static_cast<int>(operation.d));
      }
    }
    expect(written[schedule.output], "no output");
    expect(highest - kSquare0 + 1 == squares_used(segments), "%d squares instead of %d",
           highest - kSquare0 + 1, squares_used(segments));
  }
}

}  // namespace

int main(int, char** arguments) {
  const std::string test = arguments[1];
  if (test == "symmetric_products")
    test_products(true);
  else if (test == "general_products")
    test_products(false);
  else if (test == "triangle")
    test_triangle();
  else if (test == "prepare")
    test_prepare();
  else if (test == "schedule")
    test_schedule();
  else if (test == "newton_schulz")
    test_newton_schulz();
  else
    expect(false, "no such test: %s", test.c_str());
  return failures != 0;
}

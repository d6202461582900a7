// The operator on a CPU: which thread works on which matrix.
#include "../newton_schulz.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <atomic>
#include <cmath>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "orthogonalization.h"

namespace megatron_ext {
namespace cpu {
namespace {

std::vector<Segment> make_segments(c10::ArrayRef<double> coefficients, at::IntArrayRef lengths) {
  std::vector<Segment> segments;
  const double* triple = coefficients.data();
  for (const int64_t length : lengths) {
    Segment& segment = segments.emplace_back();
    for (int64_t i = 0; i < length; ++i, triple += 3) {
      segment.push_back({triple[0], triple[1], triple[2]});
    }
  }
  return segments;
}

struct Segments {
  std::vector<Segment> other;
  std::vector<Segment> square;
};

// Of a square matrix and its transpose, both of which are upright, the same one is always taken, so
// that they give the same bits: by the magnitudes of the first pair of entries in which they
// differ.
template <class S>
bool takes_transpose(const S* data, int64_t side, int64_t row_stride, int64_t column_stride) {
  const auto magnitude = [&](int64_t i, int64_t j) {
    return std::abs(static_cast<double>(data[i * row_stride + j * column_stride]));
  };
  for (int64_t i = 0; i < side; ++i) {
    for (int64_t j = i + 1; j < side; ++j) {
      const double above = magnitude(i, j), below = magnitude(j, i);
      if (above != below) return above < below;
    }
  }
  return false;
}

// A matrix of the batch, and where it comes from: number `index` of x[tensor].
struct Item : Matrix {
  int64_t tensor;
  int64_t index;
  bool finite = true;
};

template <class S>
void append_items(const at::Tensor& x, const at::Tensor& out, int64_t tensor,
                  std::vector<Item>& items) {
  const int64_t m = x.size(-2), n = x.size(-1);
  for (int64_t index = 0; index * m * n < x.numel(); ++index) {
    const S* source = x.const_data_ptr<S>();
    int64_t rest = index;
    for (int64_t dim = x.dim() - 3; dim >= 0; --dim) {
      source += rest % x.size(dim) * x.stride(dim);
      rest /= x.size(dim);
    }
    int64_t down = x.stride(-2), right = x.stride(-1), out_down = n, out_right = 1;
    if (m < n || (m == n && takes_transpose(source, m, down, right))) {
      std::swap(down, right);
      std::swap(out_down, out_right);
    }
    Item item{};
    item.shape = {std::max(m, n), std::min(m, n)};
    item.dtype = x.scalar_type();
    item.source = {source, down, right};
    item.target = {out.mutable_data_ptr<S>() + index * m * n, out_down, out_right};
    item.tensor = tensor;
    item.index = index;
    item.finite = true;
    items.push_back(item);
  }
}

// Who works on what; the bits do not depend on it. Of the shapes, the most costly first, all
// threads work on the first few `together`, one after the other; each other one is taken by the
// next thread that is free.
struct Plan {
  int threads;
  int64_t together;
  int64_t slot;   // T in the workspace of one thread alone
  int64_t total;  // T in the whole workspace
};

// Below this, between 128 x 512 and 256 x 512, starting the other threads for every product costs
// as much as they save.
constexpr double kWorthSharing = 2e7;

template <class T>
Plan make_plan(const std::vector<Shape>& shapes) {
  const auto count = static_cast<int64_t>(shapes.size());
  Plan plan{at::in_parallel_region() ? 1 : at::get_num_threads(), 0, 0, 0};
  double rest = 0;
  for (const Shape& shape : shapes) rest += shape.cost();

  const auto share_next_if = [&](auto condition) {
    if (plan.threads == 1 || plan.together == count) return false;
    const double cost = shapes[plan.together].cost();
    if (cost < kWorthSharing || !condition(cost)) return false;
    rest -= cost;
    ++plan.together;
    return true;
  };
  // One thread would be busy with it when all others are ready.
  while (share_next_if([&](double cost) { return cost * plan.threads > rest; })) {
  }
  // Threads would have nothing to do in the last round.
  for (int64_t left_over = (count - plan.together) % plan.threads; left_over > 0; --left_over) {
    share_next_if([](double) { return true; });
  }

  for (int64_t i = 0; i < count; ++i) {
    const int64_t size = Orthogonalization<T>::workspace(shapes[i]);
    int64_t& most = i < plan.together ? plan.total : plan.slot;
    most = std::max(most, size);
  }
  const int64_t slots = std::min<int64_t>(plan.threads, count - plan.together);
  plan.total = std::max(plan.total, slots * plan.slot);
  return plan;
}

// In huge pages where the system has them: with small ones, first touching the workspace of a call
// costs up to 8 % of its time.
at::Tensor allocate(int64_t bytes) {
  const at::Tensor buffer = at::empty({bytes}, at::kByte);
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHugePage = 2 << 20;
  const auto begin = reinterpret_cast<uintptr_t>(buffer.mutable_data_ptr());
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (begin + bytes) / kHugePage * kHugePage;
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#endif
  return buffer;
}

template <class T>
void run(std::vector<Item>& items, const Segments& segments,
         const std::optional<at::Tensor>& workspace) {
  std::stable_sort(items.begin(), items.end(),
                   [](const Item& x, const Item& y) { return x.shape.cost() > y.shape.cost(); });
  std::vector<Shape> shapes;
  for (const Item& item : items) shapes.push_back(item.shape);
  const Plan plan = make_plan<T>(shapes);

  const auto bytes = static_cast<int64_t>(plan.total * sizeof(T));
  TORCH_CHECK_VALUE(!workspace || workspace->numel() >= bytes, "newton_schulz: workspace has ",
                    workspace ? workspace->numel() : 0, " bytes, but ", bytes, " are needed with ",
                    plan.threads, " threads: make it with newton_schulz_workspace");
  const at::Tensor buffer = workspace ? *workspace : allocate(bytes);
  T* const memory = reinterpret_cast<T*>(buffer.mutable_data_ptr<uint8_t>());

  const auto orthogonalize = [&](Item& item, T* memory, const Team& team) {
    item.finite =
        Orthogonalization<T>(item, memory, team)
            .run(item.shape.rows == item.shape.columns ? segments.square : segments.other);
  };
  for (int64_t i = 0; i < plan.together; ++i) orthogonalize(items[i], memory, Team(plan.threads));
  std::atomic<int64_t> next{plan.together};
  const auto count = static_cast<int64_t>(items.size());
  at::parallel_for(0, std::min<int64_t>(plan.threads, count - plan.together), 1,
                   [&](int64_t begin, int64_t end) {
                     for (int64_t slot = begin; slot < end; ++slot) {
                       for (int64_t i = next++; i < count; i = next++) {
                         orthogonalize(items[i], memory + slot * plan.slot, Team(1));
                       }
                     }
                   });
}

// "x[2], matrix (0, 1)"
std::string name(at::TensorList x, const Item& item) {
  std::ostringstream text;
  text << "x";
  if (x.size() > 1) text << "[" << item.tensor << "]";
  const auto batch = x[item.tensor].sizes().slice(0, x[item.tensor].dim() - 2);
  if (batch.empty()) return text.str();
  std::vector<int64_t> indices(batch.size());
  int64_t rest = item.index;
  for (size_t dim = batch.size(); dim-- > 0; rest /= batch[dim]) indices[dim] = rest % batch[dim];
  text << ", matrix (" << c10::Join(", ", indices) << ")";
  return text.str();
}

void report_nonfinite(at::TensorList x, std::vector<Item> items) {
  std::erase_if(items, [](const Item& item) { return item.finite; });
  if (items.empty()) return;
  std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
    return std::tie(a.tensor, a.index) < std::tie(b.tensor, b.index);
  });
  constexpr size_t kNamed = 8;
  std::vector<std::string> names;
  for (size_t i = 0; i < std::min(items.size(), kNamed); ++i) names.push_back(name(x, items[i]));
  if (items.size() > kNamed)
    names.push_back("and " + std::to_string(items.size() - kNamed) + " more");
  TORCH_CHECK_VALUE(false, "newton_schulz: NaN or infinite entries in ", c10::Join("; ", names));
}

}  // namespace
}  // namespace cpu

void newton_schulz_cpu(at::TensorList x, at::TensorList out,
                       const std::optional<at::Tensor>& workspace,
                       c10::ArrayRef<double> coefficients, at::IntArrayRef segments,
                       at::IntArrayRef square_segments, bool raise_nonfinite) {
  std::vector<cpu::Item> items;
  for (size_t i = 0; i < x.size(); ++i) {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x[i].scalar_type(), "newton_schulz",
                                    [&] { cpu::append_items<scalar_t>(x[i], out[i], i, items); });
  }
  if (items.empty()) return;
  const cpu::Segments steps{cpu::make_segments(coefficients, segments),
                            cpu::make_segments(coefficients, square_segments)};
  if (x[0].scalar_type() == at::kDouble) {
    cpu::run<double>(items, steps, workspace);
  } else {
    cpu::run<float>(items, steps, workspace);
  }
  if (raise_nonfinite) cpu::report_nonfinite(x, std::move(items));
}

at::Tensor newton_schulz_workspace_cpu(const std::vector<at::Tensor>& x,
                                       const std::vector<int64_t>& /*segments*/,
                                       const std::vector<int64_t>& /*square_segments*/) {
  std::vector<cpu::Shape> shapes;
  for (const at::Tensor& tensor : x) {
    const int64_t m = tensor.size(-2), n = tensor.size(-1);
    const int64_t batch = tensor.numel() == 0 ? 0 : tensor.numel() / (m * n);
    shapes.insert(shapes.end(), batch, {std::max(m, n), std::min(m, n)});
  }
  std::stable_sort(shapes.begin(), shapes.end(),
                   [](const auto& a, const auto& b) { return a.cost() > b.cost(); });
  const bool is_double = !x.empty() && x[0].scalar_type() == at::kDouble;
  return cpu::allocate(is_double ? cpu::make_plan<double>(shapes).total * sizeof(double)
                                 : cpu::make_plan<float>(shapes).total * sizeof(float));
}

}  // namespace megatron_ext

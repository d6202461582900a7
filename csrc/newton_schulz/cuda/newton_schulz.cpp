#include "newton_schulz.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/empty.h>
// c10/cuda only: ATen/cuda would ask for the cuBLAS headers, which a toolkit may lack.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <climits>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "gram.h"
#include "prepare.h"

namespace megatron_ext {
namespace {

constexpr int64_t kAlignment = 128;  // bytes, what products.h asks for

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

bool is_half(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

ElementType element_type(at::ScalarType type) {
  switch (type) {
    case at::kHalf:
      return ElementType::kFloat16;
    case at::kBFloat16:
      return ElementType::kBFloat16;
    case at::kFloat:
      return ElementType::kFloat32;
    case at::kDouble:
      return ElementType::kFloat64;
    default:
      TORCH_CHECK(false, "newton_schulz: expected float16, bfloat16, float32 or float64, got ",
                  type);
  }
}

// --- grouping ---

// All matrices of one dtype that have the same shape once the short side comes first.
struct Group {
  at::ScalarType type;
  int64_t rows;
  int64_t columns;
  std::vector<WideMatrix> x;
  std::vector<WideMatrix> out;  // empty where only sizes are asked for

  at::ScalarType working_type() const { return is_half(type) ? at::kHalf : type; }
  int64_t count() const { return static_cast<int64_t>(x.size()); }
  // Of a row of n elements in a buffer.
  int64_t ld(int64_t n) const {
    return is_half(type) ? round_up(n, kAlignment / static_cast<int64_t>(sizeof(at::Half))) : n;
  }
  WideMatrices wide(const std::vector<WideMatrix>& matrices) const {
    return {matrices.data(), static_cast<int>(count()), element_type(type), static_cast<int>(rows),
            static_cast<int>(columns)};
  }
};

void append_matrices(const at::Tensor& tensor, std::vector<WideMatrix>& matrices) {
  const int64_t batch_dims = tensor.dim() - 2;
  const bool tall = tensor.size(-2) > tensor.size(-1);
  const int64_t row_stride = tensor.stride(tall ? -1 : -2);
  const int64_t column_stride = tensor.stride(tall ? -2 : -1);
  auto* data = static_cast<char*>(tensor.data_ptr());
  const int64_t count = tensor.numel() / (tensor.size(-2) * tensor.size(-1));
  for (int64_t i = 0; i < count; ++i) {
    int64_t offset = 0;
    int64_t index = i;
    for (int64_t dim = batch_dims - 1; dim >= 0; --dim) {
      offset += index % tensor.size(dim) * tensor.stride(dim);
      index /= tensor.size(dim);
    }
    matrices.push_back({data + offset * tensor.element_size(), row_stride, column_stride});
  }
}

std::vector<Group> group_by_shape(at::TensorList x, at::TensorList out) {
  std::map<std::tuple<at::ScalarType, int64_t, int64_t>, size_t> known;
  std::vector<Group> groups;
  for (size_t i = 0; i < x.size(); ++i) {
    if (x[i].numel() == 0) continue;
    const auto [rows, columns] = std::minmax({x[i].size(-2), x[i].size(-1)});
    const auto [place, is_new] =
        known.try_emplace({x[i].scalar_type(), rows, columns}, groups.size());
    if (is_new) groups.push_back({x[i].scalar_type(), rows, columns, {}, {}});
    Group& group = groups[place->second];
    append_matrices(x[i], group.x);
    if (!out.empty()) append_matrices(out[i], group.out);
    TORCH_CHECK(columns <= INT_MAX / 2 && group.count() <= INT_MAX,
                "newton_schulz: too large: ", x[i].sizes());
  }
  return groups;
}

// --- workspace ---

// Deals out the workspace, or adds up what it has to be if there is none.
class Workspace {
 public:
  explicit Workspace(at::Tensor bytes = {}) : bytes_(std::move(bytes)) {}

  at::Tensor take(at::IntArrayRef shape, at::ScalarType type) {
    int64_t size = static_cast<int64_t>(c10::elementSize(type));
    for (const int64_t extent : shape) size *= extent;
    const int64_t offset = std::exchange(used_, used_ + round_up(size, kAlignment));
    if (!bytes_.defined()) return {};
    return bytes_.narrow(0, offset, size).view(type).view(shape);
  }

  int64_t used() const { return used_; }

 private:
  at::Tensor bytes_;
  int64_t used_ = 0;
};

struct Buffers {
  at::Tensor buffers[kBuffers];  // (count, rows, ld) each
  at::Tensor scratch;
};

std::vector<Buffers> allocate(const std::vector<Group>& groups, at::IntArrayRef segments,
                              Workspace& workspace) {
  std::vector<Buffers> result;
  for (const Group& group : groups) {
    Buffers& buffers = result.emplace_back();
    for (int i = 0; i < kBuffers; ++i) {
      if (i >= kSquare0 + squares_used(segments.vec())) continue;
      const int64_t ld = group.ld(i <= kX1 ? group.columns : group.rows);
      buffers.buffers[i] = workspace.take({group.count(), group.rows, ld}, group.working_type());
    }
    buffers.scratch = workspace.take({normalize_scratch(group.wide(group.x))}, at::kDouble);
  }
  return result;
}

// --- the computation ---

WorkingCopies copies(const at::Tensor& buffer) {
  return {buffer.data_ptr(), buffer.stride(1), buffer.stride(0)};
}

Batch fp16_batch(const Group& group, const Buffers& buffers) {
  Batch batch = {static_cast<int>(group.count()),
                 static_cast<int>(group.rows),
                 static_cast<int>(group.columns),
                 {}};
  for (int i = 0; i < kBuffers; ++i) {
    const at::Tensor& buffer = buffers.buffers[i];
    if (!buffer.defined()) continue;
    batch.buffers[i] = {static_cast<__half*>(buffer.data_ptr()), buffer.stride(1),
                        buffer.stride(0)};
  }
  return batch;
}

void run_full_precision(const Stage& stage, const Buffers& buffers) {
  for (const Operation& operation : stage) {
    at::Tensor d = buffers.buffers[operation.d];
    if (operation.kind == Operation::kAddToDiagonal) {
      d.diagonal(0, 1, 2).add_(operation.alpha);
      continue;
    }
    const at::Tensor& a = buffers.buffers[operation.a];
    const at::Tensor& b = buffers.buffers[operation.b];
    // With beta = 0 it is not read, but its shape has to fit.
    const at::Tensor& c = operation.beta == 0 ? d : buffers.buffers[operation.c];
    at::baddbmm_out(d, c, a, operation.kind == Operation::kSymmetricProduct ? b.transpose(1, 2) : b,
                    operation.beta, operation.alpha);
  }
}

void check_arguments(at::TensorList x, at::TensorList out) {
  TORCH_CHECK(x.size() == out.size(), "newton_schulz: ", x.size(), " inputs, ", out.size(),
              " outputs");
  for (size_t i = 0; i < x.size(); ++i) {
    TORCH_CHECK(x[i].is_cuda(), "newton_schulz: expected a cuda tensor, got one on ",
                x[i].device());
    TORCH_CHECK(x[i].device() == x[0].device(), "newton_schulz: tensors on ", x[0].device(),
                " and ", x[i].device());
    TORCH_CHECK(x[i].dim() >= 2, "newton_schulz: expected at least 2 dimensions, got ", x[i].dim());
    TORCH_CHECK(out[i].sizes() == x[i].sizes() && out[i].scalar_type() == x[i].scalar_type() &&
                    out[i].device() == x[i].device() && out[i].is_contiguous(),
                "newton_schulz: out is not a contiguous tensor of the input's shape, dtype and "
                "device");
  }
}

}  // namespace

int64_t newton_schulz_workspace_cuda(at::TensorList x, at::IntArrayRef segments) {
  TORCH_CHECK(!segments.empty(), "newton_schulz: expected at least one segment");
  Workspace sizes;
  allocate(group_by_shape(x, {}), segments, sizes);
  return sizes.used();
}

void newton_schulz_cuda(at::TensorList x, at::TensorList out,
                        const std::optional<at::Tensor>& workspace,
                        at::ArrayRef<double> coefficients, at::IntArrayRef segments) {
  check_arguments(x, out);
  const std::vector<Group> groups = group_by_shape(x, out);
  if (groups.empty()) return;
  const at::NoGradGuard no_grad;
  const c10::cuda::CUDAGuard device_guard(x[0].device());
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();

  const int64_t bytes = newton_schulz_workspace_cuda(x, segments);
  const at::Tensor memory =
      workspace ? *workspace : at::empty({bytes}, x[0].options().dtype(at::kByte));
  TORCH_CHECK(memory.scalar_type() == at::kByte && memory.dim() == 1 && memory.is_contiguous() &&
                  memory.device() == x[0].device() && memory.numel() >= bytes &&
                  reinterpret_cast<uintptr_t>(memory.data_ptr()) % kAlignment == 0,
              "newton_schulz: the workspace is not a contiguous uint8 tensor of at least ", bytes,
              " bytes on ", x[0].device(), ", aligned to ", kAlignment);
  Workspace dealer(memory);
  const std::vector<Buffers> buffers = allocate(groups, segments, dealer);

  for (const bool half : {true, false}) {
    std::vector<size_t> members;
    for (size_t i = 0; i < groups.size(); ++i) {
      if (is_half(groups[i].type) == half) members.push_back(i);
    }
    if (members.empty()) continue;
    const Schedule schedule = make_schedule(coefficients.vec(), segments.vec(), half);
    for (const size_t i : members) {
      C10_CUDA_CHECK(normalize(groups[i].wide(groups[i].x), schedule.input_scale,
                               copies(buffers[i].buffers[kX0]),
                               buffers[i].scratch.data_ptr<double>(), stream));
    }
    if (half) {  // all shapes together
      std::vector<Batch> batches;
      for (const size_t i : members) batches.push_back(fp16_batch(groups[i], buffers[i]));
      for (const Stage& stage : schedule.stages) {
        C10_CUDA_CHECK(run_fp16(stage, batches, stream));
      }
    } else {
      for (const size_t i : members) {
        for (const Stage& stage : schedule.stages) run_full_precision(stage, buffers[i]);
      }
    }
    for (const size_t i : members) {
      C10_CUDA_CHECK(restore(copies(buffers[i].buffers[schedule.output]), schedule.output_scale,
                             groups[i].wide(groups[i].out), stream));
    }
  }
}

}  // namespace megatron_ext

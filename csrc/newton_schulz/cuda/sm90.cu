#include <algorithm>
#include <type_traits>
#include <vector>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"
#include "sm90.h"
#include "sm90_blocks.h"

namespace megatron_ext {
namespace {

// --- blocks -------------------------------------------------------------------------------------

struct Blocks {
  int rows;
  int columns;
  int per_item;
  int count;
};

Blocks make_blocks(bool symmetric, int edge, int rows, int columns, int batch) {
  const int block_rows = cute::ceil_div(rows, edge);
  const int block_columns = cute::ceil_div(columns, edge);
  const int per_item = symmetric ? triangle_blocks(block_rows) : block_rows * block_columns;
  return {block_rows, block_columns, per_item, per_item * batch};
}

// Stands in for CUTLASS's tile scheduler. The grid is (thread blocks of a cluster, clusters); a
// cluster takes every gridDim.y-th block, its thread blocks the tiles one below the other.
template <bool kSymmetric>
class BlockScheduler : public cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90 {
  using Base = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90;

 public:
  // What is inherited (hooks of split-K, empty here) expects the parameters of Base.
  struct Params : Base::Params {
    Blocks blocks;
  };

  template <class Problem, class Tile, class Cluster>
  static Params to_underlying_arguments(Problem problem, Tile tile, Cluster,
                                        const cutlass::KernelHardwareInfo&, const Arguments&,
                                        void* = nullptr, uint32_t = 1, uint32_t = 1) {
    const auto [rows, columns, depth, batch] = problem;
    return {{}, make_blocks(kSymmetric, cute::size<1>(tile), rows, columns, batch)};
  }

  CUTLASS_DEVICE explicit BlockScheduler(const Params& params)
      : blocks_(params.blocks), index_(blockIdx.y) {}

  template <class Cluster>
  CUTLASS_DEVICE WorkTileInfo initial_work_tile_info(Cluster) const {
    return get_current_work();
  }

  CUTLASS_DEVICE WorkTileInfo get_current_work() const {
    if (index_ >= blocks_.count) return WorkTileInfo::invalid_work_tile();
    const int item = index_ / blocks_.per_item;
    const int in_item = index_ - item * blocks_.per_item;
    const Block block = kSymmetric ? triangle_block(in_item, blocks_.rows)
                                   : rectangle_block(in_item, blocks_.rows, blocks_.columns);
    return {static_cast<int>(block.row * gridDim.x + blockIdx.x), block.column, item, true};
  }

  CUTLASS_DEVICE void advance_to_next_work(uint32_t steps = 1) { index_ += steps * gridDim.y; }

  template <class... Pipeline>
  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo, Pipeline&&...) {
    advance_to_next_work();
    return cute::make_tuple(get_current_work(), true);
  }

 private:
  Blocks blocks_;
  int index_;
};

}  // namespace
}  // namespace megatron_ext

template <bool kSymmetric, class Arch, class Tile, class Cluster, uint32_t kStages>
struct cutlass::gemm::kernel::detail::TileSchedulerSelector<
    megatron_ext::BlockScheduler<kSymmetric>, Arch, Tile, Cluster, kStages> {
  using Scheduler = megatron_ext::BlockScheduler<kSymmetric>;
};

namespace megatron_ext {
namespace {

// --- kernels ------------------------------------------------------------------------------------

using cute::_1;
using cute::_128;
using cute::_2;
using cute::_256;
using cute::_64;
using cutlass::half_t;
using cutlass::layout::ColumnMajor;
using cutlass::layout::RowMajor;
namespace collective = cutlass::epilogue::collective;
namespace fusion = cutlass::epilogue::fusion;

// Two consumer warpgroups take turns, each at tiles of its own: one multiplies, the other stores.
struct SmallTile {
  using Tile = cute::Shape<_128, _128, _64>;
  using Cluster = cute::Shape<_1, _1, _1>;
  using Mainloop = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
  using Epilogue = cutlass::epilogue::TmaWarpSpecialized;
};

// Two consumer warpgroups share a tile, and the two thread blocks of a cluster share b by
// multicast.
struct LargeTile {
  using Tile = cute::Shape<_128, _256, _64>;
  using Cluster = cute::Shape<_2, _1, _1>;
  using Mainloop = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
  using Epilogue = cutlass::epilogue::TmaWarpSpecializedCooperative;
};

// The edge of a block, the tiles of a cluster. Square: the diagonal cuts only blocks on it.
template <class Config>
constexpr int kBlockEdge = cute::size<1>(typename Config::Tile{});
template <class Config>
constexpr int kClusterSize = cute::size(typename Config::Cluster{});
static_assert(kBlockEdge<SmallTile> == 128 * kClusterSize<SmallTile>);
static_assert(kBlockEdge<LargeTile> == 128 * kClusterSize<LargeTile>);

template <class Config>
using EpilogueDescriptor =
    collective::detail::EpilogueDescriptor<typename Config::Tile, collective::EpilogueTileAuto,
                                           half_t, half_t, typename Config::Epilogue>;
template <class Config>
using MirrorDescriptor =
    collective::detail::AuxStoreDescriptor<EpilogueDescriptor<Config>, ColumnMajor, half_t>;
template <class Config>
using TransposedStore = fusion::Sm90AuxStore<
    MirrorDescriptor<Config>::Stages, typename EpilogueDescriptor<Config>::EpilogueTile, half_t,
    cutlass::FloatRoundStyle::round_to_nearest, typename MirrorDescriptor<Config>::Stride,
    typename MirrorDescriptor<Config>::SmemLayoutAtom,
    typename MirrorDescriptor<Config>::CopyOpR2S>;

// Stores what is below the diagonal a second time, above it, as an auxiliary column-major output at
// the place of d. stmatrix transposes on the way to shared memory, so that TMA writes whole lines.
template <class Config>
struct MirroredStore : TransposedStore<Config> {
  using Base = TransposedStore<Config>;
  using Base::Base;

  template <class Callbacks>
  struct BelowDiagonal : Callbacks {
    CUTLASS_DEVICE BelowDiagonal(Callbacks&& callbacks, bool below_diagonal)
        : Callbacks(cute::move(callbacks)), below_diagonal(below_diagonal) {}

    CUTLASS_DEVICE void tma_store(int epi_m, int epi_n, int iteration, bool issue) {
      Callbacks::tma_store(epi_m, epi_n, iteration, issue && below_diagonal);
    }

    bool below_diagonal;
  };

  template <bool kReferenceSource, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      const fusion::detail::ConsumerStoreArgs<Args...>& args) {
    auto callbacks = Base::template get_consumer_store_callbacks<kReferenceSource>(args);
    const auto [tile_row, tile_column, k, item] = args.tile_coord_mnkl;
    const bool below_diagonal = tile_row / kClusterSize<Config> > tile_column;
    return BelowDiagonal<decltype(callbacks)>(cute::move(callbacks), below_diagonal);
  }
};

using LinearCombination = fusion::Sm90LinearCombination<half_t, float>;

template <bool kSymmetric, class Config>
struct ProductTraits {
  static constexpr int kAlignment = 8;  // Elements in 16 bytes, TMA's condition on strides.

  using Fusion =
      std::conditional_t<kSymmetric, fusion::Sm90EVT<MirroredStore<Config>, LinearCombination>,
                         LinearCombination>;
  using Epilogue = typename collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, typename Config::Tile,
      typename Config::Cluster, collective::EpilogueTileAuto, float, float, half_t, RowMajor,
      kAlignment, half_t, RowMajor, kAlignment, typename Config::Epilogue, Fusion>::CollectiveOp;

  // For CUTLASS b is (depth, columns): column-major if it was given transposed.
  using LayoutB = std::conditional_t<kSymmetric, ColumnMajor, RowMajor>;
  using Stages = cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
      sizeof(typename Epilogue::SharedStorage))>;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, half_t, RowMajor, kAlignment, half_t,
      LayoutB, kAlignment, float, typename Config::Tile, typename Config::Cluster, Stages,
      typename Config::Mainloop>::CollectiveOp;

  using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop,
                                                      Epilogue, BlockScheduler<kSymmetric>>;
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::MaxThreadsPerBlock, 1)
    run_product(CUTLASS_GRID_CONSTANT const typename Kernel::Params params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char shared[];
  Kernel()(params, shared);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
#error "wgmma exists in the architecture 9.0a only; for 9.0 this kernel would do nothing"
#endif
}

// --- launches -----------------------------------------------------------------------------------

half_t* elements(const Matrices& matrices) { return reinterpret_cast<half_t*>(matrices.data); }

auto row_major(const Matrices& matrices) {
  return cute::make_stride(matrices.ld, _1{}, matrices.batch_stride);
}

auto column_major(const Matrices& matrices) {
  return cute::make_stride(_1{}, matrices.ld, matrices.batch_stride);
}

template <bool kSymmetric, class Config>
cudaError_t launch(const Product& product, int multiprocessors, cudaStream_t stream) {
  using Kernel = typename ProductTraits<kSymmetric, Config>::Kernel;
  typename Kernel::Arguments arguments;
  arguments.problem_shape = {product.rows, product.columns, product.depth, product.batch};
  arguments.mainloop.ptr_A = elements(product.a);
  arguments.mainloop.dA = row_major(product.a);
  arguments.mainloop.ptr_B = elements(product.b);
  // CUTLASS counts the strides of b as those of (columns, depth).
  if constexpr (kSymmetric) {
    arguments.mainloop.dB = row_major(product.b);
  } else {
    arguments.mainloop.dB = column_major(product.b);
  }
  // Without beta c may be anything, but its tensor map, though not used, has to be valid.
  const Matrices& c = product.beta == 0 ? product.d : product.c;
  arguments.epilogue.ptr_C = elements(c);
  arguments.epilogue.dC = row_major(c);
  arguments.epilogue.ptr_D = elements(product.d);
  arguments.epilogue.dD = row_major(product.d);
  // beta * c + (alpha * accumulator); braces left empty are operands without arguments.
  const LinearCombination::Arguments linear = {
      {{product.beta}}, {}, {{{product.alpha}}, {}, {}}, {}};
  if constexpr (kSymmetric) {
    arguments.epilogue.thread = {linear, {elements(product.d), column_major(product.d)}};
  } else {
    arguments.epilogue.thread = linear;
  }
  arguments.hw_info.sm_count = multiprocessors;
  const typename Kernel::Params params = Kernel::to_underlying_arguments(arguments, nullptr);

  const cudaError_t error = cudaFuncSetAttribute(
      run_product<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::SharedStorageSize);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kClusterSize<Config>, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kClusterSize<Config>, std::min(params.scheduler.blocks.count,
                                                       multiprocessors / kClusterSize<Config>));
  config.blockDim = Kernel::get_block_shape();
  config.dynamicSmemBytes = Kernel::SharedStorageSize;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, run_product<Kernel>, params);
}

// The time of a large tile in units of a small one, which is half its size: an estimate, for what
// it saves in reads per operation.
constexpr float kLargeTileTime = 2 * 0.87f;

// Compares the waves that one item takes on the GPU. The batch is left out, because the result's
// bits must not depend on it: in a block on the diagonal both sides are summed, each in its own
// order.
template <bool kSymmetric>
bool prefers_large_tiles(const Product& product, int multiprocessors) {
  const auto waves = [&](int edge, int clusters) {
    const Blocks item = make_blocks(kSymmetric, edge, product.rows, product.columns, 1);
    return cute::ceil_div(item.count, clusters);
  };
  const int small = waves(kBlockEdge<SmallTile>, multiprocessors / kClusterSize<SmallTile>);
  const int large = waves(kBlockEdge<LargeTile>, multiprocessors / kClusterSize<LargeTile>);
  return kLargeTileTime * large < small;
}

// Of the current device; cudaErrorNotSupported if its compute capability is not 9.0. The runtime is
// asked about each device once.
cudaError_t get_multiprocessors(int* count) {
  static const std::vector<int> counts = [] {
    int devices = 0;
    cudaGetDeviceCount(&devices);
    std::vector<int> counts(devices);
    for (int device = 0; device < devices; ++device) {
      int major = 0;
      int minor = 0;
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
      if (major != 9 || minor != 0) continue;
      cudaDeviceGetAttribute(&counts[device], cudaDevAttrMultiProcessorCount, device);
    }
    return counts;
  }();
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  *count = counts[device];
  return *count > 0 ? cudaSuccess : cudaErrorNotSupported;
}

template <bool kSymmetric>
cudaError_t launch_all(const Product* products, int count, cudaStream_t stream) {
  int multiprocessors = 0;
  cudaError_t error = get_multiprocessors(&multiprocessors);
  for (int i = 0; i < count && error == cudaSuccess; ++i) {
    const Product& product = products[i];
    if (product.batch == 0 || product.rows == 0 || product.columns == 0) continue;
    error = prefers_large_tiles<kSymmetric>(product, multiprocessors)
                ? launch<kSymmetric, LargeTile>(product, multiprocessors, stream)
                : launch<kSymmetric, SmallTile>(product, multiprocessors, stream);
  }
  return error;
}

}  // namespace

cudaError_t symmetric_products_sm90(const Product* products, int count, cudaStream_t stream) {
  return launch_all<true>(products, count, stream);
}

cudaError_t general_products_sm90(const Product* products, int count, cudaStream_t stream) {
  return launch_all<false>(products, count, stream);
}

}  // namespace megatron_ext

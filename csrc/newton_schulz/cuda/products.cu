// Matrix products for sm_80 and newer: a persistent grid of blocks, each of four warps that compute
// one kTile x kTile tile of d at a time with mma.sync, fed by a pipeline of asynchronous copies.
#include <algorithm>
#include <climits>
#include <mutex>
#include <optional>
#include <vector>

#include "intrinsics.cuh"
#include "products.h"
#ifdef MEGATRON_EXT_SM90
#include "sm90.h"
#endif

namespace megatron_ext {
namespace {

constexpr int kThreads = 128;
constexpr int kStages = 4;
constexpr int kTileDepth = 32;
constexpr int kChunk = 8;  // halves in 16 bytes, the unit of all copies

// The largest powers of two by which the four warps, two by two, share a tile and its accumulators
// fit into registers; and one for problems that have too few such tiles to fill the GPU.
constexpr int kLargeTile = 128;
constexpr int kSmallTile = 64;

struct ProductList {
  Product products[kMaxProducts];
  int first_tile[kMaxProducts + 1];  // of each product, in the numbering of the whole launch
};
static_assert(sizeof(ProductList) <= 4096, "kernel parameters");

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

int64_t tiles_per_matrix(const Product& product, int tile, bool symmetric) {
  const int64_t rows = ceil_div(product.rows, tile);
  return symmetric ? rows * (rows + 1) / 2 : rows * ceil_div(product.columns, tile);
}

// --- where a tile lies
// ----------------------------------------------------------------------------

struct Tile {
  int row;  // of its first element in d
  int column;
};

// Tile `index` of the lower triangle, row by row.
__device__ inline Tile lower_tile(int index, int tile) {
  int row = static_cast<int>((sqrtf(8.0f * index + 1) - 1) / 2);
  // The square root is rounded.
  while (row * (row + 1) / 2 > index) --row;
  while ((row + 1) * (row + 2) / 2 <= index) ++row;
  return {row * tile, (index - row * (row + 1) / 2) * tile};
}

// Bands of 8 tile rows, column by column: blocks that run together share operands in L2.
__device__ inline Tile banded_tile(int index, int rows, int columns, int tile) {
  constexpr int kBand = 8;
  const int tile_rows = ceil_div(rows, tile);
  const int per_band = kBand * ceil_div(columns, tile);
  const int first_row = index / per_band * kBand;
  const int band = min(kBand, tile_rows - first_row);
  index %= per_band;
  return {(first_row + index % band) * tile, index / band * tile};
}

// --- tiles in shared memory
// -----------------------------------------------------------------------

// kRows x kColumns halves without padding. The 16-byte chunks of a row are permuted so that eight
// consecutive rows of one chunk column, what ldmatrix reads, lie in different banks.
template <int kRows, int kColumns>
struct OperandTile {
  static constexpr int kRowChunks = kColumns / kChunk;
  static constexpr int kRowsPerWave =
      std::max(1, 8 / kRowChunks);  // rows in the 128 bytes of all banks
  static constexpr int kPermuted = std::min(8, kRowChunks);

  __half* data;

  __device__ __half* chunk(int row, int chunk) const {
    const int permuted = chunk ^ (row / kRowsPerWave % kPermuted);
    return data + row * kColumns + permuted * kChunk;
  }
};

// Starts copying a window of a matrix, with zeros for what is beyond its size.
template <int kRows, int kColumns, typename ChunkAddress>
__device__ inline void copy_window(const __half* matrix, int64_t ld, int rows, int columns, int row,
                                   int column, ChunkAddress destination) {
  constexpr int kRowChunks = kColumns / kChunk;
#pragma unroll
  for (int i = threadIdx.x; i < kRows * kRowChunks; i += kThreads) {
    const int r = i / kRowChunks;
    const int chunk = i % kRowChunks;
    const int first = column + chunk * kChunk;
    const int valid = row + r < rows ? max(0, min(kChunk, columns - first)) : 0;
    // An address outside the matrix is not formed, even if nothing is read from it.
    const __half* source = valid > 0 ? matrix + (row + r) * ld + first : matrix;
    copy_async(destination(r, chunk), source, valid * static_cast<int>(sizeof(__half)));
  }
}

// --- the kernel
// -----------------------------------------------------------------------------------

template <int kTile, bool kSymmetric>
class TileProduct {
  static constexpr int kOperand = kTile * kTileDepth;
  static constexpr int kStagingLd = kTile + kChunk;  // fragments in different banks
  static constexpr int kWarpTile = kTile / 2;
  static constexpr int kRowFragments = kWarpTile / 16;
  static constexpr int kColumnFragments = kWarpTile / 8;

  using TileA = OperandTile<kTile, kTileDepth>;
  // As b is stored: transposed, or not.
  using TileB = std::conditional_t<kSymmetric, OperandTile<kTile, kTileDepth>,
                                   OperandTile<kTileDepth, kTile>>;

 public:
  static constexpr int kSharedBytes =
      std::max(kStages * 2 * kOperand, kTile* kStagingLd) * static_cast<int>(sizeof(__half));

  __device__ TileProduct(const Product& product, int item, Tile tile)
      : product_(product),
        a_(product.a.data + item * product.a.batch_stride),
        b_(product.b.data + item * product.b.batch_stride),
        c_(product.c.data + item * product.c.batch_stride),
        d_(product.d.data + item * product.d.batch_stride),
        tile_(tile),
        shared_(reinterpret_cast<__half*>(dynamic_shared_memory())) {
    const int warp = threadIdx.x / 32;
    lane_ = threadIdx.x % 32;
    warp_row_ = warp / 2 * kWarpTile;
    warp_column_ = warp % 2 * kWarpTile;
  }

  __device__ void accumulate() {
    const int steps = ceil_div(product_.depth, kTileDepth);
    for (int step = 0; step < kStages - 1; ++step) load(step, steps);
    for (int step = 0; step < steps; ++step) {
      wait_for_copies<kStages - 2>();
      // This step's operands are visible to all, and all have left the stage that is filled next.
      __syncthreads();
      load(step + kStages - 1, steps);
      multiply(step % kStages);
    }
    wait_for_copies<0>();
    __syncthreads();
  }

  // Consumes the accumulators. Leaves the shared memory to the next tile.
  __device__ void store() {
    const bool on_diagonal = kSymmetric && tile_.row == tile_.column;
    if (product_.beta != 0) {
      copy_window<kTile, kTile>(
          c_, product_.c.ld, product_.rows, product_.columns, tile_.row, tile_.column,
          [&](int row, int chunk) { return shared_ + row * kStagingLd + chunk * kChunk; });
      commit_copies();
      wait_for_copies<0>();
      __syncthreads();
    }
    for_each_pair([&](int row, int column, float& first, float& second) {
      // Every thread reads what it overwrites, and no other thread does: above the diagonal nothing
      // is read.
      __half2& staged = *reinterpret_cast<__half2*>(shared_ + row * kStagingLd + column);
      first *= product_.alpha;
      second *= product_.alpha;
      if (!on_diagonal) {
        if (product_.beta != 0) {
          const float2 c = __half22float2(staged);
          first += product_.beta * c.x;
          second += product_.beta * c.y;
        }
        staged = __floats2half2_rn(first, second);
      } else {
        store_mirrored(row, column, first);
        store_mirrored(row, column + 1, second);
      }
    });
    __syncthreads();
    write(tile_.row, tile_.column);
    __syncthreads();
    if (kSymmetric && !on_diagonal) {
      for_each_pair([&](int row, int column, float& first, float& second) {
        shared_[column * kStagingLd + row] = __float2half_rn(first);
        shared_[(column + 1) * kStagingLd + row] = __float2half_rn(second);
      });
      __syncthreads();
      write(tile_.column, tile_.row);
      __syncthreads();
    }
  }

 private:
  __device__ TileA tile_a(int stage) const { return {shared_ + stage * 2 * kOperand}; }
  __device__ TileB tile_b(int stage) const { return {shared_ + (stage * 2 + 1) * kOperand}; }

  // Beyond the last step it commits nothing, so that the count of pending commits stays the same.
  __device__ void load(int step, int steps) {
    if (step < steps) {
      const int depth = step * kTileDepth;
      const TileA a = tile_a(step % kStages);
      copy_window<kTile, kTileDepth>(a_, product_.a.ld, product_.rows, product_.depth, tile_.row,
                                     depth, [&](int row, int i) { return a.chunk(row, i); });
      const TileB b = tile_b(step % kStages);
      const auto chunk_of_b = [&](int row, int i) { return b.chunk(row, i); };
      if constexpr (kSymmetric) {
        copy_window<kTile, kTileDepth>(b_, product_.b.ld, product_.columns, product_.depth,
                                       tile_.column, depth, chunk_of_b);
      } else {
        copy_window<kTileDepth, kTile>(b_, product_.b.ld, product_.depth, product_.columns, depth,
                                       tile_.column, chunk_of_b);
      }
    }
    commit_copies();
  }

  __device__ void multiply(int stage) {
    const TileA tile_a = this->tile_a(stage);
    const TileB tile_b = this->tile_b(stage);
#pragma unroll
    for (int depth = 0; depth < kTileDepth; depth += 16) {
      uint32_t a[kRowFragments][4];
      uint32_t b[kColumnFragments / 2][4];  // two fragments of 8 columns each
#pragma unroll
      for (int i = 0; i < kRowFragments; ++i) {
        load_matrices(a[i],
                      tile_a.chunk(warp_row_ + i * 16 + lane_ % 16, depth / kChunk + lane_ / 16));
      }
#pragma unroll
      for (int j = 0; j < kColumnFragments / 2; ++j) {
        const int column = warp_column_ + j * 16;
        if constexpr (kSymmetric) {
          load_matrices(b[j], tile_b.chunk(column + lane_ / 16 * 8 + lane_ % 8,
                                           depth / kChunk + lane_ / 8 % 2));
        } else {
          load_matrices_transposed(b[j],
                                   tile_b.chunk(depth + lane_ % 16, column / kChunk + lane_ / 16));
        }
      }
#pragma unroll
      for (int i = 0; i < kRowFragments; ++i) {
#pragma unroll
        for (int j = 0; j < kColumnFragments; ++j) {
          multiply_add(accumulators_[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }

  // Calls visit(row, column, first, second) for this thread's accumulators, two neighbours of a row
  // at a time, with their place in the tile.
  template <typename Visitor>
  __device__ void for_each_pair(Visitor visit) {
#pragma unroll
    for (int i = 0; i < kRowFragments; ++i) {
#pragma unroll
      for (int j = 0; j < kColumnFragments; ++j) {
        float (&fragment)[4] = accumulators_[i][j];
        const int row = warp_row_ + i * 16 + lane_ / 4;
        const int column = warp_column_ + j * 8 + lane_ % 4 * 2;
        visit(row, column, fragment[0], fragment[1]);
        visit(row + 8, column, fragment[2], fragment[3]);
      }
    }
  }

  // In a tile on the diagonal both triangles come from the lower one: d is exactly symmetric.
  __device__ void store_mirrored(int row, int column, float value) {
    if (row < column) return;
    __half& staged = shared_[row * kStagingLd + column];
    if (product_.beta != 0) value += product_.beta * __half2float(staged);
    staged = __float2half_rn(value);
    shared_[column * kStagingLd + row] = staged;
  }

  // Writes the staged tile to d at this place.
  __device__ void write(int first_row, int first_column) const {
    constexpr int kRowChunks = kTile / kChunk;
#pragma unroll 4
    for (int i = threadIdx.x; i < kTile * kRowChunks; i += kThreads) {
      const int row = first_row + i / kRowChunks;
      const int column = first_column + i % kRowChunks * kChunk;
      if (row < product_.rows && column < product_.columns) {
        const __half* staged = shared_ + i / kRowChunks * kStagingLd + i % kRowChunks * kChunk;
        *reinterpret_cast<uint4*>(d_ + row * product_.d.ld + column) =
            *reinterpret_cast<const uint4*>(staged);
      }
    }
  }

  const Product& product_;
  const __half* a_;
  const __half* b_;
  const __half* c_;
  __half* d_;
  Tile tile_;
  __half* shared_;
  int lane_;
  int warp_row_;
  int warp_column_;
  float accumulators_[kRowFragments][kColumnFragments][4] = {};
};

template <int kTile, bool kSymmetric>
__global__ void __launch_bounds__(kThreads, kTile == kLargeTile ? 2 : 4)
    multiply_tiles(const __grid_constant__ ProductList list) {
  int i = 0;  // the product of the current tile
  for (int index = blockIdx.x; index < list.first_tile[kMaxProducts]; index += gridDim.x) {
    while (index >= list.first_tile[i + 1]) ++i;
    const Product& product = list.products[i];
    const int in_product = index - list.first_tile[i];
    const int per_item = (list.first_tile[i + 1] - list.first_tile[i]) / product.batch;
    const int in_item = in_product % per_item;
    const Tile tile = kSymmetric ? lower_tile(in_item, kTile)
                                 : banded_tile(in_item, product.rows, product.columns, kTile);
    TileProduct<kTile, kSymmetric> tile_product(product, in_product / per_item, tile);
    tile_product.accumulate();
    tile_product.store();
  }
}

// --- the launch
// -----------------------------------------------------------------------------------

using Kernel = void (*)(ProductList);

struct Variant {
  Kernel kernel;
  int tile;
  bool symmetric;
  int shared_bytes;
};

template <int kTile, bool kSymmetric>
constexpr Variant variant() {
  return {multiply_tiles<kTile, kSymmetric>, kTile, kSymmetric,
          TileProduct<kTile, kSymmetric>::kSharedBytes};
}

// In the order [symmetric][large].
constexpr Variant kVariants[2][2] = {{variant<kSmallTile, false>(), variant<kLargeTile, false>()},
                                     {variant<kSmallTile, true>(), variant<kLargeTile, true>()}};

struct Device {
  bool is_hopper;
  int sm_count;
  int resident_blocks[2][2];  // on the whole GPU, of each variant
};

cudaError_t query(int ordinal, Device* device) {
  int major, minor;
  for (const auto& [value, attribute] :
       {std::pair(&major, cudaDevAttrComputeCapabilityMajor),
        std::pair(&minor, cudaDevAttrComputeCapabilityMinor),
        std::pair(&device->sm_count, cudaDevAttrMultiProcessorCount)}) {
    if (const cudaError_t error = cudaDeviceGetAttribute(value, attribute, ordinal)) return error;
  }
  device->is_hopper = major == 9 && minor == 0;
  for (int symmetric = 0; symmetric < 2; ++symmetric) {
    for (int large = 0; large < 2; ++large) {
      const Variant& variant = kVariants[symmetric][large];
      const void* kernel = reinterpret_cast<const void*>(variant.kernel);
      int blocks;
      if (const cudaError_t error = cudaFuncSetAttribute(
              kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, variant.shared_bytes)) {
        return error;
      }
      if (const cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
              &blocks, kernel, kThreads, variant.shared_bytes)) {
        return error;
      }
      device->resident_blocks[symmetric][large] = device->sm_count * blocks;
    }
  }
  return cudaSuccess;
}

// The current device, asked once.
cudaError_t current_device(Device* device) {
  static std::mutex mutex;
  static std::vector<std::optional<Device>> known;
  int ordinal;
  if (const cudaError_t error = cudaGetDevice(&ordinal)) return error;
  const std::lock_guard lock(mutex);
  if (known.size() <= static_cast<size_t>(ordinal)) known.resize(ordinal + 1);
  if (!known[ordinal]) {
    Device queried;
    if (const cudaError_t error = query(ordinal, &queried)) return error;
    known[ordinal] = queried;
  }
  *device = *known[ordinal];
  return cudaSuccess;
}

int64_t count_tiles(const Product* products, int count, int tile, bool symmetric) {
  int64_t tiles = 0;
  for (int i = 0; i < count; ++i) {
    tiles += products[i].batch * tiles_per_matrix(products[i], tile, symmetric);
  }
  return tiles;
}

// In arbitrary units: the tiles of the busiest SM times what one takes, which grows with the area;
// per element a small tile takes longer, because it loads twice as much.
double estimated_time(int64_t tiles, int tile, int sm_count) {
  const double per_element = tile == kLargeTile ? 1.0 : 1.5;
  return static_cast<double>((tiles + sm_count - 1) / sm_count) * tile * tile * per_element;
}

const Variant& choose_variant(const Product* products, int count, bool symmetric, int sm_count) {
  const auto time = [&](const Variant& variant) {
    return estimated_time(count_tiles(products, count, variant.tile, symmetric), variant.tile,
                          sm_count);
  };
  const Variant* variants = kVariants[symmetric];
  return time(variants[1]) <= time(variants[0]) ? variants[1] : variants[0];
}

cudaError_t launch_variant(const Variant& variant, const Product* products, int count,
                           int max_blocks, cudaStream_t stream) {
  const int64_t tiles = count_tiles(products, count, variant.tile, variant.symmetric);
  if (count > kMaxProducts || tiles > INT_MAX - max_blocks) return cudaErrorInvalidValue;
  if (tiles == 0) return cudaSuccess;
  ProductList list = {};
  for (int i = 0; i < kMaxProducts; ++i) {
    int64_t size = 0;
    if (i < count) {
      list.products[i] = products[i];
      size = count_tiles(&products[i], 1, variant.tile, variant.symmetric);
    }
    list.first_tile[i + 1] = list.first_tile[i] + static_cast<int>(size);
  }
  const int64_t blocks = std::min<int64_t>(tiles, max_blocks);
  return launch(variant.kernel, dim3(static_cast<unsigned>(blocks)), kThreads, variant.shared_bytes,
                stream, list);
}

cudaError_t run(const Product* products, int count, bool symmetric, const Device& device,
                cudaStream_t stream) {
  const Variant& variant = choose_variant(products, count, symmetric, device.sm_count);
  const int max_blocks = device.resident_blocks[symmetric][variant.tile == kLargeTile];
  return launch_variant(variant, products, count, max_blocks, stream);
}

}  // namespace

cudaError_t symmetric_products(const Product* products, int count, cudaStream_t stream) {
  Device device;
  if (const cudaError_t error = current_device(&device)) return error;
#ifdef MEGATRON_EXT_SM90
  if (device.is_hopper) return symmetric_products_sm90(products, count, stream);
#endif
  return run(products, count, /*symmetric=*/true, device, stream);
}

cudaError_t general_products(const Product* products, int count, cudaStream_t stream) {
  Device device;
  if (const cudaError_t error = current_device(&device)) return error;
#ifdef MEGATRON_EXT_SM90
  if (device.is_hopper) return general_products_sm90(products, count, stream);
#endif
  return run(products, count, /*symmetric=*/false, device, stream);
}

}  // namespace megatron_ext

// The order in which the persistent kernels of sm90.cu go through the blocks of a matrix. A block
// is what one cluster computes at a time. Free of CUDA, so that a test can run it on the host.
#pragma once

#include <cmath>

#ifdef __CUDACC__
#define MEGATRON_EXT_HOST_DEVICE __host__ __device__
#else
#define MEGATRON_EXT_HOST_DEVICE
#endif

namespace megatron_ext {

struct Block {
  int row;
  int column;
};

// Rows of blocks that are gone through together, column by column. What is in flight at a time is
// then nearly square, 8 x 16 blocks on 132 multiprocessors, and shares most of a and b in the L2
// cache.
constexpr int kBandRows = 8;

MEGATRON_EXT_HOST_DEVICE inline int rows_of_band(int first_row, int rows) {
  return rows - first_row < kBandRows ? rows - first_row : kBandRows;
}

MEGATRON_EXT_HOST_DEVICE inline Block rectangle_block(int index, int rows, int columns) {
  const int first_row = index / (kBandRows * columns) * kBandRows;
  const int band_rows = rows_of_band(first_row, rows);
  const int in_band = index - first_row * columns;
  return {first_row + in_band % band_rows, in_band / band_rows};
}

// The number of blocks on and below the diagonal in the first rows of a matrix.
MEGATRON_EXT_HOST_DEVICE inline int triangle_blocks(int rows) { return rows * (rows + 1) / 2; }

// The row of a block, if the triangle is gone through row by row.
MEGATRON_EXT_HOST_DEVICE inline int triangle_row(int index) {
  int row = static_cast<int>((sqrtf(8.0f * index + 1.0f) - 1.0f) / 2.0f);
  // The root is rounded, and so is its argument from 2^24 on.
  while (triangle_blocks(row) > index) --row;
  while (triangle_blocks(row + 1) <= index) ++row;
  return row;
}

// A band of the triangle is a rectangle, left of the diagonal, and a small triangle.
MEGATRON_EXT_HOST_DEVICE inline Block triangle_block(int index, int rows) {
  const int first_row = triangle_row(index) / kBandRows * kBandRows;
  const int band_rows = rows_of_band(first_row, rows);
  const int in_band = index - triangle_blocks(first_row);
  const int in_triangle = in_band - first_row * band_rows;
  if (in_triangle < 0) return {first_row + in_band % band_rows, in_band / band_rows};
  const int row = triangle_row(in_triangle);
  return {first_row + row, first_row + in_triangle - triangle_blocks(row)};
}

}  // namespace megatron_ext

// Exits with 0 if the blocks of csrc/newton_schulz/cuda/sm90_blocks.h cover a matrix exactly once.
// Stores are clipped to the matrix, as TMA does; blocks below the diagonal are stored mirrored too.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "sm90_blocks.h"

using namespace megatron_ext;

namespace {

void expect(bool condition, const char* what, int rows, int columns) {
  if (condition) return;
  std::printf("%s: %d x %d\n", what, rows, columns);
  std::exit(1);
}

class StoreCounts {
 public:
  StoreCounts(int rows, int columns) : rows_(rows), columns_(columns), counts_(rows * columns) {}

  void store(Block block, int edge, bool mirrored) {
    for (int i = block.row * edge; i < std::min(rows_, (block.row + 1) * edge); ++i) {
      for (int j = block.column * edge; j < std::min(columns_, (block.column + 1) * edge); ++j) {
        ++counts_[mirrored ? j * columns_ + i : i * columns_ + j];
      }
    }
  }

  bool all_one() const {
    return std::all_of(counts_.begin(), counts_.end(), [](int count) { return count == 1; });
  }

 private:
  int rows_;
  int columns_;
  std::vector<int> counts_;
};

int blocks_along(int size, int edge) { return (size + edge - 1) / edge; }

void test_symmetric(int rows, int edge) {
  const int block_rows = blocks_along(rows, edge);
  StoreCounts counts(rows, rows);
  for (int index = 0; index < triangle_blocks(block_rows); ++index) {
    const Block block = triangle_block(index, block_rows);
    expect(0 <= block.column && block.column <= block.row && block.row < block_rows,
           "block outside the triangle", rows, rows);
    counts.store(block, edge, false);
    if (block.row > block.column) counts.store(block, edge, true);
  }
  expect(counts.all_one(), "not stored exactly once, symmetric", rows, rows);
}

void test_general(int rows, int columns, int edge) {
  const int block_rows = blocks_along(rows, edge);
  const int block_columns = blocks_along(columns, edge);
  StoreCounts counts(rows, columns);
  for (int index = 0; index < block_rows * block_columns; ++index) {
    const Block block = rectangle_block(index, block_rows, block_columns);
    expect(0 <= block.row && block.row < block_rows && 0 <= block.column &&
               block.column < block_columns,
           "block outside the rectangle", rows, columns);
    counts.store(block, edge, false);
  }
  expect(counts.all_one(), "not stored exactly once, general", rows, columns);
}

}  // namespace

int main() {
  for (int rows = 1; rows <= 700; ++rows) {
    for (int edge : {128, 256}) {
      test_symmetric(rows, edge);
      test_general(rows, 700 - rows / 3, edge);
    }
  }
  // Blocks of one element: many bands, the last one complete or not.
  for (int rows = 1; rows <= 300; ++rows) {
    test_symmetric(rows, 1);
    test_general(rows, 301 - rows, 1);
  }
  // Where the square root is no longer exact.
  for (int row = 1; row < 40000; ++row) {
    expect(triangle_row(triangle_blocks(row)) == row, "first block of a row", row, row);
    expect(triangle_row(triangle_blocks(row) - 1) == row - 1, "last block of a row", row, row);
  }
}

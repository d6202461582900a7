// Gram Newton-Schulz as a sequence of matrix products. With X_0 = X / ||X||_F (n x m, n <= m), the
// steps (a, b, c) are cut into segments. In a segment
//
//   R = X X',  Q = I,   a step:  Y = b R + c R R,  Q <- a Q + Q Y,  R <- (a I + Y) R (a I + Y),
//
// and at its end X <- Q X: the steps cost nothing of the long side. Each segment but the first is a
// restart, which removes the rounding errors that R has gathered; without, they grow with the
// square of what a step multiplies small singular values by (arXiv 2502.16982 gives the plain
// iteration, Dao-AILab's Gram Newton-Schulz, 2026, this form of it).
//
// Everything n x n is a polynomial of R, so symmetric, and commutes.
#pragma once

#include <cstdint>
#include <vector>

#include "products.h"

namespace megatron_ext {

// What the products work on: two n x m matrices and five n x n ones.
enum Buffer : int8_t { kX0, kX1, kSquare0, kSquare1, kSquare2, kSquare3, kSquare4, kBuffers };

struct Operation {
  enum Kind { kSymmetricProduct, kGeneralProduct, kAddToDiagonal } kind;
  double alpha;  // what is added for kAddToDiagonal
  double beta;
  // d = alpha a b + beta c, or alpha a b' + beta c where d is symmetric. c is not read if beta is
  // 0.
  Buffer a, b, c, d;
};

// Operations of one kind that do not need each other: one launch.
using Stage = std::vector<Operation>;

struct Schedule {
  double input_scale;   // kX0 holds input_scale * X_0
  double output_scale;  // the result is output_scale * output
  Buffer output;
  std::vector<Stage> stages;
};

// coefficients: a, b, c of each step; segments: steps of each segment. With fit_fp16 every buffer
// holds its matrix times a power of two that uses fp16's range: as large as the bound on the
// matrix's spectral norm, so on its entries, allows with a factor of 2 to spare. Throws
// std::invalid_argument if steps and segments do not match, or if fp16 needs more restarts.
Schedule make_schedule(const std::vector<double>& coefficients,
                       const std::vector<int64_t>& segments, bool fit_fp16);

// How many of the n x n buffers such a schedule uses, from kSquare0 on.
int squares_used(const std::vector<int64_t>& segments);

// Matrices of one shape with the short side first, rows <= columns, and their buffers.
struct Batch {
  int count;
  int rows;
  int columns;
  Matrices buffers[kBuffers];
};

// Runs a stage for all batches, in few launches.
cudaError_t run_fp16(const Stage& stage, const std::vector<Batch>& batches, cudaStream_t stream);

}  // namespace megatron_ext

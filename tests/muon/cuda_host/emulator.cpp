#include "emulator.h"

#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace megatron_ext {
namespace emulator {

Options options;

namespace {

constexpr int kWarp = 32;
constexpr size_t kStackBytes = 128 << 10;

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "emulator: %s\n", what);
  std::exit(2);
}

struct Copy {
  void* to;
  const void* from;
  int bytes;

  void arrive() const {
    std::memcpy(to, from, bytes);
    std::memset(static_cast<char*>(to) + bytes, 0, 16 - bytes);
  }
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  bool done;
  std::deque<std::vector<Copy>> commits;
  std::vector<Copy> uncommitted;
};

// Where a number of fibers wait for each other.
struct Meeting {
  int arrived = 0;
  int count = 0;  // of the meetings so far
};

std::vector<Fiber> fibers;
int running;  // index of the fiber
int alive;
bool progress;  // since the last round of all fibers
ucontext_t scheduler;
const std::function<void()>* thread_function;
std::vector<uint8_t> shared_memory;
Meeting block_meeting;

void yield() {
  const int self = running;
  swapcontext(&fibers[self].context, &scheduler);
}

template <typename Action>
void meet(Meeting& meeting, int size, Action last_arrived) {
  progress = true;
  if (++meeting.arrived == size) {
    last_arrived();
    meeting.arrived = 0;
    ++meeting.count;
    return;
  }
  for (const int count = meeting.count; count == meeting.count;) yield();
}

// A warp-wide instruction: every lane leaves its operands, the last one executes it for all.
enum class Instruction { kLoadMatrices, kLoadMatricesTransposed, kMultiplyAdd };

struct Lane {
  Instruction instruction;
  uint32_t* fragments;
  const void* address;
  float* d;
  const uint32_t* a;
  uint32_t b[2];
};

struct Warp {
  Meeting meeting;
  Lane lanes[kWarp];
};
std::vector<Warp> warps;

void execute(const Lane& operands, void (*instruction)(const Lane* lanes)) {
  Warp& warp = warps[running / kWarp];
  warp.lanes[running % kWarp] = operands;
  meet(warp.meeting, kWarp, [&] {
    for (const Lane& lane : warp.lanes) {
      if (lane.instruction != operands.instruction) fail("a warp has diverged");
    }
    instruction(warp.lanes);
  });
}

void enter_fiber() {
  (*thread_function)();
  fibers[running].done = true;
  progress = true;
  --alive;
  yield();
}

void run_block(int threads, int shared_bytes) {
  shared_memory.assign(shared_bytes + 128, 0x7f);  // NaN in fp16
  block_meeting = {};
  warps.assign((threads + kWarp - 1) / kWarp, {});
  if (fibers.size() < static_cast<size_t>(threads)) fibers.resize(threads);
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.done = false;
    fiber.commits.clear();
    fiber.uncommitted.clear();
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter_fiber, 0);
  }
  for (alive = threads; alive > 0;) {
    progress = false;
    for (int i = 0; i < threads; ++i) {
      running = options.descending ? threads - 1 - i : i;
      if (fibers[running].done) continue;
      threadIdx = {static_cast<unsigned>(running), 0, 0};
      swapcontext(&scheduler, &fibers[running].context);
    }
    if (!progress) fail("threads wait for others that never come");
  }
}

float to_float(uint32_t pair, int index) {
  static const std::vector<float> table = [] {
    std::vector<float> values(1 << 16);
    for (int i = 0; i < 1 << 16; ++i) {
      values[i] = __half2float(__ushort_as_half(static_cast<unsigned short>(i)));
    }
    return values;
  }();
  return table[pair >> (16 * index) & 0xffff];
}

// PTX ISA, ldmatrix: thread l gets elements 2 (l % 4) and the next of row l / 4, of column l / 4
// with .trans.
void load(const Lane* lanes, bool transposed) {
  for (int lane = 0; lane < kWarp; ++lane) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      uint16_t pair[2];
      for (int i = 0; i < 2; ++i) {
        int row = lane / 4, column = lane % 4 * 2 + i;
        if (transposed) std::swap(row, column);
        const auto* address = static_cast<const uint16_t*>(lanes[matrix * 8 + row].address);
        if (reinterpret_cast<uintptr_t>(address) % 16) fail("ldmatrix: a row is not aligned");
        pair[i] = address[column];
      }
      std::memcpy(&lanes[lane].fragments[matrix], pair, sizeof(pair));
    }
  }
}

// PTX ISA, matrix fragments for mma.m16n8k16 with .f16 operands.
void multiply_add_warp(const Lane* lanes) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < kWarp; ++lane) {
    const int group = lane / 4, in_group = lane % 4;
    for (int i = 0; i < 8; ++i) {
      const int row = i < 2 || (4 <= i && i < 6) ? group : group + 8;
      const int column = in_group * 2 + (i & 1) + (i < 4 ? 0 : 8);
      a[row][column] = to_float(lanes[lane].a[i / 2], i % 2);
    }
    for (int i = 0; i < 4; ++i) {
      const int row = in_group * 2 + (i & 1) + (i < 2 ? 0 : 8);
      b[row][group] = to_float(lanes[lane].b[i / 2], i % 2);
    }
  }
  for (int lane = 0; lane < kWarp; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + (i < 2 ? 0 : 8), column = lane % 4 * 2 + (i & 1);
      for (int k = 0; k < 16; ++k) lanes[lane].d[i] += a[row][k] * b[k][column];
    }
  }
}

}  // namespace

void run_grid(dim3 grid, int threads, int shared_bytes, const std::function<void()>& thread) {
  thread_function = &thread;
  gridDim = grid;
  blockDim = dim3(threads);
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; ++x) {
      blockIdx = {x, y, 0};
      run_block(threads, shared_bytes);
    }
  }
}

void wait_for_copies(int pending) {
  std::deque<std::vector<Copy>>& commits = fibers[running].commits;
  for (; commits.size() > static_cast<size_t>(pending); commits.pop_front()) {
    for (const Copy& copy : commits.front()) copy.arrive();
  }
}

}  // namespace emulator

using namespace emulator;

uint8_t* dynamic_shared_memory() {
  const auto address = reinterpret_cast<uintptr_t>(shared_memory.data());
  return reinterpret_cast<uint8_t*>((address + 127) / 128 * 128);
}

void copy_async(void* shared, const void* global, int bytes) {
  const auto* begin = static_cast<uint8_t*>(shared);
  if (begin < shared_memory.data() || begin + 16 > shared_memory.data() + shared_memory.size() ||
      reinterpret_cast<uintptr_t>(shared) % 16 || reinterpret_cast<uintptr_t>(global) % 16 ||
      bytes < 0 || bytes > 16) {
    fail("cp.async: invalid operands");
  }
  const Copy copy{shared, global, bytes};
  if (options.copies_arrive_at_once) return copy.arrive();
  fibers[running].uncommitted.push_back(copy);
}

void commit_copies() {
  Fiber& fiber = fibers[running];
  fiber.commits.push_back(std::move(fiber.uncommitted));
  fiber.uncommitted.clear();
}

void load_matrices(uint32_t (&fragments)[4], const void* shared_row) {
  execute({Instruction::kLoadMatrices, fragments, shared_row, nullptr, nullptr, {}},
          [](const Lane* lanes) { load(lanes, /*transposed=*/false); });
}

void load_matrices_transposed(uint32_t (&fragments)[4], const void* shared_row) {
  execute({Instruction::kLoadMatricesTransposed, fragments, shared_row, nullptr, nullptr, {}},
          [](const Lane* lanes) { load(lanes, /*transposed=*/true); });
}

void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  execute({Instruction::kMultiplyAdd, nullptr, nullptr, d, a, {b0, b1}}, multiply_add_warp);
}

}  // namespace megatron_ext

void __syncthreads() {
  using namespace megatron_ext::emulator;
  meet(block_meeting, static_cast<int>(blockDim.x), [] {});
}

// --- the runtime's host functions that the launchers call
// -----------------------------------------

extern "C" {

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = 8;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = megatron_ext::emulator::options.sm_count;
      break;
    default:
      *value = 0;
  }
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 1;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return cudaSuccess; }
}

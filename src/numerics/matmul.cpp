#include "numerics/matmul.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <vector>

#include "base/error.hpp"
#include "numerics/matmul_kernels.hpp"
#include "numerics/quant.hpp"

namespace tidelock::numerics {
namespace {

constexpr std::int64_t kSoloWork = 100'000;     // multiply-adds below which waking a thread costs more than it saves
constexpr std::int64_t kPieceWork = 4'000'000;  // about 30 microseconds on one core: small enough to balance
constexpr std::int64_t kRowTile = 8;            // pieces are whole tiles of the widest instruction set

// Counters in cache lines of their own, so that threads with a product each do not meet here.
constexpr int kShards = 16;
struct alignas(64) PathCounts {
  std::array<std::atomic<std::uint64_t>, 4> calls{};
};
std::array<PathCounts, kShards> path_counts;

void count_path(Isa path) {
  static std::atomic<unsigned> next_shard{0};
  thread_local const unsigned shard = next_shard.fetch_add(1, std::memory_order_relaxed) % kShards;
  path_counts[shard].calls[static_cast<std::size_t>(path)].fetch_add(1, std::memory_order_relaxed);
}

// The kernels in use; counts the call.
struct Kernels {
  const DenseKernels* dense;
  const QuantKernels* quant;
};
Kernels kernels() {
  static constexpr std::array<Kernels, 4> table{{{&kMatmulScalar, &kQuantScalar},
                                                 {&kMatmulAvx2, &kQuantAvx2},
                                                 {&kMatmulAvx512, &kQuantAvx512},
                                                 {&kMatmulAvx512Bf16, &kQuantAvx512Bf16}}};
  const Isa path = isa();
  count_path(path);
  return table[static_cast<std::size_t>(path)];
}

// Cuts [0, rows) x [0, columns) into pieces of column_step columns and about kPieceWork multiply-adds, row_work of them
// a row; rows vary fastest, so that a thread meets the same columns again.
template <typename Piece>
void in_pieces(Team& team, std::int64_t rows, std::int64_t columns, std::int64_t column_step, std::int64_t row_work,
               Piece piece) {
  const std::int64_t row_step =
      std::max(kRowTile, kPieceWork / std::max<std::int64_t>(row_work, 1) / kRowTile * kRowTile);
  const std::int64_t row_pieces = (rows + row_step - 1) / row_step;
  const std::int64_t column_pieces = (columns + column_step - 1) / column_step;
  team.parallel(row_pieces * column_pieces, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t row = i % row_pieces * row_step;
      const std::int64_t column = i / row_pieces * column_step;
      piece(row, std::min(row + row_step, rows), column, std::min(column + column_step, columns));
    }
  });
}

// The rows as integers, in buffers of the calling thread that stay as they are until its next product of other rows.
struct InputBuffers {
  std::vector<std::int8_t> q;
  std::vector<float> d;
  std::vector<std::int32_t> sums;
  // What the buffers hold; x is null when they hold nothing that may serve again.
  const bf16* x = nullptr;
  std::int64_t ldx = 0, rows = 0, in = 0;
};
InputBuffers& input_buffers() {
  thread_local InputBuffers buffers;
  return buffers;
}

QuantizedInputs quantize_inputs(const QuantKernels& set, const bf16* x, std::int64_t ldx, std::int64_t rows,
                                std::int64_t in, Team& team) {
  InputBuffers& b = input_buffers();
  const auto grow = [](auto& buffer, std::int64_t n) {
    if (static_cast<std::int64_t>(buffer.size()) < n) buffer.resize(static_cast<std::size_t>(n));
    return buffer.data();
  };
  const QuantizedInputs out{grow(b.q, rows * in), grow(b.d, rows * in / kInputBlock), grow(b.sums, rows * in / 16)};
  if (b.x == x && b.ldx == ldx && b.rows == rows && b.in == in) return out;
  const auto part = [&](std::int64_t row0, std::int64_t row1) {
    set.quantize(x, ldx, in, row0, row1, b.q.data(), b.d.data(), b.sums.data());
  };
  if (team.threads() == 1 || rows * in < kSoloWork)
    part(0, rows);
  else
    team.parallel(rows, std::max<std::int64_t>(1, kSoloWork / in), part);
  b.x = x, b.ldx = ldx, b.rows = rows, b.in = in;
  return out;
}

template <typename Element>
void run(const PackedMatrix& w, const Element* x, std::int64_t ldx, std::int64_t rows, float* y, std::int64_t ldy,
         Output output, Team& team, Input input) {
  constexpr bool kNarrow = std::is_same_v<Element, bf16>;
  if ((w.format() != Format::f32) != kNarrow || w.data() == nullptr)
    fail(ErrorCode::internal, "matmul: {} weights [{}, {}] do not take {} rows", format_name(w.format()), w.out(),
         w.in(), kNarrow ? "bf16" : "f32");
  if (rows <= 0) return;
  MatmulJob job{w.data(), x, ldx, y, ldy, w.out(), w.in(), w.segments(), output == Output::add, w.format()};
  const Kernels set = kernels();
  const BlockKernel block = w.format() == Format::f32    ? set.dense->f32
                            : w.format() == Format::bf16 ? set.dense->bf16
                                                         : set.quant->product;
  if constexpr (kNarrow) {
    if (input == Input::fresh) input_buffers().x = nullptr;
    if (is_quantized(w.format())) job.quantized = quantize_inputs(*set.quant, x, ldx, rows, w.in(), team);
  }
  const std::int64_t panels = panel_count(job.out);
  if (team.threads() == 1 || rows * job.out * job.in < kSoloWork) {
    block(job, 0, rows, 0, panels);
    return;
  }
  // A piece is two tiles wide; its height keeps the rows of a small batch together, so that their weights are read
  // once. Blocks are unpacked once a piece, which must be worth it.
  const std::int64_t panel_step = rows == 1 ? 8 : 6;
  const std::int64_t work = std::min(panel_step * kPanel, job.out) * job.in;
  in_pieces(team, rows, panels, panel_step, is_quantized(w.format()) ? std::min(work, kPieceWork / 128) : work,
            [&](std::int64_t row0, std::int64_t row1, std::int64_t panel0, std::int64_t panel1) {
              block(job, row0, row1, panel0, panel1);
            });
}

}  // namespace

std::uint64_t matmul_path_count(Isa path) {
  std::uint64_t total = 0;
  for (const PathCounts& shard : path_counts)
    total += shard.calls[static_cast<std::size_t>(path)].load(std::memory_order_relaxed);
  return total;
}

void matmul(const PackedMatrix& w, const bf16* x, std::int64_t ldx, std::int64_t rows, float* y, std::int64_t ldy,
            Output output, Team& team, Input input) {
  run(w, x, ldx, rows, y, ldy, output, team, input);
}

void matmul(const PackedMatrix& w, const float* x, std::int64_t ldx, std::int64_t rows, float* y, std::int64_t ldy,
            Output output, Team& team) {
  run(w, x, ldx, rows, y, ldy, output, team, Input::fresh);
}

void matmul_transposed_a(const float* a, std::int64_t lda, const float* b, std::int64_t ldb, std::int64_t rows,
                         std::int64_t n, std::int64_t k, float* c, std::int64_t ldc, Output output, Team& team) {
  if (n <= 0 || k <= 0) return;
  const OuterJob job{a, lda, b, ldb, c, ldc, rows, n, k, output == Output::store};
  const auto outer = kernels().dense->outer;
  if (team.threads() == 1 || rows * n * k < kSoloWork) {
    outer(job, 0, n, 0, k);
    return;
  }
  constexpr std::int64_t kColumns = 3 * kPanel;  // one tile wide: b is read once for all the rows of c in a piece
  in_pieces(team, n, k, kColumns, rows * kColumns,
            [&](std::int64_t i0, std::int64_t i1, std::int64_t j0, std::int64_t j1) { outer(job, i0, i1, j0, j1); });
}

}  // namespace tidelock::numerics

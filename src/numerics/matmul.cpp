#include "numerics/matmul.hpp"

#include <stdlib.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "base/error.hpp"
#include "numerics/matmul_kernels.hpp"

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
const MatmulKernels& kernels() {
  static constexpr std::array<const MatmulKernels*, 4> table{&kMatmulScalar, &kMatmulAvx2, &kMatmulAvx512,
                                                             &kMatmulAvx512Bf16};
  const Isa path = isa();
  count_path(path);
  return *table[static_cast<std::size_t>(path)];
}

void check_shape(std::int64_t out, std::int64_t in, int segments, Format format) {
  if (out < 1 || in < 1) fail(ErrorCode::invalid_argument, "matrix [{}, {}]: both sizes must be at least 1", out, in);
  if (segments < 1 || in % segments != 0)
    fail(ErrorCode::invalid_argument, "matrix [{}, {}]: {} segments do not divide {}", out, in, segments, in);
  if (format == Format::bf16 && segments > 1 && in / segments % 2 != 0)
    fail(ErrorCode::invalid_argument, "matrix [{}, {}]: {} segments of bf16 would have an odd length", out, in,
         segments);
}

// at(o, k) is the weight; to_float or to_bf16 as the format asks.
template <typename At>
void fill(Format format, std::byte* to, std::int64_t out, std::int64_t in, At at) {
  const std::size_t stride = panel_bytes(format, in);
  for (std::int64_t panel = 0; panel * kPanel < out; ++panel) {
    const std::int64_t columns = std::min(kPanel, out - panel * kPanel);
    std::byte* data = to + static_cast<std::size_t>(panel) * stride;
    if (columns < kPanel || in % 2 != 0) std::memset(data, 0, stride);
    for (std::int64_t column = 0; column < columns; ++column) {
      const std::int64_t o = panel * kPanel + column;
      if (format == Format::bf16) {
        auto* pairs = reinterpret_cast<bf16*>(data) + column * 2;
        for (std::int64_t k = 0; k < in; ++k) pairs[k / 2 * 2 * kPanel + k % 2] = to_bf16(at(o, k));
      } else {
        auto* values = reinterpret_cast<float*>(data) + column;
        for (std::int64_t k = 0; k < in; ++k) values[k * kPanel] = at(o, k);
      }
    }
  }
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

template <typename Element>
void run(const PackedMatrix& w, const Element* x, std::int64_t ldx, std::int64_t rows, float* y, std::int64_t ldy,
         Output output, Team& team) {
  constexpr Format kFormat = std::is_same_v<Element, bf16> ? Format::bf16 : Format::f32;
  if (w.format() != kFormat || w.data() == nullptr)
    fail(ErrorCode::internal, "matmul: the weights [{}, {}] are not packed as {}, as the rows are", w.out(), w.in(),
         kFormat == Format::bf16 ? "bf16" : "f32");
  if (rows <= 0) return;
  const MatmulJob job{w.data(), x, ldx, y, ldy, w.out(), w.in(), w.segments(), output == Output::add};
  const MatmulKernels& set = kernels();
  const auto block = kFormat == Format::bf16 ? set.bf16 : set.f32;
  const std::int64_t panels = panel_count(job.out);
  if (team.threads() == 1 || rows * job.out * job.in < kSoloWork) {
    block(job, 0, rows, 0, panels);
    return;
  }
  // A piece is two tiles wide; its height keeps the rows of a small batch together, so that their weights are read
  // once.
  const std::int64_t panel_step = rows == 1 ? 8 : 6;
  in_pieces(team, rows, panels, panel_step, std::min(panel_step * kPanel, job.out) * job.in,
            [&](std::int64_t row0, std::int64_t row1, std::int64_t panel0, std::int64_t panel1) {
              block(job, row0, row1, panel0, panel1);
            });
}

}  // namespace

void PackedMatrix::Free::operator()(std::byte* p) const {
  std::free(p);
}

PackedMatrix PackedMatrix::allocate(Format format, std::int64_t out, std::int64_t in, int segments) {
  check_shape(out, in, segments, format);
  PackedMatrix m;
  m.format_ = format;
  m.out_ = out;
  m.in_ = in;
  m.segments_ = segments;
  m.size_ = static_cast<std::size_t>(panel_count(out)) * panel_bytes(format, in);
  // Decoding reads every weight once a token: with small pages it would wait for the page walks.
  constexpr std::size_t kHugePage = 2U << 20;
  const std::size_t alignment = m.size_ >= kHugePage ? kHugePage : 64;
  void* data = nullptr;
  if (::posix_memalign(&data, alignment, m.size_) != 0)
    fail(ErrorCode::exhausted, "matrix [{}, {}]: no memory for {} bytes", out, in, m.size_);
  if (alignment == kHugePage) ::madvise(data, m.size_, MADV_HUGEPAGE);  // a wish: small pages work too
  m.data_.reset(static_cast<std::byte*>(data));
  return m;
}

PackedMatrix PackedMatrix::pack(Format format, const float* w, std::int64_t out, std::int64_t in, int segments) {
  PackedMatrix m = allocate(format, out, in, segments);
  fill(format, m.data_.get(), out, in, [&](std::int64_t o, std::int64_t k) { return w[o * in + k]; });
  return m;
}

PackedMatrix PackedMatrix::pack(const bf16* w, std::int64_t out, std::int64_t in, int segments) {
  PackedMatrix m = allocate(Format::bf16, out, in, segments);
  fill(Format::bf16, m.data_.get(), out, in, [&](std::int64_t o, std::int64_t k) { return to_float(w[o * in + k]); });
  return m;
}

PackedMatrix PackedMatrix::pack_transposed(Format format, const float* w, std::int64_t out, std::int64_t in) {
  PackedMatrix m = allocate(Format::f32, in, out, 1);
  fill(Format::f32, m.data_.get(), in, out, [&](std::int64_t o, std::int64_t k) {
    const float value = w[k * in + o];
    return format == Format::bf16 ? to_float(to_bf16(value)) : value;
  });
  return m;
}

std::vector<float> PackedMatrix::unpack() const {
  std::vector<float> w(static_cast<std::size_t>(out_ * in_));
  for (std::int64_t o = 0; o < out_; ++o) {
    const std::byte* panel = data_.get() + static_cast<std::size_t>(o / kPanel) * panel_bytes(format_, in_);
    for (std::int64_t k = 0; k < in_; ++k) {
      float& value = w[static_cast<std::size_t>(o * in_ + k)];
      if (format_ == Format::bf16) {
        value = to_float(reinterpret_cast<const bf16*>(panel)[(k / 2 * kPanel + o % kPanel) * 2 + k % 2]);
      } else {
        value = reinterpret_cast<const float*>(panel)[k * kPanel + o % kPanel];
      }
    }
  }
  return w;
}

int split_segments(std::int64_t in) {
  int segments = 1;
  while (segments < 8 && in % (segments * 4) == 0) segments *= 2;  // whole pairs of bf16 in every segment
  return segments;
}

std::uint64_t matmul_path_count(Isa path) {
  std::uint64_t total = 0;
  for (const PathCounts& shard : path_counts)
    total += shard.calls[static_cast<std::size_t>(path)].load(std::memory_order_relaxed);
  return total;
}

void matmul(const PackedMatrix& w, const bf16* x, std::int64_t ldx, std::int64_t rows, float* y, std::int64_t ldy,
            Output output, Team& team) {
  run(w, x, ldx, rows, y, ldy, output, team);
}

void matmul(const PackedMatrix& w, const float* x, std::int64_t ldx, std::int64_t rows, float* y, std::int64_t ldy,
            Output output, Team& team) {
  run(w, x, ldx, rows, y, ldy, output, team);
}

void matmul_transposed_a(const float* a, std::int64_t lda, const float* b, std::int64_t ldb, std::int64_t rows,
                         std::int64_t n, std::int64_t k, float* c, std::int64_t ldc, Output output, Team& team) {
  if (n <= 0 || k <= 0) return;
  const OuterJob job{a, lda, b, ldb, c, ldc, rows, n, k, output == Output::store};
  const auto outer = kernels().outer;
  if (team.threads() == 1 || rows * n * k < kSoloWork) {
    outer(job, 0, n, 0, k);
    return;
  }
  constexpr std::int64_t kColumns = 3 * kPanel;  // one tile wide: b is read once for all the rows of c in a piece
  in_pieces(team, n, k, kColumns, rows * kColumns,
            [&](std::int64_t i0, std::int64_t i1, std::int64_t j0, std::int64_t j1) { outer(job, i0, i1, j0, j1); });
}

}  // namespace tidelock::numerics

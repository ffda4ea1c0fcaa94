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
constexpr std::int64_t kPieceWork = 2'000'000;  // about 10 microseconds on one core: small enough to balance
constexpr std::int64_t kPiecePanels = 12;       // a multiple of every tile width but the widest

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
  // Pieces: all panels by kPiecePanels, and rows in multiples of the tile where there are many.
  const std::int64_t column_pieces = (panels + kPiecePanels - 1) / kPiecePanels;
  const std::int64_t piece_row_work = std::min(kPiecePanels * kPanel, job.out) * job.in;
  const std::int64_t row_step = std::max<std::int64_t>(8, kPieceWork / piece_row_work / 8 * 8);
  const std::int64_t row_pieces = (rows + row_step - 1) / row_step;
  team.parallel(column_pieces * row_pieces, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t piece = begin; piece < end; ++piece) {
      const std::int64_t row = piece % row_pieces * row_step;
      const std::int64_t panel = piece / row_pieces * kPiecePanels;
      block(job, row, std::min(row + row_step, rows), panel, std::min(panel + kPiecePanels, panels));
    }
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
  constexpr std::int64_t kColumns = kPiecePanels * kPanel;
  const std::int64_t column_pieces = (k + kColumns - 1) / kColumns;
  const std::int64_t row_step =
      std::max<std::int64_t>(8, kPieceWork / std::max<std::int64_t>(rows * kColumns, 1) / 8 * 8);
  const std::int64_t row_pieces = (n + row_step - 1) / row_step;
  team.parallel(column_pieces * row_pieces, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t piece = begin; piece < end; ++piece) {
      const std::int64_t i = piece % row_pieces * row_step;
      const std::int64_t j = piece / row_pieces * kColumns;
      outer(job, i, std::min(i + row_step, n), j, std::min(j + kColumns, k));
    }
  });
}

}  // namespace tidelock::numerics

// The matrix kernels over the lane model, compiled once per instruction set (matmul_<isa>.cpp).
//
// A tile of R rows x P panels keeps R * P vectors of 16 chains in registers and walks k upward. Tiles, panels and rows
// may be visited in any order: a chain lives in one lane from its first term to its last.
#include <algorithm>
#include <array>

#include "numerics/matmul_core.inl"

namespace tidelock::numerics::TIDELOCK_ISA_NAMESPACE {

// Tile shapes: as many chains as the registers hold, and enough to cover the latency of the multiply-add. Fewer rows
// take more panels; kMaxPanels[R - 1] panels go with R rows. One row takes only 4: it waits for memory, and more
// streams side by side read it more slowly (8: 0.92 of the read bandwidth, 4: 0.98).
// Under the sanitizers tiles are small: the large ones take minutes to compile there, and their shape changes no bit.
#if defined(__SANITIZE_ADDRESS__) && defined(__AVX2__)
inline constexpr std::array<int, 3> kMaxPanels{4, 2, 1};
#elif defined(__AVX512F__)
inline constexpr std::array<int, 8> kMaxPanels{4, 6, 6, 6, 3, 3, 3, 3};
#elif defined(__AVX2__)
inline constexpr std::array<int, 6> kMaxPanels{4, 2, 2, 1, 1, 1};
#else
inline constexpr std::array<int, 1> kMaxPanels{1};
#endif
inline constexpr int kMaxRows = static_cast<int>(kMaxPanels.size());
inline constexpr int kWidest = *std::max_element(kMaxPanels.begin(), kMaxPanels.end());
// Panels that all rows of a block visit before the next ones are read.
inline constexpr int kGroup = kMaxRows == 8 ? 6 : kWidest;

// One tile over one run of k: to = chain from zero, or to = to + chain.
struct Run {
  const void* x;  // the tile's first row, at the run's first k
  std::int64_t ldx;
  const std::byte* w;         // the tile's first panel, at the run's first k
  std::int64_t panel_stride;  // bytes
  std::int64_t count;         // elements of k
  float* to;
  std::int64_t ldt;
  int width;  // columns of the last panel that exist
  bool add;
};

template <typename Kernel, int R, int P>
void tile(const Run& run) {
  Accumulators<R, P> acc;
  acc.zero();
  Kernel::template run<R, P>(acc, static_cast<const typename Kernel::Element*>(run.x), run.ldx, run.w, run.panel_stride,
                             run.count);
  repeat<R>([&](auto r) __attribute__((always_inline)) {
    repeat<P>([&](auto p) __attribute__((always_inline)) {
      float* to = run.to + r * run.ldt + p * kPanel;
      if (p + 1 == P && run.width < kPanel) {
        store_n(to, run.add ? add(load_n(to, run.width), acc.v[r][p]) : acc.v[r][p], run.width);
      } else {
        store(to, run.add ? add(load(to), acc.v[r][p]) : acc.v[r][p]);
      }
    });
  });
}

using Tile = void (*)(const Run&);

// kTiles[R - 1][P - 1]; null where the registers would not hold the tile.
template <typename Kernel>
constexpr auto make_tiles() {
  std::array<std::array<Tile, kWidest>, kMaxRows> tiles{};
  [&]<int... R>(std::integer_sequence<int, R...>) {
    const auto fill_row = [&]<int Row>(std::integral_constant<int, Row>) {
      [&]<int... P>(std::integer_sequence<int, P...>) {
        ((tiles[Row][P] = &tile<Kernel, Row + 1, P + 1>), ...);
      }
      (std::make_integer_sequence<int, kMaxPanels[Row]>{});
    };
    (fill_row(std::integral_constant<int, R>{}), ...);
  }
  (std::make_integer_sequence<int, kMaxRows>{});
  return tiles;
}

template <typename Kernel>
inline constexpr auto kTiles = make_tiles<Kernel>();

// The segments of a tile, one chain each, summed in ascending order; then the sum goes into y.
template <typename Kernel>
void segmented_tile(Tile tile, const MatmulJob& job, Run run, std::int64_t rows, std::int64_t columns) {
  const std::int64_t length = job.in / job.segments;
  alignas(64) float total[kMaxRows * kWidest * kPanel];
  float* const y = run.to;
  if (job.add) {
    run.to = total;
    run.ldt = kWidest * kPanel;
  }
  run.count = length;
  const std::byte* const w = run.w;
  const auto* const x = static_cast<const typename Kernel::Element*>(run.x);
  for (std::int64_t s = 0; s < job.segments; ++s) {
    run.x = x + s * length;
    run.w = w + Kernel::steps(s * length) * kPanel * 4;
    run.add = s > 0;
    tile(run);
  }
  if (!job.add) return;
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < columns; ++c) y[r * job.ldy + c] += total[r * run.ldt + c];
}

template <typename Kernel>
void block(const MatmulJob& job, std::int64_t row0, std::int64_t row1, std::int64_t panel0, std::int64_t panel1) {
  const std::int64_t panel_stride = Kernel::steps(job.in) * kPanel * 4;
  const auto* x = static_cast<const typename Kernel::Element*>(job.x);
  const std::int64_t group = row1 - row0 < kMaxRows ? kMaxPanels[std::max<std::int64_t>(row1 - row0, 1) - 1] : kGroup;
  for (std::int64_t g = panel0; g < panel1; g += group) {
    const std::int64_t group_end = std::min(g + group, panel1);
    for (std::int64_t row = row0; row < row1;) {
      const std::int64_t rows = std::min<std::int64_t>(kMaxRows, row1 - row);
      for (std::int64_t panel = g; panel < group_end;) {
        const std::int64_t panels = std::min<std::int64_t>(kMaxPanels[rows - 1], group_end - panel);
        const std::int64_t columns = std::min(panels * kPanel, job.out - panel * kPanel);
        const Run run{x + row * job.ldx,
                      job.ldx,
                      job.w + panel * panel_stride,
                      panel_stride,
                      job.in,
                      job.y + row * job.ldy + panel * kPanel,
                      job.ldy,
                      static_cast<int>(columns - (panels - 1) * kPanel),
                      job.add};
        const Tile tile = kTiles<Kernel>[rows - 1][panels - 1];
        if (job.segments == 1) {
          tile(run);
        } else {
          segmented_tile<Kernel>(tile, job, run, rows, columns);
        }
        panel += panels;
      }
      row += rows;
    }
  }
}

// c[i .. i+R)[j .. j+16 P) over all m; `width` columns of the last vector exist.
template <int R, int P, bool kTail>
void outer_tile(const OuterJob& job, std::int64_t m0, std::int64_t m1, std::int64_t i, std::int64_t j, int width) {
  float* c = job.c + i * job.ldc + j;
  Accumulators<R, P> acc;
  const auto is_tail = [](auto p) { return kTail && p + 1 == P; };
  if (job.fresh && m0 == 0) {
    acc.zero();
  } else {
    repeat<R>([&](auto r) __attribute__((always_inline)) {
      repeat<P>([&](auto p) __attribute__((always_inline)) {
        const float* from = c + r * job.ldc + p * kPanel;
        acc.v[r][p] = is_tail(p) ? load_n(from, width) : load(from);
      });
    });
  }
  const float* a = job.a + m0 * job.lda + i;
  const float* b = job.b + m0 * job.ldb + j;
  for (std::int64_t m = m0; m < m1; ++m, a += job.lda, b += job.ldb) {
    V16 bv[P];
    repeat<P>([&](auto p) __attribute__((always_inline)) {
      // A stride that crosses pages is more than the hardware's prefetcher follows.
      __builtin_prefetch(b + 8 * job.ldb + p * kPanel);
      bv[p] = is_tail(p) ? load_n(b + p * kPanel, width) : load(b + p * kPanel);
    });
    repeat<R>([&](auto r) __attribute__((always_inline)) {
      const V16 av = set1(a[r]);
      repeat<P>([&](auto p) __attribute__((always_inline)) { acc.v[r][p] = fma(av, bv[p], acc.v[r][p]); });
    });
  }
  repeat<R>([&](auto r) __attribute__((always_inline)) {
    repeat<P>([&](auto p) __attribute__((always_inline)) {
      float* to = c + r * job.ldc + p * kPanel;
      is_tail(p) ? store_n(to, acc.v[r][p], width) : store(to, acc.v[r][p]);
    });
  });
}

inline constexpr int kOuterPanels = kMaxPanels[kMaxRows - 1];

using OuterTile = void (*)(const OuterJob&, std::int64_t m0, std::int64_t m1, std::int64_t i, std::int64_t j,
                           int width);

// kOuterTiles[tail][R - 1][P - 1]
constexpr auto make_outer_tiles() {
  std::array<std::array<std::array<OuterTile, kOuterPanels>, kMaxRows>, 2> tiles{};
  [&]<int... I>(std::integer_sequence<int, I...>) {
    ((tiles[0][I / kOuterPanels][I % kOuterPanels] = &outer_tile<I / kOuterPanels + 1, I % kOuterPanels + 1, false>,
      tiles[1][I / kOuterPanels][I % kOuterPanels] = &outer_tile<I / kOuterPanels + 1, I % kOuterPanels + 1, true>),
     ...);
  }
  (std::make_integer_sequence<int, kMaxRows * kOuterPanels>{});
  return tiles;
}

inline constexpr auto kOuterTiles = make_outer_tiles();

// m is cut into runs whose rows of a and b stay in the cache; the chain continues from c, so the cut changes no bit.
inline constexpr std::int64_t kOuterRun = 256;

inline void outer_block(const OuterJob& job, std::int64_t i0, std::int64_t i1, std::int64_t j0, std::int64_t j1) {
  std::int64_t m0 = 0;
  do {
    const std::int64_t m1 = std::min(m0 + kOuterRun, job.rows);
    for (std::int64_t j = j0; j < j1; j += kOuterPanels * kPanel) {
      const std::int64_t columns = std::min(kOuterPanels * kPanel, j1 - j);
      const std::int64_t panels = panel_count(columns);
      const auto width = static_cast<int>(columns - (panels - 1) * kPanel);
      for (std::int64_t i = i0; i < i1; i += kMaxRows) {
        const std::int64_t rows = std::min<std::int64_t>(kMaxRows, i1 - i);
        kOuterTiles[width < kPanel][rows - 1][panels - 1](job, m0, m1, i, j, width);
      }
    }
    m0 = m1;
  } while (m0 < job.rows);
}

inline constexpr DenseKernels kDenseKernels{&block<KernelF32>, &block<KernelBf16>, &outer_block};

}  // namespace tidelock::numerics::TIDELOCK_ISA_NAMESPACE

// The matrix kernels of the block formats (quant.hpp), compiled once per instruction set.
//
// Packed weights come in chunks of up to 256 k. A sub-block's integer dot product goes into the accumulator with the
// scales of weights and inputs (matmul.hpp states the order). Two ways lead to the same bits: with few rows the codes
// are unpacked in registers, for every tile again; with many they are unpacked once into a buffer that stays in the
// first-level cache, and all rows pass over it.
#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "numerics/matmul_unpack.inl"
#include "numerics/quant.hpp"

namespace tidelock::numerics::TIDELOCK_ISA_NAMESPACE {

// Rows of a tile, largest first; what a larger tile leaves goes to the smaller. Fewer kinds compile in a third of the
// time. Under the sanitizers tiles are small: they take minutes to compile there, and their shape changes no bit.
#if defined(__SANITIZE_ADDRESS__)
inline constexpr std::array<int, 2> kTileRows{2, 1};
inline constexpr int kBlockPanels = kHalves ? 1 : 2;
inline constexpr int kFewRows = 2;
#elif defined(__AVX512F__)
inline constexpr std::array<int, 4> kTileRows{8, 4, 2, 1};
inline constexpr int kBlockPanels = 3;
inline constexpr int kFewRows = 8;
#elif defined(__AVX2__)
inline constexpr std::array<int, 3> kTileRows{4, 2, 1};
inline constexpr int kBlockPanels = 1;
inline constexpr int kFewRows = 2;
#else
inline constexpr std::array<int, 1> kTileRows{1};
inline constexpr int kBlockPanels = 1;
#endif
inline constexpr std::int64_t kRowGroup = 128;  // rows that pass over a chunk while it is unpacked
inline constexpr int kMaxSubBlocks = 16;        // of a chunk

inline constexpr std::int64_t kAccStride = kBlockPanels * kPanel;

struct BlockScratch {
  alignas(64) std::array<std::uint8_t, kBlockPanels * kChunk * kPanel*(kHalves ? 2 : 1)> codes;
  alignas(64) std::array<float, kBlockPanels * kMaxSubBlocks * kPanel> scales, mins;
  alignas(64) std::array<float, kRowGroup * kBlockPanels * kPanel> acc, total;
};

// Sum of the inputs of sub-block b of a row (sums of 16 each).
template <std::int64_t kSub>
TIDELOCK_INLINE std::int32_t input_sum(const std::int32_t* sums, std::int64_t b) {
  return kSub == 16 ? sums[b] : sums[2 * b] + sums[2 * b + 1];
}

// The order of the contract, for one output vector and one sub-block.
template <bool kMin>
TIDELOCK_INLINE V16 accumulate(V16 scale, V16 min, float d, std::int32_t sum, I16 dot, V16 acc) {
  acc = fma(mul(scale, set1(d)), to_floats(dot), acc);
  if constexpr (kMin) acc = fnma(min, set1(d * static_cast<float>(sum)), acc);
  return acc;
}

struct Tile {
  const std::int8_t* q;  // the tile's first row, at the first sub-block
  std::int64_t in;
  const float* d;              // of the row; rows are in / 32 apart
  const std::int32_t* sums;    // of the row; rows are in / 16 apart
  std::int64_t first, blocks;  // sub-blocks, counted from k = 0
  std::int32_t code_offset;    // what a stored code is too large by
  const std::uint8_t* codes;   // at the first sub-block
  std::int64_t codes_stride;   // bytes from panel to panel
  const float *scales, *mins;  // likewise; panels are kMaxSubBlocks * kPanel apart
  float* acc;                  // rows are kAccStride apart
};

// The largest code, where sums depend on it; else formats share their tiles.
template <Format F>
inline constexpr int kLargestCode = !kHalves             ? 0
                                    : F == Format::mxfp4 ? 24
                                                         : (1 << code_bits(F)) - 1;
template <Format F>
inline constexpr bool kInHalves = kHalves&& code_bits(F) == 8;

// Tiles over unpacked codes: what they depend on of a format is the length of a sub-block, whether it has a minimum,
// and kLargestCode.
template <std::int64_t kSub, bool kMin, int kLargest>
struct Tiles {
  template <int R, int P>
  static TIDELOCK_INLINE void add(Dots<R, P>& dots, const Tile& t, std::int64_t b) {
    const std::int8_t* q = t.q + b * kSub;
#if defined(__AVX2__) && !defined(__AVX512F__)
    const std::uint8_t* codes = t.codes + b * kSub * kPanel * (kLargest == 255 ? 2 : 1);
    add_dots<kLargest, kSub / 4>(
        dots, q, t.in, [&](auto step) __attribute__((always_inline)) {
          if constexpr (kLargest == 255) {
            return Halves{load_codes(codes + step * 64), load_codes(codes + kUpper + step * 64)};
          } else {
            return load_codes(codes + step * 64);
          }
        });
#else
    add_dots(dots, q, t.in, t.codes + b * kSub * kPanel, t.codes_stride, static_cast<int>(kSub / 4));
#endif
  }

  template <int R, int P>
  static void run(const Tile& t) {
    constexpr std::int64_t kSubsPerInput = kInputBlock / kSub;
    for (std::int64_t b = 0; b < t.blocks; ++b) {
      Dots<R, P> dots;
      repeat<R>([&](auto r) __attribute__((always_inline)) {
        const std::int32_t start = -t.code_offset * input_sum<kSub>(t.sums + r * (t.in / 16), t.first + b);
        repeat<P>([&](auto p) __attribute__((always_inline)) { dots.v[r][p] = set1_int(start); });
      });
      add(dots, t, b);
      repeat<R>([&](auto r) __attribute__((always_inline)) {
        const float d = t.d[r * (t.in / kInputBlock) + (t.first + b) / kSubsPerInput];
        const std::int32_t sum = kMin ? input_sum<kSub>(t.sums + r * (t.in / 16), t.first + b) : 0;
        repeat<P>([&](auto p) __attribute__((always_inline)) {
          float* acc = t.acc + r * kAccStride + p * kPanel;
          const std::int64_t at = (p * kMaxSubBlocks + b) * kPanel;
          const V16 min = kMin ? load(t.mins + at) : V16{};
          store(acc, accumulate<kMin>(load(t.scales + at), min, d, sum, dots.v[r][p], load(acc)));
        });
      });
    }
  }
  using Function = void (*)(const Tile&);
  static constexpr auto kFunctions = [] {  // [index into kTileRows][P - 1]
    std::array<std::array<Function, kBlockPanels>, kTileRows.size()> functions{};
    [&]<int... I>(std::integer_sequence<int, I...>) {
      ((functions[I / kBlockPanels][I % kBlockPanels] = &run<kTileRows[I / kBlockPanels], I % kBlockPanels + 1>), ...);
    }
    (std::make_integer_sequence<int, static_cast<int>(kTileRows.size()) * kBlockPanels>{});
    return functions;
  }();
};

template <Format F>
struct Block {
  static constexpr std::int64_t kSub = F == Format::q6_k ? 16 : 32;
  static constexpr int kSubSteps = kSub / 4;
  static constexpr std::int64_t kSubsPerInput = kInputBlock / kSub;
  static constexpr bool kMin = F == Format::q4_k || F == Format::q5_k || F == Format::q5_1;
  static constexpr std::int64_t kGroupBytes = 32 * kPanel * code_bits(F) / 8;

  static void unpack(const MatmulJob& job, std::int64_t panel, std::int64_t panels, std::int64_t chunk,
                     std::int64_t count, BlockScratch& s) {
    for (std::int64_t p = 0; p < panels; ++p) {
      const std::byte* from = job.w + static_cast<std::size_t>(panel + p) * panel_bytes(F, job.in) +
                              static_cast<std::size_t>(chunk) * chunk_bytes(F, kChunk);
      if constexpr (code_bits(F) != 8)
        for (std::int64_t g = 0; g < count / 32; ++g)
          unpack_group<F>(from + codes_offset(F, count) + g * kGroupBytes,
                          s.codes.data() + (p * kChunk + g * 32) * kPanel);
      if constexpr (kInHalves<F>)
        for (std::int64_t g = 0; g < count / 32; ++g)
          split_group(from + codes_offset(F, count) + g * kGroupBytes, s.codes.data() + g * 2 * kUpper);
      const Shared shared = load_shared<F>(from);
      for (std::int64_t b = 0; b < count / kSub; ++b) {
        store(s.scales.data() + (p * kMaxSubBlocks + b) * kPanel, load_scale<F>(shared, from, b));
        if constexpr (kMin) store(s.mins.data() + (p * kMaxSubBlocks + b) * kPanel, load_min<F>(shared, from, b));
      }
    }
  }

  // Where the bytes of a chunk's codes are: eight bits that are not split are used where they lie.
  struct Unpacked {
    const std::uint8_t* first;
    std::int64_t stride;  // from panel to panel
  };
  static Unpacked unpacked(const MatmulJob& job, std::int64_t panel, std::int64_t chunk, std::int64_t count,
                           const BlockScratch& s) {
    if constexpr (code_bits(F) != 8 || kInHalves<F>) return {s.codes.data(), kChunk * kPanel};
    const std::size_t stride = panel_bytes(F, job.in);
    const std::byte* from = job.w + static_cast<std::size_t>(panel) * stride +
                            static_cast<std::size_t>(chunk) * chunk_bytes(F, kChunk) + codes_offset(F, count);
    return {reinterpret_cast<const std::uint8_t*>(from), static_cast<std::int64_t>(stride)};
  }

  // The end of a segment: its sum joins those before it.
  static void close_segment(BlockScratch& s, std::int64_t rows, bool first) {
    const std::int64_t n = rows * kAccStride;
    for (std::int64_t i = 0; i < n; ++i) s.total[i] = first ? s.acc[i] : s.total[i] + s.acc[i];
    std::fill_n(s.acc.data(), n, 0.0F);
  }

  static void write(const MatmulJob& job, const float* from, std::int64_t stride, std::int64_t row, std::int64_t rows,
                    std::int64_t panel, std::int64_t panels) {
    const std::int64_t columns = std::min(panels * kPanel, job.out - panel * kPanel);
    for (std::int64_t r = 0; r < rows; ++r) {
      float* y = job.y + (row + r) * job.ldy + panel * kPanel;
      for (std::int64_t c = 0; c < columns; ++c) y[c] = job.add ? y[c] + from[r * stride + c] : from[r * stride + c];
    }
  }

  // Rows [row, row + rows), at most kRowGroup of them, of up to kBlockPanels panels.
  static void many_rows(const MatmulJob& job, std::int64_t row, std::int64_t rows, std::int64_t panel,
                        std::int64_t panels, BlockScratch& s) {
    const std::int64_t segment = job.in / job.segments;
    std::fill_n(s.acc.data(), rows * kAccStride, 0.0F);
    for (std::int64_t k0 = 0; k0 < job.in; k0 += kChunk) {
      const std::int64_t count = std::min<std::int64_t>(kChunk, job.in - k0);
      unpack(job, panel, panels, k0 / kChunk, count, s);
      const Unpacked codes = unpacked(job, panel, k0 / kChunk, count, s);
      for (std::int64_t k = k0; k < k0 + count;) {
        const std::int64_t stop = std::min((k / segment + 1) * segment, k0 + count);
        const std::int64_t at = (k - k0) / kSub;
        std::size_t kind = 0;
        for (std::int64_t r = 0; r < rows; r += kTileRows[kind]) {
          while (kTileRows[kind] > rows - r) ++kind;
          const std::int64_t first_row = row + r;
          Tiles<kSub, kMin, kLargestCode<F>>::kFunctions[kind][panels - 1](
              {job.quantized.q + first_row * job.in + k, job.in, job.quantized.d + first_row * (job.in / kInputBlock),
               job.quantized.sums + first_row * (job.in / 16), k / kSub, (stop - k) / kSub, code_offset(F),
               codes.first + (k - k0) * kPanel * (kInHalves<F> ? 2 : 1), codes.stride, s.scales.data() + at * kPanel,
               s.mins.data() + at * kPanel, s.acc.data() + r * kAccStride});
        }
        if (job.segments > 1 && stop % segment == 0) close_segment(s, rows, stop == segment);
        k = stop;
      }
    }
    write(job, job.segments > 1 ? s.total.data() : s.acc.data(), kAccStride, row, rows, panel, panels);
  }

#if defined(__AVX2__)
  // The dot products of one group of 32 k (one sub-block, or two), codes unpacked in registers.
  template <int R, int kFirstStep>
  static TIDELOCK_INLINE void group_dots(Dots<R, 1>& dots, const std::int8_t* q, std::int64_t in,
                                         const std::byte* group) {
#if !defined(__AVX512F__)
    add_dots<kLargestCode<F>, kSubSteps>(
        dots, q + kFirstStep * 4, in, [&](auto step) __attribute__((always_inline)) {
          const Codes codes = unpack_step<F, kFirstStep + step>(group);
          if constexpr (kInHalves<F>) {
            return split(codes);
          } else {
            return codes;
          }
        });
#else
    repeat<kSubSteps>([&](auto i) __attribute__((always_inline)) {
      constexpr int kStep = kFirstStep + i;
      const Codes w{unpack_step<F, kStep>(group)};
      repeat<R>([&](auto r) __attribute__((always_inline)) {
        dots.v[r][0] = dot(w, load_four(q + r * in + kStep * 4), dots.v[r][0]);
      });
    });
#endif
  }

  // R rows of one panel. Panels one after the other are one stream of memory, which the processor sees coming; several
  // side by side are short streams that it does not (a fifth slower from memory).
  template <int R>
  static void few_rows(const MatmulJob& job, std::int64_t row, std::int64_t panel) {
    const std::int64_t in = job.in, segment_groups = in / job.segments / 32, groups = in / 32;
    const std::byte* chunk = job.w + static_cast<std::size_t>(panel) * panel_bytes(F, in);
    const std::int8_t* q = job.quantized.q + row * in;
    const float* ds = job.quantized.d + row * (in / kInputBlock);
    const std::int32_t* sums = job.quantized.sums + row * (in / 16);
    alignas(64) float total[R * kPanel];
    Accumulators<R, 1> acc;
    acc.zero();
    constexpr std::int64_t kPerChunk = kChunk / 32;
    std::int64_t left = segment_groups;  // of the segment
    for (std::int64_t g0 = 0; g0 < groups; g0 += kPerChunk, chunk += chunk_bytes(F, kChunk)) {
      const std::int64_t g1 = std::min(g0 + kPerChunk, groups);
      const std::byte* codes = chunk + codes_offset(F, (g1 - g0) * 32);
      const Shared shared = load_shared<F>(chunk);
      for (std::int64_t g = g0; g < g1; ++g, codes += kGroupBytes) {
        repeat<kSubsPerInput>([&](auto half) __attribute__((always_inline)) {
          const std::int64_t b = g * kSubsPerInput + half, in_chunk = (g - g0) * kSubsPerInput + half;
          Dots<R, 1> dots;
          repeat<R>([&](auto r) __attribute__((always_inline)) {
            dots.v[r][0] =
                set1_int(code_offset(F) == 0 ? 0 : -code_offset(F) * input_sum<kSub>(sums + r * (in / 16), b));
          });
          group_dots<R, half * kSubSteps>(dots, q + g * 32, in, codes);
          const V16 scale = load_scale<F>(shared, chunk, in_chunk);
          const V16 min = kMin ? load_min<F>(shared, chunk, in_chunk) : V16{};
          repeat<R>([&](auto r) __attribute__((always_inline)) {
            const std::int32_t sum = kMin ? input_sum<kSub>(sums + r * (in / 16), b) : 0;
            acc.v[r][0] = accumulate<kMin>(scale, min, ds[r * (in / kInputBlock) + g], sum, dots.v[r][0], acc.v[r][0]);
          });
        });
        if (--left != 0) continue;
        left = segment_groups;
        repeat<R>([&](auto r) __attribute__((always_inline)) {
          float* to = total + r * kPanel;
          store(to, g + 1 == segment_groups ? acc.v[r][0] : add(load(to), acc.v[r][0]));
        });
        acc.zero();
      }
    }
    write(job, total, kPanel, row, R, panel, 1);
  }
  using FewFunction = void (*)(const MatmulJob&, std::int64_t row, std::int64_t panel);
  static constexpr auto kFew = [] {  // [R - 1]
    std::array<FewFunction, kFewRows> tiles{};
    [&]<int... I>(std::integer_sequence<int, I...>) {
      ((tiles[I] = &few_rows<I + 1>), ...);
    }
    (std::make_integer_sequence<int, kFewRows>{});
    return tiles;
  }();
#endif

  static void run(const MatmulJob& job, std::int64_t row0, std::int64_t row1, std::int64_t panel0,
                  std::int64_t panel1) {
#if defined(__AVX2__)
    if (row1 - row0 <= kFewRows) {
      for (std::int64_t panel = panel0; panel < panel1; ++panel) kFew[row1 - row0 - 1](job, row0, panel);
      return;
    }
#endif
    thread_local const std::unique_ptr<BlockScratch> scratch = std::make_unique<BlockScratch>();
    for (std::int64_t panel = panel0; panel < panel1; panel += kBlockPanels)
      for (std::int64_t row = row0; row < row1; row += kRowGroup)
        many_rows(job, row, std::min(kRowGroup, row1 - row), panel,
                  std::min<std::int64_t>(kBlockPanels, panel1 - panel), *scratch);
  }
};

inline void run_blocks(const MatmulJob& job, std::int64_t row0, std::int64_t row1, std::int64_t panel0,
                       std::int64_t panel1) {
  switch (job.format) {
    case Format::q8_0:
      return Block<Format::q8_0>::run(job, row0, row1, panel0, panel1);
    case Format::q4_k:
      return Block<Format::q4_k>::run(job, row0, row1, panel0, panel1);
    case Format::q5_k:
      return Block<Format::q5_k>::run(job, row0, row1, panel0, panel1);
    case Format::q6_k:
      return Block<Format::q6_k>::run(job, row0, row1, panel0, panel1);
    case Format::mxfp4:
      return Block<Format::mxfp4>::run(job, row0, row1, panel0, panel1);
    case Format::q5_1:
      return Block<Format::q5_1>::run(job, row0, row1, panel0, panel1);
    case Format::f32:
    case Format::bf16:
      return;  // matmul.cpp sends those elsewhere
  }
}

// 16 lanes that hold integers of at most eight bits, as bytes; their sum.
inline std::int32_t store_bytes(std::int8_t* to, V16 a) {
#if defined(__AVX512F__)
  const __m512i v = _mm512_cvtps_epi32(a.v);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(v));
  return _mm512_reduce_add_epi32(v);
#else
  alignas(64) float x[16];
  store(x, a);
  std::int32_t sum = 0;
  for (int i = 0; i < 16; ++i) {
    to[i] = static_cast<std::int8_t>(x[i]);
    sum += to[i];
  }
  return sum;
#endif
}

inline float largest_lane(V16 a) {  // of lanes that are no NaN, or any
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(a.v);
#else
  return max_tree(a);
#endif
}

inline void quantize_rows(const bf16* x, std::int64_t ldx, std::int64_t in, std::int64_t row0, std::int64_t row1,
                          std::int8_t* q, float* d, std::int32_t* sums) {
  for (std::int64_t row = row0; row < row1; ++row) {
    for (std::int64_t k = 0; k < in; k += kInputBlock) {
      const V16 a = load(x + row * ldx + k), b = load(x + row * ldx + k + 16);
      const float largest = largest_lane(max(abs(a), abs(b)));
      const bool empty = !(largest >= kSmallestInput);
      const V16 inverse = set1(empty ? 0.0F : 127.0F / largest);
      const auto whole = [&](V16 v) {  // held to the range whatever v is: min and max pass the second on for NaN
        return max(min(round_int(mul(v, inverse)), set1(127)), set1(-127));
      };
      const std::int64_t at = row * in + k;
      d[at / kInputBlock] = empty ? 0.0F : largest / 127.0F;
      sums[at / 16] = store_bytes(q + at, whole(a));
      sums[at / 16 + 1] = store_bytes(q + at + 16, whole(b));
    }
  }
}

}  // namespace tidelock::numerics::TIDELOCK_ISA_NAMESPACE

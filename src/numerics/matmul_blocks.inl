// The matrix kernels of the block formats (quant.hpp), compiled once per instruction set.
//
// Packed weights come in chunks of up to 256 k. A chunk's codes are unpacked to bf16 pairs, and a sub-block's chain
// over them goes into the accumulator with the sub-block's scale (matmul.hpp states the order). Two ways lead to the
// same bits: with few rows the codes are unpacked in registers, for every tile again; with many they are unpacked once
// into a buffer that stays in the first-level cache, and all rows pass over it.
#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "numerics/matmul_core.inl"
#include "numerics/quant.hpp"

namespace tidelock::numerics::TIDELOCK_ISA_NAMESPACE {

#if defined(__AVX512F__)
inline constexpr int kBlockRows = 8, kBlockPanels = 3;
#elif defined(__AVX2__)
inline constexpr int kBlockRows = 6, kBlockPanels = 1;
#else
inline constexpr int kBlockRows = 1, kBlockPanels = 1;
#endif
inline constexpr std::int64_t kRowGroup = 128;  // rows that pass over a chunk while it is unpacked
inline constexpr int kMaxSubBlocks = 16;        // of a chunk

inline V16 load_f16(const std::byte* from) {
#if defined(__AVX512F__)
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
#elif defined(__AVX2__)
  const auto* halves = reinterpret_cast<const __m128i*>(from);
  return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
#else
  return lanes([&](int i) {
    std::uint16_t bits;
    std::memcpy(&bits, from + 2 * i, 2);
    return f16_to_float(bits);
  });
#endif
}

// 16 bytes as numbers.
template <typename Byte>
inline V16 load_bytes(const std::byte* from) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return {_mm512_cvtepi32_ps(std::is_signed_v<Byte> ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes))};
#else
  alignas(64) float x[16];
  for (int i = 0; i < 16; ++i) x[i] = static_cast<float>(static_cast<Byte>(from[i]));
  return load(x);
#endif
}

// 2^(e - 127) for bytes e; zero for e = 0.
inline V16 load_exponents(const std::byte* from) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23))};
#else
  alignas(64) float x[16];
  for (int i = 0; i < 16; ++i) x[i] = std::bit_cast<float>(std::to_integer<std::uint32_t>(from[i]) << 23);
  return load(x);
#endif
}

// Scales and minima of 16 outputs for sub-block b of a chunk (layout: matmul_kernels.hpp). The products are exact.
template <Format F>
inline V16 load_scale(const std::byte* chunk, std::int64_t b) {
  if constexpr (F == Format::q8_0) return load_f16(chunk + b * 32);
  if constexpr (F == Format::mxfp4) return load_exponents(chunk + b * 16);
  if constexpr (F == Format::q6_k) return mul(load_f16(chunk), load_bytes<std::int8_t>(chunk + 32 + b * 16));
  return mul(load_f16(chunk), load_bytes<std::uint8_t>(chunk + 64 + b * 16));
}
template <Format F>
inline V16 load_min(const std::byte* chunk, std::int64_t b) {
  return mul(load_f16(chunk + 32), load_bytes<std::uint8_t>(chunk + 192 + b * 16));
}

// bf16 bits of the 16 codes that a nibble stands for.
template <Format F>
inline constexpr std::array<std::uint16_t, 16> kNibbles = [] {
  std::array<std::uint16_t, 16> table{};
  for (unsigned i = 0; i < 16; ++i) {
    const float e2m1[8] = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
    const float value = F == Format::mxfp4 ? (i < 8 ? e2m1[i] : -e2m1[i - 8]) : static_cast<float>(i);
    table[i] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
  }
  return table;
}();

#if defined(__AVX512F__)
struct CodeVector {  // a pair of codes in each 32-bit lane, the even element in the low half
  __m512i v;
};
// Bytes: 16 even elements, then 16 odd ones. A number of eight bits has an empty lower half as float32.
TIDELOCK_INLINE CodeVector unpack_bytes(const std::byte* from) {
  const auto* halves = reinterpret_cast<const __m128i*>(from);
  const __m512 even = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(halves)));
  const __m512 odd = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(halves + 1)));
  return {_mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even), 16), _mm512_castps_si512(odd))};
}
// The table twice: vpermw looks at five bits, of which the fifth belongs to the next nibble.
template <Format F>
TIDELOCK_INLINE __m512i nibble_table() {
  alignas(64) std::uint16_t twice[32];
  for (int i = 0; i < 32; ++i) twice[i] = kNibbles<F>[static_cast<std::size_t>(i % 16)];
  return _mm512_load_si512(twice);
}
template <int kStep>
TIDELOCK_INLINE CodeVector unpack_nibbles(__m512i words, __m512i table) {
  return {_mm512_permutexvar_epi16(kStep == 0 ? words : _mm512_srli_epi16(words, 4 * kStep), table)};
}
#endif

// Codes of `count` k (a multiple of 16) as bf16 pairs, [count / 2][16][2].
template <Format F>
void unpack_chunk(const std::byte* codes, std::int64_t count, bf16* to) {
#if defined(__AVX512F__)
  auto* out = reinterpret_cast<std::uint32_t*>(to);
  if constexpr (code_bits(F) == 8) {
    for (std::int64_t step = 0; step < count / 2; ++step)
      _mm512_storeu_si512(out + step * kPanel, unpack_bytes(codes + step * 32).v);
  } else {
    const __m512i table = nibble_table<F>();
    for (std::int64_t word = 0; word < count / 8; ++word) {
      const __m512i v = _mm512_loadu_si512(codes + word * 64);
      repeat<4>([&](auto i) __attribute__((always_inline)) {
        _mm512_storeu_si512(out + (word * 4 + i) * kPanel, unpack_nibbles<i>(v, table).v);
      });
    }
  }
#else
  for (std::int64_t step = 0; step < count / 2; ++step) {
    for (int i = 0; i < 32; ++i) {
      const int o = i / 2, odd = i % 2;
      if constexpr (code_bits(F) == 8) {
        const auto code = static_cast<std::int8_t>(codes[step * 32 + odd * 16 + o]);
        to[step * 32 + i].bits =
            static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(static_cast<float>(code)) >> 16);
      } else {
        std::uint32_t word;
        std::memcpy(&word, codes + step / 4 * 64 + o * 4, 4);
        to[step * 32 + i].bits = kNibbles<F>[word >> (odd * 16 + step % 4 * 4) & 15U];
      }
    }
  }
#endif
}

// Sums of x over every sub-block, which the minima multiply: 16 strided partial sums and the fixed tree.
inline float sub_block_sum(const bf16* x) {
  return sum_tree(add(load(x), load(x + 16)));
}

// Where the sub-blocks of one job's rows lie, and the buffers of the thread that works on them.
struct BlockScratch {
  alignas(64) std::array<bf16, kBlockPanels * kChunk * kPanel> codes;
  alignas(64) std::array<float, kBlockPanels * kMaxSubBlocks * kPanel> scales, mins;
  alignas(64) std::array<float, kRowGroup * kBlockPanels * kPanel> acc, total;
  std::vector<float> sums;  // [rows, in / sub-block]
};

template <Format F>
struct Block {
  static constexpr std::int64_t kSub = F == Format::q6_k ? 16 : 32;
  static constexpr bool kMin = F == Format::q4_k || F == Format::q5_k;
  static constexpr std::int64_t kAccStride = kBlockPanels * kPanel;

  struct Tile {
    const bf16* x;  // the tile's first row, at the first sub-block
    std::int64_t ldx;
    const bf16* codes;                  // at the first sub-block; panels are kChunk * kPanel apart
    const float *scales, *mins, *sums;  // likewise; panels are kMaxSubBlocks * kPanel apart, rows of sums lds
    std::int64_t lds;
    std::int64_t blocks;
    float* acc;
  };

  template <int R, int P>
  static void tile(const Tile& t) {
    for (std::int64_t b = 0; b < t.blocks; ++b) {
      Accumulators<R, P> chain;
      chain.zero();
      KernelBf16::run<R, P>(chain, t.x + b * kSub, t.ldx,
                            reinterpret_cast<const std::byte*>(t.codes + b * kSub * kPanel), kChunk * kPanel * 2, kSub);
      repeat<R>([&](auto r) __attribute__((always_inline)) {
        repeat<P>([&](auto p) __attribute__((always_inline)) {
          float* acc = t.acc + r * kAccStride + p * kPanel;
          const std::int64_t at = (p * kMaxSubBlocks + b) * kPanel;
          V16 sum = fma(load(t.scales + at), chain.v[r][p], load(acc));
          if constexpr (kMin) sum = fnma(load(t.mins + at), set1(t.sums[r * t.lds + b]), sum);
          store(acc, sum);
        });
      });
    }
  }
  using TileFunction = void (*)(const Tile&);
  static constexpr auto kTiles = [] {  // [R - 1][P - 1]
    std::array<std::array<TileFunction, kBlockPanels>, kBlockRows> tiles{};
    [&]<int... I>(std::integer_sequence<int, I...>) {
      ((tiles[I / kBlockPanels][I % kBlockPanels] = &tile<I / kBlockPanels + 1, I % kBlockPanels + 1>), ...);
    }
    (std::make_integer_sequence<int, kBlockRows * kBlockPanels>{});
    return tiles;
  }();

  static void unpack(const MatmulJob& job, std::int64_t panel, std::int64_t panels, std::int64_t chunk,
                     std::int64_t count, BlockScratch& s) {
    for (std::int64_t p = 0; p < panels; ++p) {
      const std::byte* from = job.w + static_cast<std::size_t>(panel + p) * panel_bytes(F, job.in) +
                              static_cast<std::size_t>(chunk) * chunk_bytes(F, kChunk);
      unpack_chunk<F>(from + codes_offset(F, count), count, s.codes.data() + p * kChunk * kPanel);
      for (std::int64_t b = 0; b < count / kSub; ++b) {
        store(s.scales.data() + (p * kMaxSubBlocks + b) * kPanel, load_scale<F>(from, b));
        if constexpr (kMin) store(s.mins.data() + (p * kMaxSubBlocks + b) * kPanel, load_min<F>(from, b));
      }
    }
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
                        std::int64_t panels, const float* sums, BlockScratch& s) {
    const std::int64_t segment = job.in / job.segments;
    const auto* x = static_cast<const bf16*>(job.x) + row * job.ldx;
    const std::int64_t lds = job.in / kSub;
    std::fill_n(s.acc.data(), rows * kAccStride, 0.0F);
    for (std::int64_t k0 = 0; k0 < job.in; k0 += kChunk) {
      const std::int64_t count = std::min<std::int64_t>(kChunk, job.in - k0);
      unpack(job, panel, panels, k0 / kChunk, count, s);
      for (std::int64_t k = k0; k < k0 + count;) {
        const std::int64_t stop = std::min((k / segment + 1) * segment, k0 + count);
        const std::int64_t at = (k - k0) / kSub;
        for (std::int64_t r = 0; r < rows; r += kBlockRows) {
          const std::int64_t tile_rows = std::min<std::int64_t>(kBlockRows, rows - r);
          kTiles[tile_rows - 1][panels - 1]({x + r * job.ldx + k, job.ldx, s.codes.data() + (k - k0) * kPanel,
                                             s.scales.data() + at * kPanel, s.mins.data() + at * kPanel,
                                             kMin ? sums + r * lds + k / kSub : nullptr, lds, (stop - k) / kSub,
                                             s.acc.data() + r * kAccStride});
        }
        if (job.segments > 1 && stop % segment == 0) close_segment(s, rows, stop == segment);
        k = stop;
      }
    }
    write(job, job.segments > 1 ? s.total.data() : s.acc.data(), kAccStride, row, rows, panel, panels);
  }

#if defined(__AVX512BF16__)
  static constexpr int kFewRows = 4, kFewPanels = 4;

  // One sub-block's chain with codes unpacked in registers.
  template <int R, int P>
  static TIDELOCK_INLINE void chain(Accumulators<R, P>& acc, const bf16* x, std::int64_t ldx, const std::byte* codes,
                                    std::size_t panel_stride, __m512i table) {
    const auto multiply = [&](int k, CodeVector(&w)[P]) __attribute__((always_inline)) {
      repeat<R>([&](auto r) __attribute__((always_inline)) {
        std::uint32_t pair;
        std::memcpy(&pair, x + r * ldx + k, 4);
        const auto xv = KernelBf16::broadcast(pair);
        repeat<P>([&](auto p)
                      __attribute__((always_inline)) { acc.v[r][p] = KernelBf16::dot(xv, {w[p].v}, acc.v[r][p]); });
      });
    };
    CodeVector w[P];
    if constexpr (code_bits(F) == 8) {
      for (int step = 0; step < kSub / 2; ++step) {
        repeat<P>([&](auto p)
                      __attribute__((always_inline)) { w[p] = unpack_bytes(codes + p * panel_stride + step * 32); });
        multiply(step * 2, w);
      }
    } else {
      for (int word = 0; word < kSub / 8; ++word) {
        __m512i v[P];
        repeat<P>([&](auto p) __attribute__((always_inline)) {
          v[p] = _mm512_loadu_si512(codes + p * panel_stride + word * 64);
        });
        repeat<4>([&](auto i) __attribute__((always_inline)) {
          repeat<P>([&](auto p) __attribute__((always_inline)) { w[p] = unpack_nibbles<i>(v[p], table); });
          multiply(word * 8 + 2 * i, w);
        });
      }
    }
  }

  template <int R, int P>
  static void few_rows(const MatmulJob& job, std::int64_t row, std::int64_t panel, const float* sums) {
    const std::int64_t segment_blocks = job.in / job.segments / kSub, blocks = job.in / kSub;
    const std::size_t stride = panel_bytes(F, job.in);
    const std::byte* w = job.w + static_cast<std::size_t>(panel) * stride;
    const auto* x = static_cast<const bf16*>(job.x) + row * job.ldx;
    __m512i table{};
    if constexpr (code_bits(F) == 4) table = nibble_table<F>();
    alignas(64) float total[R * P * kPanel];
    Accumulators<R, P> acc;
    acc.zero();
    for (std::int64_t b = 0; b < blocks; ++b) {
      constexpr std::int64_t kPerChunk = kChunk / kSub;
      const std::byte* chunk = w + static_cast<std::size_t>(b / kPerChunk) * chunk_bytes(F, kChunk);
      const std::int64_t count = std::min<std::int64_t>(kChunk, job.in - b / kPerChunk * kChunk),
                         in_chunk = b % kPerChunk;
      Accumulators<R, P> part;
      part.zero();
      chain(part, x + b * kSub, job.ldx,
            chunk + codes_offset(F, count) + static_cast<std::size_t>(in_chunk * kSub * kPanel * code_bits(F) / 8),
            stride, table);
      repeat<P>([&](auto p) __attribute__((always_inline)) {
        const V16 scale = load_scale<F>(chunk + p * stride, in_chunk);
        repeat<R>([&](auto r) __attribute__((always_inline)) {
          acc.v[r][p] = fma(scale, part.v[r][p], acc.v[r][p]);
          if constexpr (kMin)
            acc.v[r][p] = fnma(load_min<F>(chunk + p * stride, in_chunk), set1(sums[r * blocks + b]), acc.v[r][p]);
        });
      });
      if ((b + 1) % segment_blocks != 0) continue;
      repeat<R>([&](auto r) __attribute__((always_inline)) {
        repeat<P>([&](auto p) __attribute__((always_inline)) {
          float* to = total + (r * P + p) * kPanel;
          store(to, b + 1 == segment_blocks ? acc.v[r][p] : add(load(to), acc.v[r][p]));
        });
      });
      acc.zero();
    }
    write(job, total, P * kPanel, row, R, panel, P);
  }
  using FewFunction = void (*)(const MatmulJob&, std::int64_t row, std::int64_t panel, const float* sums);
  static constexpr auto kFew = [] {  // [R - 1][P - 1]
    std::array<std::array<FewFunction, kFewPanels>, kFewRows> tiles{};
    [&]<int... I>(std::integer_sequence<int, I...>) {
      ((tiles[I / kFewPanels][I % kFewPanels] = &few_rows<I / kFewPanels + 1, I % kFewPanels + 1>), ...);
    }
    (std::make_integer_sequence<int, kFewRows * kFewPanels>{});
    return tiles;
  }();
#endif

  static void run(const MatmulJob& job, std::int64_t row0, std::int64_t row1, std::int64_t panel0,
                  std::int64_t panel1) {
    thread_local const std::unique_ptr<BlockScratch> scratch = std::make_unique<BlockScratch>();
    BlockScratch& s = *scratch;
    const std::int64_t subs = job.in / kSub;
    if constexpr (kMin) {
      s.sums.resize(static_cast<std::size_t>((row1 - row0) * subs));
      for (std::int64_t r = row0; r < row1; ++r)
        for (std::int64_t b = 0; b < subs; ++b)
          s.sums[static_cast<std::size_t>((r - row0) * subs + b)] =
              sub_block_sum(static_cast<const bf16*>(job.x) + r * job.ldx + b * kSub);
    }
#if defined(__AVX512BF16__)
    if (row1 - row0 <= kFewRows) {
      for (std::int64_t panel = panel0; panel < panel1; panel += kFewPanels) {
        const std::int64_t panels = std::min<std::int64_t>(kFewPanels, panel1 - panel);
        kFew[row1 - row0 - 1][panels - 1](job, row0, panel, s.sums.data());
      }
      return;
    }
#endif
    for (std::int64_t panel = panel0; panel < panel1; panel += kBlockPanels)
      for (std::int64_t row = row0; row < row1; row += kRowGroup)
        many_rows(job, row, std::min(kRowGroup, row1 - row), panel,
                  std::min<std::int64_t>(kBlockPanels, panel1 - panel), s.sums.data() + (row - row0) * subs, s);
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
    case Format::f32:
    case Format::bf16:
      return;  // matmul.cpp sends those elsewhere
  }
}

}  // namespace tidelock::numerics::TIDELOCK_ISA_NAMESPACE

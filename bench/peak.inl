// Compiled once per instruction set by peak_<isa>.cpp.
#include "numerics/matmul_kernels.inl"
#include "peak.hpp"

namespace tidelock::bench::TIDELOCK_ISA_NAMESPACE {

namespace isa_kernels = numerics::TIDELOCK_ISA_NAMESPACE;
using isa_kernels::KernelBf16;
using isa_kernels::repeat;
using isa_kernels::V16;

#if defined(__AVX512F__)
inline constexpr int kChains = 24;
#else
inline constexpr int kChains = 6;  // of two registers each
#endif

// Keeps a value alive without storing it in the loop.
template <typename T>
TIDELOCK_INLINE void keep(T& value) {
#if defined(__AVX512F__)
  asm volatile("" : "+v"(value.v));
#else
  asm volatile("" : "+x"(value.lo), "+x"(value.hi));
#endif
}

inline double fma_peak(std::int64_t steps) {
  V16 acc[kChains], a = isa_kernels::set1(0.5F), b = isa_kernels::set1(0.25F);
  keep(a);
  keep(b);
  repeat<kChains>([&](auto c) __attribute__((always_inline)) {
    acc[c] = isa_kernels::set1(0.0F);
    keep(acc[c]);  // or the compiler sees that all chains are the same one
  });
  for (std::int64_t s = 0; s < steps; ++s)
    repeat<kChains>([&](auto c) __attribute__((always_inline)) { acc[c] = isa_kernels::fma(a, b, acc[c]); });
  repeat<kChains>([&](auto c) __attribute__((always_inline)) { keep(acc[c]); });
  return 2.0 * 16 * kChains * static_cast<double>(steps);
}

inline double dot_peak(std::int64_t steps) {
  V16 acc[kChains];
  auto a = KernelBf16::broadcast(0x3F003F00U), b = KernelBf16::broadcast(0x3E803E80U);
#if defined(__AVX512BF16__)
  asm volatile("" : "+v"(a.v), "+v"(b.v));
#else
  keep(a.even);
  keep(a.odd);
  keep(b.even);
  keep(b.odd);
#endif
  repeat<kChains>([&](auto c) __attribute__((always_inline)) {
    acc[c] = isa_kernels::set1(0.0F);
    keep(acc[c]);  // or the compiler sees that all chains are the same one
  });
  for (std::int64_t s = 0; s < steps; ++s)
    repeat<kChains>([&](auto c) __attribute__((always_inline)) { acc[c] = KernelBf16::dot(a, b, acc[c]); });
  repeat<kChains>([&](auto c) __attribute__((always_inline)) { keep(acc[c]); });
  return 4.0 * 16 * kChains * static_cast<double>(steps);
}

// Eight streams, each one as far ahead of the processor as its own prefetcher can see.
inline std::uint64_t read_all(const std::byte* data, std::size_t bytes) {
  constexpr int kStreams = 8;
  const std::size_t part = bytes / kStreams / 64 * 64;
  __m256i sum[kStreams];
  for (auto& s : sum) s = _mm256_setzero_si256();
  for (std::size_t i = 0; i < part; i += 64) {
    repeat<kStreams>([&](auto s) __attribute__((always_inline)) {
      const auto* p = reinterpret_cast<const __m256i*>(data + s * part + i);
      sum[s] = _mm256_xor_si256(sum[s], _mm256_xor_si256(_mm256_loadu_si256(p), _mm256_loadu_si256(p + 1)));
    });
  }
  for (int s = 1; s < kStreams; ++s) sum[0] = _mm256_xor_si256(sum[0], sum[s]);
  return static_cast<std::uint64_t>(_mm256_extract_epi64(sum[0], 0) ^ _mm256_extract_epi64(sum[0], 1) ^
                                    _mm256_extract_epi64(sum[0], 2) ^ _mm256_extract_epi64(sum[0], 3));
}

template <int R, int P, int C>
void split_tile(const numerics::MatmulJob& job, std::int64_t row, std::int64_t panel) {
  const std::int64_t panel_bytes = KernelBf16::steps(job.in) * numerics::kPanel * 4;
  const auto* x = static_cast<const numerics::bf16*>(job.x) + row * job.ldx;
  const auto* w = reinterpret_cast<const std::uint32_t*>(job.w + panel * panel_bytes);
  isa_kernels::Accumulators<R, P> acc[C];
  repeat<C>([&](auto c) __attribute__((always_inline)) { acc[c].zero(); });
  for (std::int64_t k = 0; k + 2 * C <= job.in; k += 2 * C, w += C * numerics::kPanel) {
    repeat<C>([&](auto c) __attribute__((always_inline)) {
      std::uint32_t pair[R];
      repeat<R>([&](auto r) __attribute__((always_inline)) { std::memcpy(&pair[r], x + r * job.ldx + k + 2 * c, 4); });
      KernelBf16::step<R, P>(acc[c], pair, w + c * numerics::kPanel, panel_bytes / 4);
    });
  }
  repeat<R>([&](auto r) __attribute__((always_inline)) {
    repeat<P>([&](auto p) __attribute__((always_inline)) {
      V16 sum = acc[0].v[r][p];
      repeat<C - 1>([&](auto c) __attribute__((always_inline)) { sum = isa_kernels::add(sum, acc[c + 1].v[r][p]); });
      isa_kernels::store(job.y + (row + r) * job.ldy + (panel + p) * numerics::kPanel, sum);
    });
  });
}

// rows must be a multiple of R; a rest of panels is done one by one.
template <int R, int P, int C>
void split(const numerics::MatmulJob& job, std::int64_t rows, std::int64_t panel0, std::int64_t panel1) {
  std::int64_t panel = panel0;
  for (; panel + P <= panel1; panel += P)
    for (std::int64_t row = 0; row + R <= rows; row += R) split_tile<R, P, C>(job, row, panel);
  for (; panel < panel1; ++panel)
    for (std::int64_t row = 0; row + R <= rows; row += R) split_tile<R, 1, C>(job, row, panel);
}

template <int R, int P, int C>
constexpr Peak::Split shape{R, &split<R, P, C>};

}  // namespace tidelock::bench::TIDELOCK_ISA_NAMESPACE

// Further arguments: shape<rows, panels, chains>.
// constinit: code that ran before main() would run on processors without these instructions, too.
#define TIDELOCK_PEAK(name, ...)                                                                               \
  constinit const Peak name {                                                                                  \
    &TIDELOCK_ISA_NAMESPACE::fma_peak, &TIDELOCK_ISA_NAMESPACE::dot_peak, &TIDELOCK_ISA_NAMESPACE::read_all, { \
      { __VA_ARGS__ }                                                                                          \
    }                                                                                                          \
  }

// The forward row operations: every instruction set equals the plain-loop reference by bits, over odd sizes, tails and
// special values; a row does not depend on its batch; and a reference with another order is told apart.
#include <algorithm>
#include <functional>

#include "numerics/rowops_support.hpp"

namespace tidelock::numerics::testing {
namespace rowops_test {

using Fill = Floats (*)(Random&, Index);
Floats ordinary(Random& random, Index n) {
  return normals(random, n, 2.0F);
}

void append(Floats& all, const Floats& more) {
  all.insert(all.end(), more.begin(), more.end());
}

// Each case runs one operation of a table on inputs drawn from `seed` and returns everything that it wrote.
struct Case {
  const char* name;
  Floats (*run)(const RowKernels& ops, Index dim, std::uint64_t seed, Fill fill);
};

Floats run_round(const RowKernels& ops, Index dim, std::uint64_t seed, Fill fill) {
  Random random(seed);
  Floats x = fill(random, 3 * dim);
  std::vector<bf16> out(x.size());
  ops.round_to_bf16(x.data(), 3 * dim, out.data());
  for (const bf16 b : out) x.push_back(static_cast<float>(b.bits));
  return x;
}

Floats run_rms_norm(const RowKernels& ops, Index dim, std::uint64_t seed, Fill fill) {
  Random random(seed);
  const Floats x = fill(random, 3 * dim);
  const Floats w = fill(random, dim);
  Floats y(x.size());
  Floats inv(3);
  ops.rms_norm(x.data(), w.data(), 3, dim, 1e-5F, y.data(), inv.data());
  append(y, inv);
  return y;
}

Floats run_layer_norm(const RowKernels& ops, Index dim, std::uint64_t seed, Fill fill) {
  Random random(seed);
  const Floats x = fill(random, 3 * dim);
  const Floats w = fill(random, dim);
  const Floats b = fill(random, dim);
  Floats y(x.size());
  Floats stats(6);
  ops.layer_norm(x.data(), w.data(), b.data(), 3, dim, 1e-6F, y.data(), stats.data());
  append(y, stats);
  return y;
}

Floats run_l2_norm(const RowKernels& ops, Index dim, std::uint64_t seed, Fill fill) {
  Random random(seed);
  const Floats x = fill(random, 3 * dim);
  Floats y(x.size());
  Floats inv(3);
  ops.l2_norm(x.data(), 3, dim, 1e-6F, 0.0883883461F, y.data(), inv.data());
  append(y, inv);
  return y;
}

Floats run_silu(const RowKernels& ops, Index dim, std::uint64_t seed, Fill fill) {
  Random random(seed);
  const Floats gate = fill(random, dim);
  const Floats up = fill(random, dim);
  Floats y(gate.size());
  ops.silu_glu(gate.data(), up.data(), dim, y.data());
  return y;
}

Floats run_situ(const RowKernels& ops, Index dim, std::uint64_t seed, Fill fill) {
  Random random(seed);
  const Floats gate = fill(random, dim);
  const Floats up = fill(random, dim);
  Floats y(gate.size());
  ops.situ_glu(gate.data(), up.data(), dim, 4.0F, 25.0F, y.data());
  return y;
}

Floats run_sigmoid(const RowKernels& ops, Index dim, std::uint64_t seed, Fill fill) {
  Random random(seed);
  const Floats x = fill(random, dim);
  const Floats gate = fill(random, dim);
  Floats y(x.size());
  Floats gated(x.size());
  ops.sigmoid_rows(x.data(), dim, y.data());
  ops.sigmoid_gate(x.data(), gate.data(), dim, gated.data());
  append(y, gated);
  return y;
}

Floats run_axpy(const RowKernels& ops, Index dim, std::uint64_t seed, Fill fill) {
  Random random(seed);
  const Floats x = fill(random, dim);
  Floats y = fill(random, dim);
  ops.axpy(0.37F, x.data(), dim, y.data());
  return y;
}

Floats run_conv(const RowKernels& ops, Index dim, std::uint64_t seed, Fill fill) {
  Random random(seed);
  const Index rows = 1 + static_cast<Index>(random.below(7));
  const Floats z = fill(random, rows * dim);
  const Floats w = fill(random, 4 * dim);
  Floats tail = fill(random, 3 * dim);
  Floats u(z.size());
  Floats y(z.size());
  ops.causal_conv(z.data(), w.data(), rows, dim, tail.data(), u.data(), y.data());
  append(y, u);
  append(y, tail);
  return y;
}

Floats run_gate(const RowKernels& ops, Index dim, std::uint64_t seed, Fill fill) {
  Random random(seed);
  const Floats raw = fill(random, 3 * 2 * dim);
  const Floats bias = fill(random, 2 * dim);
  const Floats a_log = fill(random, 2);
  Floats bounded(raw.size());
  Floats unbounded(raw.size());
  ops.kda_gate({2, dim, true, -5.0F}, raw.data(), bias.data(), a_log.data(), 3, bounded.data());
  ops.kda_gate({2, dim, false, 0.0F}, raw.data(), bias.data(), a_log.data(), 3, unbounded.data());
  append(bounded, unbounded);
  return bounded;
}

// Logits on a coarse grid, so that ties are frequent. `dim` is the number of experts.
Floats run_route(const RowKernels& ops, Index dim, std::uint64_t seed, Fill fill) {
  Random random(seed);
  const Index experts = std::min<Index>(dim, 1024);
  Floats logits = fill(random, 3 * experts);
  Floats bias = fill(random, experts);
  for (float& x : logits) x = std::round(x * 2.0F) / 2.0F;
  for (float& x : bias) x = std::round(x);
  Floats result;
  for (const bool renormalize : {true, false}) {
    const Index top_k = std::min<Index>(experts, renormalize ? 3 : 16);
    std::vector<std::int32_t> ids(static_cast<std::size_t>(3 * top_k));
    Floats weights(ids.size());
    ops.route({experts, top_k, renormalize, 2.5F}, logits.data(), bias.data(), 3, ids.data(), weights.data());
    append(result, weights);
    for (const std::int32_t id : ids) result.push_back(static_cast<float>(id));
  }
  return result;
}

Floats run_block_mix(const RowKernels& ops, Index dim, std::uint64_t seed, Fill fill) {
  Random random(seed);
  const int n_sources = random.between(1, 32);
  std::vector<Floats> values;
  std::vector<const float*> sources;
  values.reserve(32);
  sources.reserve(32);
  for (int s = 0; s < n_sources; ++s) {
    values.push_back(fill(random, 2 * dim));
    sources.push_back(values.back().data());
  }
  const Floats w = fill(random, dim);
  Floats out(static_cast<std::size_t>(2 * dim));
  Floats probs(static_cast<std::size_t>(2 * n_sources));
  ops.block_mix(sources.data(), n_sources, w.data(), 2, dim, 1e-5F, out.data(), probs.data());
  append(out, probs);
  return out;
}

Floats run_softmax(const RowKernels& ops, Index dim, std::uint64_t seed, Fill fill) {
  Random random(seed);
  const Floats x = fill(random, dim);
  Floats d = fill(random, dim);
  const float lse = ops.log_sum_exp(x.data(), dim);
  ops.softmax_accumulate(x.data(), dim, std::isfinite(lse) ? lse : 1.0F, -0.3F, d.data());
  d.push_back(lse);
  return d;
}

const Case kCases[] = {{"round_to_bf16", run_round}, {"rms_norm", run_rms_norm}, {"layer_norm", run_layer_norm},
                       {"l2_norm", run_l2_norm},     {"silu_glu", run_silu},     {"situ_glu", run_situ},
                       {"sigmoid", run_sigmoid},     {"axpy", run_axpy},         {"causal_conv", run_conv},
                       {"kda_gate", run_gate},       {"route", run_route},       {"block_mix", run_block_mix},
                       {"softmax", run_softmax}};

std::vector<Index> sizes() {
  std::vector<Index> result;
  for (Index dim = 1; dim <= 70; ++dim) result.push_back(dim);
  for (const Index dim : {127, 128, 129, 896, 1024, 2304}) result.push_back(dim);
  return result;
}

// The number of (size, kind of input) pairs over which two tables differ in a case.
int differences(const Case& test, const RowKernels& a, const RowKernels& b) {
  int count = 0;
  for (const Index dim : sizes())
    for (const Fill fill : {Fill{ordinary}, Fill{specials}}) {
      const std::uint64_t seed = static_cast<std::uint64_t>(dim) * 7 + 1;
      count += first_difference(test.run(a, dim, seed, fill), test.run(b, dim, seed, fill)) >= 0 ? 1 : 0;
    }
  return count;
}

TEST_F(RowOps, EveryInstructionSetEqualsTheReference) {
  const RowKernels reference = reference_table();
  const RowKernels ours = public_table();
  for (const Isa isa : available_isas()) {
    force_isa(isa);
    for (const Case& test : kCases)
      EXPECT_EQ(differences(test, ours, reference), 0) << test.name << ' ' << isa_name(isa);
  }
}

TEST_F(RowOps, TheForcedInstructionSetRuns) {
  const auto table_of = [](Isa isa) -> const RowKernels* {
    force_isa(isa);
    return &row_kernels();
  };
  EXPECT_EQ(table_of(Isa::scalar), &row_kernels_scalar());
  EXPECT_STREQ(row_kernels().name, "scalar");
  if (isa_available(Isa::avx2)) {
    EXPECT_EQ(table_of(Isa::avx2), &row_kernels_avx2());
    EXPECT_STREQ(row_kernels().name, "avx2");
    EXPECT_NE(row_kernels_avx2().rms_norm, row_kernels_scalar().rms_norm);
  }
  if (isa_available(Isa::avx512)) {
    EXPECT_EQ(table_of(Isa::avx512), &row_kernels_avx512());
    EXPECT_STREQ(row_kernels().name, "avx512");
    EXPECT_NE(row_kernels_avx512().rms_norm, row_kernels_avx2().rms_norm);
  }
  if (isa_available(Isa::avx512bf16)) {
    EXPECT_EQ(table_of(Isa::avx512bf16), &row_kernels_avx512());
  }
}

// ---- a row does not depend on its batch

TEST_F(RowOps, SoloRowsEqualBatchedRows) {
  constexpr Index rows = 9;
  Random random(11);
  for (const Isa isa : available_isas()) {
    force_isa(isa);
    for (const Index dim : {5, 16, 37, 128}) {
      const Floats x = normals(random, rows * dim);
      const Floats w = normals(random, dim);
      const RouterShape shape{dim, 4, true, 1.0F};
      Floats batch(x.size());
      Floats solo(x.size());
      std::vector<std::int32_t> ids(rows * 4);
      std::vector<std::int32_t> solo_ids(ids.size());
      Floats weights(ids.size());
      Floats solo_weights(ids.size());
      rms_norm(x.data(), w.data(), rows, dim, 1e-5F, batch.data(), nullptr);
      route(shape, x.data(), w.data(), rows, ids.data(), weights.data());
      for (Index r = rows - 1; r >= 0; --r) {
        rms_norm(x.data() + r * dim, w.data(), 1, dim, 1e-5F, solo.data() + r * dim, nullptr);
        route(shape, x.data() + r * dim, w.data(), 1, solo_ids.data() + r * 4, solo_weights.data() + r * 4);
      }
      EXPECT_EQ(first_difference(batch, solo), -1);
      EXPECT_EQ(ids, solo_ids);
      EXPECT_EQ(first_difference(weights, solo_weights), -1);
      layer_norm(x.data(), w.data(), w.data(), rows, dim, 1e-5F, batch.data(), nullptr);
      for (Index r = 0; r < rows; ++r)
        layer_norm(x.data() + r * dim, w.data(), w.data(), 1, dim, 1e-5F, solo.data() + r * dim, nullptr);
      EXPECT_EQ(first_difference(batch, solo), -1);
      const float* sources[] = {x.data(), batch.data()};
      Floats mixed(x.size());
      Floats mixed_solo(x.size());
      block_mix(sources, 2, w.data(), rows, dim, 1e-5F, mixed.data(), nullptr);
      for (Index r = 0; r < rows; ++r) {
        const float* row[] = {x.data() + r * dim, batch.data() + r * dim};
        block_mix(row, 2, w.data(), 1, dim, 1e-5F, mixed_solo.data() + r * dim, nullptr);
      }
      EXPECT_EQ(first_difference(mixed, mixed_solo), -1);
    }
  }
}

TEST_F(RowOps, ConvolutionSplitAnywhereIsWhole) {
  constexpr Index rows = 7;
  constexpr Index channels = 21;
  Random random(12);
  const Floats z = normals(random, rows * channels);
  const Floats w = normals(random, 4 * channels);
  const Floats tail = normals(random, 3 * channels);
  Floats whole(z.size());
  Floats whole_tail = tail;
  causal_conv(z.data(), w.data(), rows, channels, whole_tail.data(), nullptr, whole.data());
  for (Index split = 0; split <= rows; ++split) {
    Floats part(z.size());
    Floats part_tail = tail;
    causal_conv(z.data(), w.data(), split, channels, part_tail.data(), nullptr, part.data());
    const Index at = split * channels;
    causal_conv(z.data() + at, w.data(), rows - split, channels, part_tail.data(), nullptr, part.data() + at);
    EXPECT_EQ(first_difference(part, whole), -1) << split;
    EXPECT_EQ(first_difference(part_tail, whole_tail), -1) << split;
  }
}

// ---- sabotage: the comparison tells these apart

// The right chains, but a tree in which neighbours meet first.
void neighbour_tree_norm(const float* x, const float* w, Index rows, Index dim, float eps, float* y, float* inv_rms) {
  for (Index r = 0; r < rows; ++r) {
    float lane[16] = {};
    for (Index i = 0; i < dim; ++i) lane[i % 16] = std::fma(x[r * dim + i], x[r * dim + i], lane[i % 16]);
    for (int width = 1; width < 16; width *= 2)
      for (int i = 0; i < 16; i += 2 * width) lane[i] = lane[i] + lane[i + width];
    const float inv = rsqrt(lane[0] / static_cast<float>(dim) + eps);
    for (Index i = 0; i < dim; ++i) y[r * dim + i] = x[r * dim + i] * inv * w[i];
    if (inv_rms != nullptr) inv_rms[r] = inv;
  }
}

// One chain instead of sixteen.
void contiguous_norm(const float* x, Index rows, Index dim, float eps, float scale, float* y, float* inv) {
  for (Index r = 0; r < rows; ++r) {
    float sum = 0.0F;
    for (Index i = 0; i < dim; ++i) sum = std::fma(x[r * dim + i], x[r * dim + i], sum);
    inv[r] = rsqrt(sum + eps);
    for (Index i = 0; i < dim; ++i) y[r * dim + i] = x[r * dim + i] * inv[r] * scale;
  }
}

void descending_taps(const float* z, const float* w, Index rows, Index channels, float* tail, float* u, float* y) {
  Floats inputs(tail, tail + 3 * channels);
  inputs.insert(inputs.end(), z, z + rows * channels);
  reference::causal_conv(z, w, rows, channels, tail, u, y);
  for (Index i = 0; i < rows * channels; ++i) {
    float sum = 0.0F;
    for (Index j = 3; j >= 0; --j)
      sum = std::fma(w[j * channels + i % channels], inputs[static_cast<std::size_t>(i + j * channels)], sum);
    u[i] = sum;
    y[i] = sum * sigmoid(sum);
  }
}

void ties_to_the_higher_index(const RouterShape& shape, const float* logits, const float* bias, Index rows,
                              std::int32_t* ids, float* weights) {
  const Index experts = shape.experts;
  const Floats mirrored_bias(std::make_reverse_iterator(bias + experts), std::make_reverse_iterator(bias));
  for (Index r = 0; r < rows; ++r) {
    const float* row = logits + r * experts;
    const Floats mirrored(std::make_reverse_iterator(row + experts), std::make_reverse_iterator(row));
    reference::route(shape, mirrored.data(), mirrored_bias.data(), 1, ids + r * shape.top_k, weights + r * shape.top_k);
    for (Index k = 0; k < shape.top_k; ++k) {
      std::int32_t& id = ids[r * shape.top_k + k];
      id = static_cast<std::int32_t>(experts) - 1 - id;
    }
  }
}

void descending_sources(const float* const* sources, int n_sources, const float* w, Index rows, Index dim, float eps,
                        float* out, float* probs) {
  const std::vector<const float*> mirrored(std::make_reverse_iterator(sources + n_sources),
                                           std::make_reverse_iterator(sources));
  reference::block_mix(mirrored.data(), n_sources, w, rows, dim, eps, out, probs);
  for (Index r = 0; r < rows; ++r) std::reverse(probs + r * n_sources, probs + (r + 1) * n_sources);
}

float contiguous_log_sum_exp(const float* x, Index n) {
  const float top = *std::max_element(x, x + n);
  float sum = 0.0F;
  for (Index i = 0; i < n; ++i) sum += exp(x[i] - top);
  return top + log(sum);
}

void unfused_axpy(float a, const float* x, Index n, float* y) {
  for (Index i = 0; i < n; ++i) y[i] = a * x[i] + y[i];
}

void one_bit(const float* gate, const float* up, Index n, float* y) {
  reference::silu_glu(gate, up, n, y);
  y[n - 1] = std::bit_cast<float>(bits(y[n - 1]) ^ 1U);
}

void truncate_to_bf16(float* x, Index n, bf16* out) {
  for (Index i = 0; i < n; ++i) {
    out[i].bits = static_cast<std::uint16_t>(bits(x[i]) >> 16);
    x[i] = to_float(out[i]);
  }
}

TEST_F(RowOps, SabotagedReferencesAreCaught) {
  const RowKernels ours = public_table();
  const auto caught = [&](const char* name, const std::function<void(RowKernels&)>& sabotage) {
    RowKernels twin = reference_table();
    sabotage(twin);
    for (const Case& test : kCases) {
      const int found = differences(test, ours, twin);
      EXPECT_EQ(found > 0, std::string(test.name) == name) << test.name << " with a changed " << name;
    }
  };
  caught("rms_norm", [](RowKernels& t) { t.rms_norm = neighbour_tree_norm; });
  caught("l2_norm", [](RowKernels& t) { t.l2_norm = contiguous_norm; });
  caught("causal_conv", [](RowKernels& t) { t.causal_conv = descending_taps; });
  caught("route", [](RowKernels& t) { t.route = ties_to_the_higher_index; });
  caught("block_mix", [](RowKernels& t) { t.block_mix = descending_sources; });
  caught("softmax", [](RowKernels& t) { t.log_sum_exp = contiguous_log_sum_exp; });
  caught("axpy", [](RowKernels& t) { t.axpy = unfused_axpy; });
  caught("silu_glu", [](RowKernels& t) { t.silu_glu = one_bit; });
  caught("round_to_bf16", [](RowKernels& t) { t.round_to_bf16 = truncate_to_bf16; });
}

// ---- values

TEST_F(RowOps, RouterOrderIsTotal) {
  const Index experts = 6;
  const Floats logits = {0.5F, std::nanf(""), 0.5F, 3.0F, 0.5F, -std::numeric_limits<float>::infinity()};
  const Floats bias(6, 0.0F);
  std::vector<std::int32_t> ids(6);
  Floats weights(6);
  for (const Isa isa : available_isas()) {
    force_isa(isa);
    route({experts, 6, false, 1.0F}, logits.data(), bias.data(), 1, ids.data(), weights.data());
    EXPECT_EQ(ids, (std::vector<std::int32_t>{3, 0, 2, 4, 5, 1}));
  }
}

TEST_F(RowOps, BadShapesAreRefused) {
  const RouterShape too_many{1025, 2, true, 1.0F};
  const RouterShape too_few{4, 5, true, 1.0F};
  EXPECT_THROW(route(too_many, nullptr, nullptr, 0, nullptr, nullptr), Error);
  EXPECT_THROW(route(too_few, nullptr, nullptr, 0, nullptr, nullptr), Error);
  EXPECT_THROW(block_mix(nullptr, 33, nullptr, 0, 1, 1e-5F, nullptr, nullptr), Error);
}

TEST_F(RowOps, LogSumExpOfExtremes) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  for (const Isa isa : available_isas()) {
    force_isa(isa);
    const Floats none(19, -infinity);
    EXPECT_EQ(log_sum_exp(none.data(), 19), -infinity);
    const Floats large(4, 1e30F);
    EXPECT_EQ(log_sum_exp(large.data(), 4), 1e30F);
    Floats one = none;
    one[17] = -3.5F;
    EXPECT_EQ(log_sum_exp(one.data(), 19), -3.5F);
    one[3] = std::nanf("");
    EXPECT_TRUE(std::isnan(log_sum_exp(one.data(), 19)));
  }
}

// to_bf16 from the definition: the nearest of the two neighbours with 8 significant bits, ties to the even one.
std::uint16_t nearest_bf16(float x) {
  const auto upper = static_cast<std::uint16_t>(bits(x) >> 16);
  if (std::isnan(x)) return static_cast<std::uint16_t>(upper | 0x0040U);
  if (std::isinf(x)) return upper;
  if ((bits(x) & 0x7F800000U) == 0) return upper & 0x8000U;
  const double below = static_cast<double>(to_float({upper}));
  const double step = std::ldexp(1.0, std::ilogb(below) - 7) * (std::signbit(x) ? -1 : 1);
  const double fraction = (static_cast<double>(x) - below) / step;
  const bool up = fraction > 0.5 || (fraction == 0.5 && (upper & 1U) != 0);
  return static_cast<std::uint16_t>(upper + (up ? 1 : 0));
}

TEST_F(RowOps, RoundToBf16IsToBf16Everywhere) {
  Floats x;
  for (std::uint32_t upper = 0; upper < 0x10000U; ++upper)  // every sign, exponent and kept mantissa
    for (const std::uint32_t lower : {0x0000U, 0x0001U, 0x7FFFU, 0x8000U, 0x8001U, 0xFFFFU})
      x.push_back(std::bit_cast<float>((upper << 16) | lower));
  for (std::uint64_t u = 0; u < (1ULL << 32); u += 1021)
    x.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(u)));
  std::vector<bf16> out(x.size());
  for (const Isa isa : available_isas()) {
    force_isa(isa);
    Floats rounded = x;
    round_to_bf16(rounded.data(), static_cast<Index>(x.size()), out.data());
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const bool right = out[i] == to_bf16(x[i]) && bits(rounded[i]) == std::uint32_t{out[i].bits} << 16;
      wrong += right && out[i].bits == nearest_bf16(x[i]) ? 0 : 1;
    }
    EXPECT_EQ(wrong, 0U) << isa_name(isa);
  }
}

}  // namespace rowops_test
}  // namespace tidelock::numerics::testing

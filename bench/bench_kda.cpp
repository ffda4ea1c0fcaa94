// KDA: the chunked prefill against the token-by-token recurrence and against the f32 peak; decode; attention.
#include <fmt/format.h>

#include <cmath>
#include <vector>

#include "base/error.hpp"
#include "base/random.hpp"
#include "base/team.hpp"
#include "bench_kda_peer.hpp"
#include "bench_registry.hpp"
#include "numerics/attention.hpp"
#include "numerics/isa.hpp"
#include "numerics/kda.hpp"
#include "peak.hpp"

namespace tidelock::bench {
namespace {

using namespace numerics;
using Floats = std::vector<float>;

constexpr int kHeads = 8;
constexpr int kDim = 128;
constexpr std::int64_t kRows = 2048;
constexpr std::int64_t kPeakSteps = 200'000;

Floats draw(std::int64_t n, std::uint64_t seed, float scale) {
  Random random(seed);
  Floats x(static_cast<std::size_t>(n));
  for (float& v : x) v = random.normal() * scale;
  return x;
}

struct Inputs {
  KdaShape shape;
  Floats q, k, v, g, beta;
};

Inputs make_inputs(const KdaShape& shape, std::int64_t rows) {
  const std::int64_t keys = rows * shape.heads * shape.key_dim;
  const float unit = 1.0F / std::sqrt(static_cast<float>(shape.key_dim));
  Inputs in{shape,
            draw(keys, 1, unit * unit),
            draw(keys, 2, unit),
            draw(rows * shape.heads * shape.value_dim, 3, 1.0F),
            draw(keys, 4, 1.0F),
            draw(rows * shape.heads, 5, 1.0F)};
  for (float& g : in.g) g = -0.5F * std::fabs(g);
  for (float& b : in.beta) b = 1.0F / (1.0F + std::exp(-b));
  return in;
}

// Head by head copies of the inputs: contiguous rows, as the peers like them best.
struct PeerInputs {
  Floats q, k, v, g, beta, s, out;
};

Floats by_head(const Floats& x, std::int64_t rows, int dim) {
  Floats y(x.size());
  for (std::int64_t r = 0; r < rows; ++r)
    for (int h = 0; h < kHeads; ++h)
      for (int d = 0; d < dim; ++d)
        y[static_cast<std::size_t>((h * rows + r) * dim + d)] = x[static_cast<std::size_t>((r * kHeads + h) * dim + d)];
  return y;
}

PeerInputs peer_inputs(const Inputs& in) {
  PeerInputs p{by_head(in.q, kRows, kDim),
               by_head(in.k, kRows, kDim),
               by_head(in.v, kRows, kDim),
               by_head(in.g, kRows, kDim),
               by_head(in.beta, kRows, 1),
               Floats(kHeads * kDim * kDim),
               {}};
  p.out.resize(p.v.size());
  return p;
}

RecurrenceHead peer_head(PeerInputs& p, std::int64_t head) {
  const std::int64_t row = head * kRows;
  return {kRows,
          kDim,
          kDim,
          p.q.data() + row * kDim,
          p.k.data() + row * kDim,
          p.v.data() + row * kDim,
          p.g.data() + row * kDim,
          p.beta.data() + row,
          p.s.data() + head * kDim * kDim,
          p.out.data() + row * kDim};
}

std::string title(const std::string& name, int threads) {
  return fmt::format("{}, {} thread{}", name, threads, threads == 1 ? "" : "s");
}

// A peer that computed something else would be no peer.
void check_peer(const Floats& ours, const Floats& peer) {
  const Floats same = by_head(ours, kRows, kDim);
  double error = 0;
  double size = 0;
  for (std::size_t i = 0; i < same.size(); ++i) {
    error += (same[i] - peer[i]) * (same[i] - peer[i]);
    size += same[i] * same[i];
  }
  if (!(error < 1e-9 * size))
    fail(ErrorCode::mismatch, "bench kda: the recurrence differs from the chunk form by {} RMS",
         std::sqrt(error / size));
}

// Multiply-adds per 16 rows of a head: 32 rows times S, the commit, the pairs and both triangles.
double chunk_operations() {
  return 2.0 * (32.0 * kDim * kDim + 16.0 * kDim * kDim + 32.0 * 16 * kDim + (120.0 + 136.0) * kDim);
}

std::vector<Measurement> prefill(int threads) {
  const Inputs in = make_inputs({kHeads, kDim, kDim, true}, kRows);
  KdaShape unbounded = in.shape;
  unbounded.bounded = false;
  PeerInputs peer = peer_inputs(in);
  Team team(threads);
  Floats state(kHeads * kda_head_state_floats(unbounded));
  Floats out(in.v.size());
  const auto run = [&](const KdaShape& shape) {
    team.parallel(kHeads, (kHeads + threads - 1) / threads, [&](std::int64_t begin, std::int64_t end) {
      kda_forward(shape, static_cast<int>(begin), static_cast<int>(end), 0, kRows, in.q.data(), in.k.data(),
                  in.v.data(), in.g.data(), in.beta.data(), state.data(), out.data(), nullptr);
    });
  };
  const auto fresh = [](Floats& s) { std::fill(s.begin(), s.end(), 0.0F); };
  std::vector<std::function<void()>> candidates{[&] { fresh(state), run(in.shape); },
                                                [&] { fresh(state), run(unbounded); }};
  if (isa() == Isa::scalar) {
    const Comparison c = compare(candidates);
    return {{title("kda prefill 2048x8x128", threads), kRows / c.seconds[0], "tokens/s", "", 0}};
  }
  const KdaPeers& peers = isa() == Isa::avx2 ? kKdaPeersAvx2 : kKdaPeersAvx512;
  for (const auto one : {peers.two_passes, peers.one_pass}) {
    const auto call = [&, one] {
      fresh(peer.s);
      team.parallel(kHeads, 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t h = begin; h < end; ++h) one(peer_head(peer, h));
      });
    };
    candidates[0]();
    call();
    check_peer(out, peer.out);
    candidates.emplace_back(call);
  }
  candidates.emplace_back([&] {
    team.parallel(threads, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) peak()->fma(kPeakSteps);
    });
  });
  const Comparison c = compare(candidates);
  const double operations = chunk_operations() * kHeads * kRows / 16;
  const double peak_operations = peak()->fma(1) * kPeakSteps * threads;
  const auto rate = [&](std::size_t i) { return kRows / c.seconds[i]; };
  const auto versus = [&](const char* peer_name, std::size_t i) {
    return Measurement{title("kda prefill 2048x8x128", threads), rate(0), "tokens/s",
                       fmt::format("{} ({:.0f})", peer_name, rate(i)), c.ratio_to_first[i]};
  };
  return {versus("recurrence, two passes per token", 2),
          versus("recurrence, one fused pass per token", 3),
          {title("kda prefill 2048x8x128", threads), operations / c.seconds[0] / 1e9, "GFLOP/s",
           fmt::format("peak of f32 fma ({:.1f})", peak_operations / c.seconds[4] / 1e9),
           operations / peak_operations * c.ratio_to_first[4]},
          {title("kda prefill 2048x8x128, unbounded gate", threads), rate(1), "tokens/s", "the bounded gate",
           1.0 / c.ratio_to_first[1]}};
}

std::vector<Measurement> decode_and_training(int threads) {
  if (threads != 1) return {};
  std::vector<Measurement> figures;
  const Inputs real = make_inputs({kHeads, kDim, kDim, true}, 16);
  Floats state(kHeads * kda_head_state_floats(real.shape));
  Floats out(real.v.size());
  std::int64_t position = 0;
  const Comparison decode = compare({[&] {
    const std::int64_t r = position++ % 16;
    kda_forward(real.shape, 0, kHeads, r, 1, real.q.data(), real.k.data(), real.v.data(), real.g.data(),
                real.beta.data(), state.data(), out.data(), nullptr);
  }});
  figures.push_back({title("kda decode 8x128", 1), decode.seconds[0] * 1e9 / kHeads, "ns/head", "", 0});

  const Inputs small = make_inputs({4, 32, 32, true}, 512);
  Floats small_state(4 * kda_head_state_floats(small.shape)), small_out(small.v.size()), chunks(32 * 4 * 32 * 32);
  Floats d_q(small.q.size()), d_k(d_q), d_v(d_q), d_g(d_q), d_beta(small.beta.size());
  const Comparison training =
      compare({[&] {
                 std::fill(small_state.begin(), small_state.end(), 0.0F);
                 kda_forward(small.shape, 0, 4, 0, 512, small.q.data(), small.k.data(), small.v.data(), small.g.data(),
                             small.beta.data(), small_state.data(), small_out.data(), chunks.data());
               },
               [&] {
                 kda_backward(small.shape, 0, 4, 512, small.q.data(), small.k.data(), small.v.data(), small.g.data(),
                              small.beta.data(), chunks.data(), small.v.data(), d_q.data(), d_k.data(), d_v.data(),
                              d_g.data(), d_beta.data());
               }});
  figures.push_back({title("kda forward 512x4x32", 1), training.seconds[0] * 1e9 / 512, "ns/token", "", 0});
  figures.push_back({title("kda backward 512x4x32", 1), training.seconds[1] * 1e9 / 512, "ns/token", "", 0});
  return figures;
}

struct AttentionCase {
  const char* name;
  MlaShape shape;
  std::int64_t position, rows;
  int selected;  // 0: dense
};

Measurement attend(const AttentionCase& c) {
  const int dim = c.shape.latent_dim + c.shape.extra_dim;
  const std::int64_t tokens = c.position + c.rows;
  BlockView view{nullptr, 0, static_cast<std::size_t>(dim) * 2, dim, Format::bf16};
  std::vector<std::vector<std::byte>> memory;
  std::vector<std::byte*> blocks;
  for (std::int64_t b = 0; b * kBlockTokens < tokens; ++b) memory.emplace_back(kBlockTokens * view.row_bytes);
  for (auto& m : memory) blocks.push_back(m.data());
  view.blocks = blocks.data();
  store_rows(view, 0, tokens, draw(tokens * dim, 6, 1.0F).data());
  const Floats q = draw(c.rows * c.shape.heads * dim, 7, 1.0F);
  Floats context(static_cast<std::size_t>(c.rows * c.shape.heads * c.shape.latent_dim));
  std::vector<std::int32_t> lists;
  std::vector<std::int32_t> counts;
  double pairs = 0;
  for (std::int64_t r = 0; r < c.rows; ++r) {
    const std::int64_t all = c.position + r + 1;
    const std::int64_t count = c.selected > 0 ? std::min<std::int64_t>(c.selected, all) : all;
    counts.push_back(static_cast<std::int32_t>(count));
    for (std::int64_t e = 0; e < count; ++e) lists.push_back(static_cast<std::int32_t>(e * all / count));
    lists.resize(static_cast<std::size_t>((r + 1) * std::max(c.selected, 1)));
    pairs += static_cast<double>(count);
  }
  const Comparison result =
      compare({[&] {
                 mla_attention(c.shape, view, c.position, c.rows, q.data(), c.selected > 0 ? lists.data() : nullptr,
                               c.selected, counts.data(), context.data(), nullptr);
               },
               [&] { peak()->fma(kPeakSteps); }});
  const double operations = 2.0 * pairs * c.shape.heads * (dim + c.shape.latent_dim);
  const double peak_operations = peak()->fma(1) * kPeakSteps;
  return {fmt::format("mla {} ({:.2f} us/row)", c.name, result.seconds[0] * 1e6 / static_cast<double>(c.rows)),
          operations / result.seconds[0] / 1e9, "GFLOP/s",
          fmt::format("peak of f32 fma ({:.1f})", peak_operations / result.seconds[1] / 1e9),
          operations / peak_operations * result.ratio_to_first[1]};
}

std::vector<Measurement> attention(int threads) {
  if (threads != 1 || peak() == nullptr) return {};
  const MlaShape real{32, 512, 64, 0.0721687824F};
  const MlaShape small{4, 32, 8, 0.158F};
  std::vector<Measurement> figures;
  for (const AttentionCase& c : {AttentionCase{"prefill 64 rows at 1024, 32 heads", real, 1024, 64, 0},
                                 AttentionCase{"decode at 4096, 32 heads", real, 4095, 1, 0},
                                 AttentionCase{"decode 2048 of 8192, 96 heads", {96, 512, 64, 0.07F}, 8191, 1, 2048},
                                 AttentionCase{"small prefill 256 rows", small, 0, 256, 0},
                                 AttentionCase{"small, 64 of 512, 32 rows", small, 480, 32, 64}})
    figures.push_back(attend(c));
  return figures;
}

const Register kPrefill("kda prefill", prefill);
const Register kDecode("kda decode and training", decode_and_training);
const Register kAttention("mla attention", attention);

}  // namespace
}  // namespace tidelock::bench

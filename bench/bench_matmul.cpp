// Matrix products against oneDNN, against the peak of the instruction, against the memory, and against themselves
// without the contract.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>

#include "base/random.hpp"
#include "base/team.hpp"
#include "bench_registry.hpp"
#include "numerics/isa.hpp"
#include "numerics/matmul.hpp"
#include "numerics/matmul_kernels.hpp"
#include "numerics/quant.hpp"
#include "onednn.hpp"
#include "peak.hpp"

namespace tidelock::bench {

using namespace numerics;

const Peak* peak() {
  switch (isa()) {
    case Isa::avx512bf16:
      return &kPeakAvx512Bf16;
    case Isa::avx512:
      return &kPeakAvx512;
    case Isa::avx2:
      return &kPeakAvx2;
    case Isa::scalar:
      break;
  }
  return nullptr;
}

namespace {

template <typename Element>
std::vector<Element> random_values(std::int64_t count) {
  Random random(static_cast<std::uint64_t>(count));
  std::vector<Element> values(static_cast<std::size_t>(count));
  for (auto& v : values) {
    const float value = random.uniform() - 0.5F;
    if constexpr (std::is_same_v<Element, bf16>) {
      v = to_bf16(value);
    } else {
      v = value;
    }
  }
  return values;
}

std::string title(const std::string& what, int threads) {
  return fmt::format("{}, {} thread{}", what, threads, threads == 1 ? "" : "s");
}

constexpr std::int64_t kPeakSteps = 200'000;

// Runs `work` once on each thread at the same time.
void on_each_thread(Team& team, const std::function<void()>& work) {
  team.parallel(team.threads(), 1, [&](std::int64_t, std::int64_t) { work(); });
}

// x [rows, in] times w [out, in] against oneDNN and the peak of the multiply-add that the format uses.
template <typename Element>
std::vector<Measurement> product(std::int64_t rows, std::int64_t out, std::int64_t in, int threads) {
  constexpr bool kBf16 = std::is_same_v<Element, bf16>;
  Team team(threads);
  const auto x = random_values<Element>(rows * in);
  const auto w = PackedMatrix::pack(kBf16 ? Format::bf16 : Format::f32, random_values<float>(out * in).data(), out, in);
  std::vector<float> y(static_cast<std::size_t>(rows * out));
  OneDnnMatmul peer(kBf16 ? PeerFormat::bf16 : PeerFormat::f32, rows, out, in);
  std::vector<std::function<void()>> candidates{
      [&] { matmul(w, x.data(), in, rows, y.data(), out, Output::store, team); }, [&] { peer.run(threads); }};
  double peak_operations = 0;
  if (const Peak* const machine = peak()) {
    const auto instruction = kBf16 ? machine->dot_bf16 : machine->fma;
    peak_operations = instruction(1) * kPeakSteps * threads;
    candidates.emplace_back([&team, instruction] { on_each_thread(team, [&] { instruction(kPeakSteps); }); });
  }
  const Comparison c = compare(candidates);
  const double operations = 2.0 * static_cast<double>(rows * out * in);
  const double rate = operations / c.seconds[0] / 1e9;
  const std::string name = title(fmt::format("{} gemm {}x{}x{}", kBf16 ? "bf16" : "f32", rows, out, in), threads);
  std::vector<Measurement> figures{
      {name, rate, "GFLOP/s", fmt::format("oneDNN ({:.1f})", operations / c.seconds[1] / 1e9), c.ratio_to_first[1]}};
  if (peak_operations > 0) {
    figures.push_back(
        {name, rate, "GFLOP/s",
         fmt::format("peak of {} ({:.1f})", kBf16 ? "bf16 dot" : "f32 fma", peak_operations / c.seconds[2] / 1e9),
         operations / peak_operations * c.ratio_to_first[2]});
  }
  return figures;
}

// Random weights in a format; any bytes are blocks, but scales must be finite.
PackedMatrix random_weights(Format format, std::int64_t out, std::int64_t in) {
  std::vector<std::byte> rows(row_bytes(format, out * in));
  Random random(1);
  for (auto& b : rows) b = static_cast<std::byte>(random.below(64));
  return PackedMatrix::pack_blocks(format, rows.data(), row_bytes(format, in), out, in);
}

// Block formats: many rows against the peak of the bf16 dot product.
std::vector<Measurement> block_product(Format format, int threads) {
  constexpr std::int64_t kRows = 512, kOut = 2064, kIn = 2048;
  const Peak* const machine = peak();
  if (machine == nullptr) return {};
  Team team(threads);
  const auto w = random_weights(format, kOut, kIn);
  const auto x = random_values<bf16>(kRows * kIn);
  std::vector<float> y(static_cast<std::size_t>(kRows * kOut));
  const Comparison c = compare({[&] { matmul(w, x.data(), kIn, kRows, y.data(), kOut, Output::store, team); },
                                [&] { on_each_thread(team, [&] { machine->dot_bf16(kPeakSteps); }); }});
  const double operations = 2.0 * static_cast<double>(kRows * kOut * kIn);
  const double peak_operations = machine->dot_bf16(1) * kPeakSteps * threads;
  return {{title(fmt::format("{} gemm {}x{}x{}", format_name(format), kRows, kOut, kIn), threads),
           operations / c.seconds[0] / 1e9, "GFLOP/s",
           fmt::format("peak of bf16 dot ({:.1f})", peak_operations / c.seconds[1] / 1e9),
           operations / peak_operations * c.ratio_to_first[1]}};
}

// One row times a set of matrices that no cache holds: decoding, once around the model.
std::vector<Measurement> decode(Format format, int threads) {
  constexpr std::int64_t kSize = 2048, kMatrices = 64;  // 64 x 8 MB
  Team team(threads);
  std::vector<PackedMatrix> matrices;
  for (std::int64_t i = 0; i < kMatrices; ++i) matrices.push_back(random_weights(format, kSize, kSize));
  const auto x = random_values<bf16>(kSize);
  std::vector<float> y(kSize);
  std::vector<std::function<void()>> candidates{[&] {
    for (const auto& w : matrices) matmul(w, x.data(), kSize, 1, y.data(), kSize, Output::store, team);
  }};
  const Peak* const machine = peak();
  std::atomic<std::uint64_t> seen{0};
  if (machine != nullptr) {
    candidates.emplace_back([&] {
      team.parallel(kMatrices, 1, [&](std::int64_t begin, std::int64_t end) {
        for (auto i = begin; i < end; ++i) {
          const auto& w = matrices[static_cast<std::size_t>(i)];
          seen.fetch_xor(machine->read(w.data(), w.bytes()));
        }
      });
    });
  }
  const Comparison c = compare(candidates);
  const double bytes = static_cast<double>(matrices[0].bytes()) * kMatrices;
  Measurement m{title(fmt::format("{} gemv 2048x2048 x 64 matrices", format_name(format)), threads),
                bytes / c.seconds[0] / 1e9, "GB/s", "", 0};
  if (machine != nullptr) {
    m.peer = fmt::format("read bandwidth ({:.1f})", bytes / c.seconds[1] / 1e9);
    m.ratio = c.ratio_to_first[1];
  }
  return {m};
}

// The contract's price: the fastest of several kernels that split each sum over more chains, on the same weights.
std::vector<Measurement> contract_cost(std::int64_t rows, int threads) {
  constexpr std::int64_t kSize = 2048;
  const Peak* const machine = peak();
  if (machine == nullptr) return {};
  Team team(threads);
  const auto w = PackedMatrix::pack(Format::bf16, random_values<float>(kSize * kSize).data(), kSize, kSize);
  const auto x = random_values<bf16>(rows * kSize);
  std::vector<float> y(static_cast<std::size_t>(rows * kSize));
  const MatmulJob job{w.data(), x.data(), kSize, y.data(), kSize, kSize, kSize, 1, false, Format::bf16};
  std::vector<std::function<void()>> candidates{
      [&] { matmul(w, x.data(), kSize, rows, y.data(), kSize, Output::store, team); }};
  for (const auto& split : machine->split_bf16) {
    if (split.run == nullptr || rows % split.rows != 0) continue;
    candidates.emplace_back([&, run = split.run] {
      team.parallel(panel_count(kSize), 24, [&](std::int64_t begin, std::int64_t end) { run(job, rows, begin, end); });
    });
  }
  const Comparison c = compare(candidates);
  const auto best = std::min_element(c.ratio_to_first.begin() + 1, c.ratio_to_first.end());
  const double operations = 2.0 * static_cast<double>(rows * kSize * kSize) / 1e9;
  return {{title(fmt::format("contract cost {}x{}x{}", rows, kSize, kSize), threads), operations / c.seconds[0],
           "GFLOP/s",
           fmt::format("chains split at will ({:.1f})",
                       operations / c.seconds[static_cast<std::size_t>(best - c.ratio_to_first.begin())]),
           *best}};
}

// The sizes of a small model, in one thread: what a call costs.
std::vector<Measurement> small(int threads) {
  if (threads != 1) return {};
  std::vector<Measurement> figures;
  const auto nanoseconds = [&](const std::string& name, const std::function<void()>& call) {
    figures.push_back({title(name, 1), compare({call}).seconds[0] * 1e9, "ns/call", "", 0});
  };
  const auto x = random_values<bf16>(512 * 512);
  const auto values = random_values<float>(512 * 512);
  std::vector<float> y(512 * 512);
  for (const auto& [rows, out, in] :
       {std::array<std::int64_t, 3>{1, 128, 128}, {1, 512, 128}, {8, 128, 128}, {64, 128, 512}}) {
    const auto w = PackedMatrix::pack(Format::bf16, values.data(), out, in);
    nanoseconds(fmt::format("small bf16 {}x{}x{}", rows, out, in), [&, rows = rows, out = out, in = in] {
      matmul(w, x.data(), in, rows, y.data(), out, Output::store, solo_team());
    });
  }
  return figures;
}

// The weight gradient of a small model's step: dy [2000, 128], x [2000, 512].
std::vector<Measurement> gradient(int threads) {
  constexpr std::int64_t kRows = 2000, kOut = 128, kIn = 512;
  Team team(threads);
  const auto dy = random_values<float>(kRows * kOut);
  const auto x = random_values<float>(kRows * kIn);
  std::vector<float> c(kOut * kIn);
  std::vector<std::function<void()>> candidates{[&] {
    matmul_transposed_a(dy.data(), kOut, x.data(), kIn, kRows, kOut, kIn, c.data(), kIn, Output::store, team);
  }};
  const Peak* const machine = peak();
  if (machine != nullptr) candidates.emplace_back([&] { on_each_thread(team, [&] { machine->fma(kPeakSteps); }); });
  const Comparison result = compare(candidates);
  const double operations = 2.0 * kRows * kOut * kIn;
  Measurement m{title("f32 weight gradient 2000 rows, 128x512", threads), operations / result.seconds[0] / 1e9,
                "GFLOP/s", "", 0};
  if (machine != nullptr) {
    const double peak_operations = machine->fma(1) * kPeakSteps * threads;
    m.peer = fmt::format("peak of f32 fma ({:.1f})", peak_operations / result.seconds[1] / 1e9);
    m.ratio = operations / peak_operations * result.ratio_to_first[1];
  }
  return {m};
}

const Register kGemm("bf16 gemm 512", [](int threads) { return product<bf16>(512, 2048, 2048, threads); });
const Register kBatch("bf16 gemm 16", [](int threads) { return product<bf16>(16, 2048, 2048, threads); });
const Register kGemmF32("f32 gemm 512", [](int threads) { return product<float>(512, 2048, 2048, threads); });
const Register kDecode("decode gemv", [](int threads) { return decode(Format::bf16, threads); });
const Register kDecodeQ8("decode gemv q8_0", [](int threads) { return decode(Format::q8_0, threads); });
const Register kDecodeQ4("decode gemv q4_k", [](int threads) { return decode(Format::q4_k, threads); });
const Register kDecodeQ6("decode gemv q6_k", [](int threads) { return decode(Format::q6_k, threads); });
const Register kDecodeMx("decode gemv mxfp4", [](int threads) { return decode(Format::mxfp4, threads); });
const Register kGemmQ8("block gemm q8_0", [](int threads) { return block_product(Format::q8_0, threads); });
const Register kGemmQ4("block gemm q4_k", [](int threads) { return block_product(Format::q4_k, threads); });
const Register kGemmMx("block gemm mxfp4", [](int threads) { return block_product(Format::mxfp4, threads); });
const Register kContract1("contract cost 1", [](int threads) { return contract_cost(1, threads); });
const Register kContract16("contract cost 16", [](int threads) { return contract_cost(16, threads); });
const Register kSmall("small products", small);
const Register kGradient("weight gradient", gradient);

}  // namespace
}  // namespace tidelock::bench

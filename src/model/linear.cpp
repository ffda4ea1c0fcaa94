#include "base/error.hpp"
#include "model/layers.hpp"

namespace tidelock::model {

using numerics::matmul;
using numerics::matmul_transposed_a;

Signal make_signal(const Pass& pass, float* x, std::int64_t rows, std::int64_t width, Arena& arena) {
  if (pass.model.config().format == Format::f32) return {x, nullptr};
  bf16* narrow = arena.take<bf16>(rows * width);
  for_rows(pass, rows, 64, [&](std::int64_t begin, std::int64_t end) {
    numerics::round_to_bf16(x + begin * width, (end - begin) * width, narrow + begin * width);
  });
  return {x, narrow};
}

void linear_forward(const Pass& pass, const LinearArgs& args, Signal x, std::int64_t rows,
                    std::span<const AdapterRun> runs, float* y) {
  if (rows == 0) return;
  const auto& w = pass.model.matrix(args.id, args.part).forward;
  const std::int64_t ldx = args.ldx != 0 ? args.ldx : w.in();
  const std::int64_t ldy = args.ldy != 0 ? args.ldy : w.out();
  if (w.format() == Format::f32)
    matmul(w, x.f, ldx, rows, y, ldy, args.output, pass.team);
  else
    matmul(w, x.b, ldx, rows, y, ldy, args.output, pass.team, args.input);
  for (const AdapterRun& run : runs) {
    const AdapterPart* parts = run.adapter == nullptr ? nullptr : run.adapter->parts(args.id);
    if (parts == nullptr || run.begin == run.end) continue;
    const AdapterPart& part = parts[args.part];
    const ArenaScope scope(pass.scratch);
    const std::int64_t n = run.end - run.begin, rank = part.down.out(), out = w.out();
    float* low = pass.scratch.take<float>(n * rank);
    float* delta = pass.scratch.take<float>(n * out);
    matmul(part.down, x.f + run.begin * ldx, ldx, n, low, rank, Output::store, pass.team);
    matmul(part.up, low, rank, n, delta, out, Output::store, pass.team);
    const float scale = run.adapter->scale();
    for (std::int64_t r = 0; r < n; ++r) numerics::axpy(scale, delta + r * out, out, y + (run.begin + r) * ldy);
  }
}

namespace {

// The weight's own gradient, in the checkpoint's layout.
void weight_gradient(const Pass& pass, const LinearArgs& args, const float* x, std::int64_t ldx, const float* d_y,
                     std::int64_t ldy, std::int64_t rows, float* d_w) {
  const Parameter& p = pass.model.parameter(args.id);
  const auto& w = pass.model.matrix(args.id, args.part).forward;
  if (p.kind != ParameterKind::absorbed) {
    matmul_transposed_a(d_y, ldy, x, ldx, rows, w.out(), w.in(), d_w, w.in(), Output::add, pass.team);
    return;
  }
  const MlaConfig& m = pass.model.config().mla;
  const int head = args.part % m.heads;
  float* head_rows = d_w + static_cast<std::int64_t>(head) * (m.nope + m.value) * m.latent;
  if (args.part < m.heads)  // the key half is used transposed
    matmul_transposed_a(x, ldx, d_y, ldy, rows, m.nope, m.latent, head_rows, m.latent, Output::add, pass.team);
  else
    matmul_transposed_a(d_y, ldy, x, ldx, rows, m.value, m.latent,
                        head_rows + static_cast<std::int64_t>(m.nope) * m.latent, m.latent, Output::add, pass.team);
}

void adapter_gradient(const Pass& pass, const LinearArgs& args, const AdapterRun& run, const float* x, std::int64_t ldx,
                      const float* d_y, std::int64_t ldy, float* d_x, Gradients& gradients) {
  const AdapterPart* parts = run.adapter == nullptr ? nullptr : run.adapter->parts(args.id);
  const std::int64_t n = run.end - run.begin;
  if (parts == nullptr || n == 0) return;
  const AdapterPart& part = parts[args.part];
  const ArenaScope scope(pass.scratch);
  const std::int64_t rank = part.down.out(), in = part.down.in(), out = part.up.out();
  const float scale = run.adapter->scale();
  x += run.begin * ldx;
  d_y += run.begin * ldy;
  float* d_low = pass.scratch.take<float>(n * rank);  // scale * dY B
  matmul(part.up_transposed, d_y, ldy, n, d_low, rank, Output::store, pass.team);
  for (std::int64_t i = 0; i < n * rank; ++i) d_low[i] *= scale;
  if (d_x != nullptr) matmul(part.down_transposed, d_low, rank, n, d_x + run.begin * ldx, ldx, Output::add, pass.team);
  if (gradients.lora_a.empty()) return;
  float* d_a = gradients.lora_a[static_cast<std::size_t>(args.id)];
  float* d_b = gradients.lora_b[static_cast<std::size_t>(args.id)];
  if (d_a == nullptr || d_b == nullptr) return;
  float* low = pass.scratch.take<float>(n * rank);  // scale * X A
  matmul(part.down, x, ldx, n, low, rank, Output::store, pass.team);
  for (std::int64_t i = 0; i < n * rank; ++i) low[i] *= scale;
  const MlaConfig& m = pass.model.config().mla;
  const bool absorbed = pass.model.parameter(args.id).kind == ParameterKind::absorbed;
  if (absorbed && args.part < m.heads) {  // down = B_k^T, up = A^T: the roles of x and d_y turn round
    float* head_b = d_b + static_cast<std::int64_t>(args.part) * (m.nope + m.value) * rank;
    matmul_transposed_a(low, rank, d_y, ldy, n, rank, out, d_a, out, Output::add, pass.team);
    matmul_transposed_a(x, ldx, d_low, rank, n, in, rank, head_b, rank, Output::add, pass.team);
    return;
  }
  if (absorbed) d_b += (static_cast<std::int64_t>(args.part - m.heads) * (m.nope + m.value) + m.nope) * rank;
  matmul_transposed_a(d_low, rank, x, ldx, n, rank, in, d_a, in, Output::add, pass.team);
  matmul_transposed_a(d_y, ldy, low, rank, n, out, rank, d_b, rank, Output::add, pass.team);
}

}  // namespace

void linear_backward(const Pass& pass, const LinearArgs& args, const float* x, std::int64_t rows,
                     std::span<const AdapterRun> runs, const float* d_y, float* d_x, Gradients& gradients) {
  if (rows == 0) return;
  const Matrix& w = pass.model.matrix(args.id, args.part);
  const std::int64_t ldx = args.ldx != 0 ? args.ldx : w.forward.in();
  const std::int64_t ldy = args.ldy != 0 ? args.ldy : w.forward.out();
  if (d_x != nullptr) matmul(w.transposed, d_y, ldy, rows, d_x, ldx, Output::add, pass.team);
  if (float* d_w = parameter_gradient(gradients, args.id)) weight_gradient(pass, args, x, ldx, d_y, ldy, rows, d_w);
  for (const AdapterRun& run : runs) adapter_gradient(pass, args, run, x, ldx, d_y, ldy, d_x, gradients);
}

}  // namespace tidelock::model

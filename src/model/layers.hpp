// Layers as pairs of free functions over rows. Private to model/.
//
// Rounding points (contract bf16; with Format::f32 there are none): the input of every linear map is rounded to bf16
// where it is produced ("signal"); latents and index keys are rounded when stored; everything else - residual stream,
// norms, gates, soft-max, recurrent state, adapters, router, logits - is float32. Each layer's table below lists its
// signals.
#pragma once

#include "model/forward.hpp"

namespace tidelock::model {

using numerics::bf16;
using numerics::Output;

// Rows [begin, end) of the batch that share an adapter.
struct AdapterRun {
  std::int64_t begin, end;
  const Adapter* adapter;
};

// What all layers of one pass share.
struct Pass {
  const Model& model;
  const StateLayout& layout;
  std::span<const Span> spans;
  std::vector<std::int64_t> first_row;  // of each span; one more at the end
  std::int64_t rows;
  std::vector<AdapterRun> runs;
  ForwardOptions options;
  Arena& scratch;
  Arena& keep;  // outlives the layer when there is a tape
  Team& team;
};
Pass make_pass(const Model& model, const StateLayout& layout, std::span<const Span> spans,
               const ForwardOptions& options, Workspace& workspace, Team& team);

// An activation as a matrix product sees it: float32 values on the format's grid, and their bf16 form when the format
// is bf16.
struct Signal {
  float* f = nullptr;
  bf16* b = nullptr;
};
// Rounds x [rows, width] in place. The bf16 form is taken from `arena`.
Signal make_signal(const Pass& pass, float* x, std::int64_t rows, std::int64_t width, Arena& arena);

// Splits [0, rows) over the team in pieces of at least `grain` rows.
template <typename F>
void for_rows(const Pass& pass, std::int64_t rows, std::int64_t grain, F&& body) {
  if (pass.team.threads() == 1 || rows <= grain)
    body(std::int64_t{0}, rows);
  else
    pass.team.parallel(rows, grain, body);
}

// y [rows, out] = W x (+ adapter). ldx, ldy: row strides in elements. `part` selects a head's half of an absorbed
// matrix.
struct LinearArgs {
  ParameterId id;
  int part = 0;
  std::int64_t ldx = 0, ldy = 0;  // 0: contiguous
  Output output = Output::store;
  numerics::Input input = numerics::Input::fresh;  // same: the map before this one in the thread took this x, unchanged
};
void linear_forward(const Pass& pass, const LinearArgs& args, Signal x, std::int64_t rows,
                    std::span<const AdapterRun> runs, float* y);
// Adds to d_x (when not null) and to the gradients of the weight and of the adapter. x is the signal's float32 form.
void linear_backward(const Pass& pass, const LinearArgs& args, const float* x, std::int64_t rows,
                     std::span<const AdapterRun> runs, const float* d_y, float* d_x, Gradients& gradients);

inline float* parameter_gradient(Gradients& g, ParameterId id) {
  return g.parameters.empty() || id == kNone ? nullptr : g.parameters[static_cast<std::size_t>(id)];
}

// ---- KDA layer. Signals: x, f_a output, gated head outputs.
struct KdaTape {
  Signal x;
  float *z[3], *u[3], *y[3];     // q, k, v: projections, convolution sums, convolution outputs [rows, channels]
  float *q, *k, *q_inv, *k_inv;  // normalised
  Signal f1;
  float *raw, *g, *beta;
  float *o, *o_inv, *on;
  Signal g1;
  float* og;
  Signal out;
  std::vector<float*> chunk_states;  // by span
};
void kda_layer_forward(const Pass& pass, int layer, Signal x, float* out, KdaTape* tape);
void kda_layer_backward(const Pass& pass, int layer, const KdaTape& tape, const float* d_out, float* d_x,
                        Gradients& gradients);

// ---- MLA layer. Signals: x, q_a latent after its norm, q, attention context, gated output. Stored: latent + k_pe,
// index key.
struct MlaTape {
  Signal x;
  float *qa, *qa_inv;
  Signal qr, q;
  float *c, *c_inv;                 // kv_a output [rows, latent + extra], inverse RMS
  float* q_abs;                     // [rows, heads, latent + extra]
  std::vector<float*> keys;         // by span: as stored [tokens, latent + extra]
  std::int32_t *selected, *counts;  // null: dense
  std::int64_t selected_stride;
  Signal context;
  float *lse, *context_raw;
  float *o, *og;
  Signal out;
  // indexer
  Signal iq_in;
  float *iq, *ik_raw, *ik_stats, *iw;
  std::vector<float*> index_keys;
};
void mla_layer_forward(const Pass& pass, int layer, Signal x, float* out, MlaTape* tape);
void mla_layer_backward(const Pass& pass, int layer, const MlaTape& tape, const float* d_out, float* d_x,
                        Gradients& gradients);

// ---- feed-forward: dense or experts. Signals: x, activated inner rows, latent z, latent sum after its norm. The
// router sees the unrounded normed x in float32.
struct GluTape {
  float *gate, *up;
  Signal inner;
};
struct FfnTape {
  Signal x;
  const float* router_in;
  GluTape dense;  // dense layer or shared experts
  float* logits;
  std::int32_t* ids;
  float* weights;
  Signal z;
  std::vector<std::int32_t> slot_rows;     // (row * top_k + slot) grouped by expert, ascending
  std::vector<std::int64_t> expert_begin;  // [experts + 1] into slot_rows
  Signal gathered;
  GluTape expert;        // over gathered rows
  float* expert_out;     // [gathered, width]
  float *sum, *sum_inv;  // [rows, width]
  Signal sum_signal;
};
void ffn_forward(const Pass& pass, int layer, Signal x, const float* router_in, float* out, FfnTape* tape);
void ffn_backward(const Pass& pass, int layer, const FfnTape& tape, const float* d_out, float* d_x,
                  Gradients& gradients);

}  // namespace tidelock::model

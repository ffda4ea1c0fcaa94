// The derivative of attention and of the DSA index over V16. The same groups, lanes and tiles as attention.inl:
//   p = exp(s - lse), dp_j = d_context . latent_j, ds = scale p (dp - delta), delta = d_context . context
//   d_q = sum over j of ds_j key_j, d_key_j = sum over pairs of ds_j q and, on the latent, p_j d_context
// Gradients of keys are added group by group, rows ascending; inside a group over (row, head) ascending.
#pragma once

#include "numerics/attention.inl"

namespace tidelock::numerics::TIDELOCK_ISA_NAMESPACE {
namespace {

// x [rows][dim] to rows of padded(dim), zeros in the padding.
inline void pad_rows(const float* x, int rows, int dim, float* out) {
  const int width = padded(dim);
  for (int r = 0; r < rows; ++r)
    for (int d = 0; d < width; d += kLanes)
      store(out + r * width + d, load_n(x + r * dim + d, dim - d < kLanes ? dim - d : kLanes));
}

// to[0..dim) += from[0..dim)
inline void add_row(const float* from, int dim, float* to) {
  int d = 0;
  for (; d + kLanes <= dim; d += kLanes) store(to + d, add(load(to + d), load(from + d)));
  if (d < dim) store_n(to + d, add(load_n(to + d, dim - d), load_n(from + d, dim - d)), dim - d);
}

inline void gather_rows(const float* keys, int dim, KeyList list, std::int64_t first, int count, float* tile) {
  const int width = padded(dim);
  for (int j = 0; j < count; ++j) pad_rows(keys + list.at(first + j) * dim, 1, dim, tile + j * width);
}

inline void scatter_rows(const float* tile, int dim, KeyList list, std::int64_t first, int count, float* d_keys) {
  const int width = padded(dim);
  for (int j = 0; j < count; ++j) add_row(tile + j * width, dim, d_keys + list.at(first + j) * dim);
}

struct BackwardGroup {
  Group g;                       // q turned, tile, scores (then p), remaining
  float *q_rows, *d_rows;        // [pairs][padded key dim], [pairs][padded latent]: q and d_context
  float *d_lanes, *d_scores;     // [latent][lanes], [64][lanes]: d_context turned; dp, then ds
  float *d_q, *d_tile;           // [pairs][padded key dim], [64][padded key dim]
  float *delta, *lse;            // [lanes]
  std::int64_t longest, stride;  // entries of the longest list; of a row of mean_probs
};

inline void load_group(const MlaShape& shape, int key_dim, const float* q, const float* context, const float* lse,
                       const float* d_context, BackwardGroup& b) {
  const Group& g = b.g;
  const int latent = padded(shape.latent_dim);
  pad_rows(q, g.pairs, key_dim, b.q_rows);
  pad_rows(d_context, g.pairs, shape.latent_dim, b.d_rows);
  pack_lanes(b.q_rows, padded(key_dim), g.pairs, key_dim, g.q, g.lanes);
  pack_lanes(b.d_rows, latent, g.pairs, shape.latent_dim, b.d_lanes, g.lanes);
  for (int p = 0; p < g.lanes; ++p) {
    V16 dot = set1(0.0F);
    for (int d = 0; d < shape.latent_dim && p < g.pairs; d += kLanes) {
      const int n = shape.latent_dim - d < kLanes ? shape.latent_dim - d : kLanes;
      dot = fma(load(b.d_rows + p * latent + d), load_n(context + p * shape.latent_dim + d, n), dot);
    }
    b.delta[p] = sum_tree(dot);
    b.lse[p] = p < g.pairs ? lse[p] : 0.0F;
  }
}

// Scores become p, dp becomes ds; both zero where a lane does not see the key.
inline void backward_scores(const BackwardGroup& b, int count, float scale) {
  const Group& g = b.g;
  const V16 factor = set1(scale);
  const V16 zero = set1(0.0F);
  for (int lane = 0; lane < g.lanes; lane += kLanes) {
    const V16 seen = load(g.remaining + lane);
    const V16 lse = load(b.lse + lane);
    const V16 delta = load(b.delta + lane);
    for (int j = 0; j < count; ++j) {
      float* s = g.scores + j * g.lanes + lane;
      float* d = b.d_scores + j * g.lanes + lane;
      const M16 present = lt(set1(static_cast<float>(j)), seen);
      const V16 p = select(present, vexp(sub(mul(load(s), factor), lse)), zero);
      store(s, p);
      store(d, select(present, mul(mul(factor, p), sub(load(d), delta)), zero));
    }
  }
}

// Probabilities averaged over heads, by list entry.
inline void average_probs(const Group& g, std::int64_t first, int count, std::int64_t stride, float* mean_probs) {
  for (int r = 0; r < g.rows; ++r)
    for (int j = 0; j < count; ++j) {
      float sum = 0.0F;
      for (int h = 0; h < g.heads; ++h) sum += g.scores[j * g.lanes + r * g.heads + h];
      mean_probs[r * stride + first + j] = sum / static_cast<float>(g.heads);
    }
}

inline void backward_group(const MlaShape& shape, const float* keys, KeyList list, BackwardGroup& b, float* d_q,
                           float* d_keys, float* mean_probs) {
  Group& g = b.g;
  const int key_dim = shape.latent_dim + shape.extra_dim;
  const int dim = padded(key_dim);
  const int latent = padded(shape.latent_dim);
  for (std::int64_t first = 0; first < b.longest; first += kTile) {
    const int count = static_cast<int>(clamp_count(b.longest - first));
    gather_rows(keys, key_dim, list, first, count, g.tile);
    const Elements tile{g.tile, dim, 1};
    product(count, g.lanes, key_dim, tile, g.q, g.lanes, g.scores, g.lanes);
    product(count, g.lanes, shape.latent_dim, tile, b.d_lanes, g.lanes, b.d_scores, g.lanes);
    set_remaining(g, first, count);
    backward_scores(b, count, shape.scale);
    if (mean_probs != nullptr) average_probs(g, first, count, b.stride, mean_probs);
    product(g.pairs, dim, count, {b.d_scores, 1, g.lanes}, g.tile, dim, b.d_q, dim,
            first == 0 ? Start::zero : Start::out);
    product(count, dim, g.pairs, {b.d_scores, g.lanes, 1}, b.q_rows, dim, b.d_tile, dim);
    product(count, latent, g.pairs, {g.scores, g.lanes, 1}, b.d_rows, latent, b.d_tile, dim, Start::out);
    scatter_rows(b.d_tile, key_dim, list, first, count, d_keys);
  }
  for (int p = 0; p < g.pairs; ++p) add_row(b.d_q + p * dim, key_dim, d_q + p * key_dim);
}

inline std::size_t backward_floats(std::size_t pairs, std::size_t lanes, std::size_t dim, std::size_t latent) {
  return lanes * (dim + latent + 2 * kTile + 3) + pairs * (2 * dim + latent) + 2 * kTile * dim;
}

void mla_attention_backward(const MlaShape& shape, const float* keys, std::int64_t rows, const float* q,
                            const std::int32_t* selected, std::int64_t selected_stride, const std::int32_t* counts,
                            const float* context, const float* lse, const float* d_context, float* d_q, float* d_keys,
                            float* mean_probs) {
  const int most = group_rows(shape.heads, selected != nullptr, rows);
  const int max_pairs = most * shape.heads;
  const int max_lanes = padded(max_pairs);
  const int key_dim = shape.latent_dim + shape.extra_dim;
  const int dim = padded(key_dim);
  const int latent = padded(shape.latent_dim);
  Arena arena(backward_floats(static_cast<std::size_t>(max_pairs), static_cast<std::size_t>(max_lanes),
                              static_cast<std::size_t>(dim), static_cast<std::size_t>(latent)));
  BackwardGroup b{};
  Group& g = b.g;
  g.heads = shape.heads;
  g.q = arena.take(dim, max_lanes);
  b.d_lanes = arena.take(latent, max_lanes);
  g.scores = arena.take(kTile, max_lanes);
  b.d_scores = arena.take(kTile, max_lanes);
  for (float** p : {&g.remaining, &b.delta, &b.lse}) *p = arena.take(1, max_lanes);
  b.q_rows = arena.take(max_pairs, dim);
  b.d_q = arena.take(max_pairs, dim);
  b.d_rows = arena.take(max_pairs, latent);
  g.tile = arena.take(kTile, dim);
  b.d_tile = arena.take(kTile, dim);
  b.stride = selected != nullptr ? selected_stride : rows;
  for (std::int64_t r = 0; r < rows; r += g.rows) {
    g.rows = static_cast<int>(rows - r < most ? rows - r : most);
    g.pairs = g.rows * shape.heads;
    g.lanes = padded(g.pairs);
    g.first_count = selected != nullptr ? counts[r] : r + 1;
    b.longest = g.first_count + g.rows - 1;
    const std::int64_t pair = r * shape.heads;
    float* probs = mean_probs != nullptr ? mean_probs + r * b.stride : nullptr;
    for (int i = 0; i < g.rows && probs != nullptr; ++i)
      for (std::int64_t e = b.longest; e < b.stride; ++e) probs[i * b.stride + e] = 0.0F;
    load_group(shape, key_dim, q + pair * key_dim, context + pair * shape.latent_dim, lse + pair,
               d_context + pair * shape.latent_dim, b);
    backward_group(shape, keys, {selected != nullptr ? selected + r * selected_stride : nullptr}, b,
                   d_q + pair * key_dim, d_keys, probs);
  }
}

struct IndexGroup {
  int lanes;
  float *q, *q_rows, *tile, *dots;            // [dim][lanes], [heads][dim], [64][dim], [64][lanes]
  float *d_q, *d_tile, *weights, *d_weights;  // [heads][dim], [64][dim], [lanes], [lanes]
};

// Dots become d_score_j w_h where the ReLU is open; d_weights collects d_score_j relu(dot).
inline void backward_dots(const IndexGroup& g, int count, const float* d_scores) {
  const V16 zero = set1(0.0F);
  for (int lane = 0; lane < g.lanes; lane += kLanes) {
    const V16 weights = load(g.weights + lane);
    V16 d_weights = load(g.d_weights + lane);
    for (int j = 0; j < count; ++j) {
      float* at = g.dots + j * g.lanes + lane;
      const V16 dot = load(at);
      const V16 d_score = set1(d_scores[j]);
      d_weights = fma(d_score, max(dot, zero), d_weights);
      store(at, select(lt(zero, dot), mul(d_score, weights), zero));
    }
    store(g.d_weights + lane, d_weights);
  }
}

void index_scores_backward(const IndexShape& shape, const float* keys, std::int64_t rows, const float* q,
                           const float* w, const std::int32_t* selected, std::int64_t selected_stride,
                           const std::int32_t* counts, const float* d_scores, float* d_q, float* d_w, float* d_keys) {
  const int dim = padded(shape.dim);
  IndexGroup g{};
  g.lanes = padded(shape.heads);
  Arena arena(static_cast<std::size_t>(dim + kTile + 2) * static_cast<std::size_t>(g.lanes) +
              static_cast<std::size_t>(2 * shape.heads + 2 * kTile) * static_cast<std::size_t>(dim));
  g.q = arena.take(dim, g.lanes);
  g.dots = arena.take(kTile, g.lanes);
  g.weights = arena.take(1, g.lanes);
  g.d_weights = arena.take(1, g.lanes);
  g.q_rows = arena.take(shape.heads, dim);
  g.d_q = arena.take(shape.heads, dim);
  g.tile = arena.take(kTile, dim);
  g.d_tile = arena.take(kTile, dim);
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t pair = r * shape.heads;
    const std::int64_t entries = selected != nullptr ? counts[r] : r + 1;
    const KeyList list{selected != nullptr ? selected + r * selected_stride : nullptr};
    const float* d_row = d_scores + r * (selected != nullptr ? selected_stride : rows);
    pad_rows(q + pair * shape.dim, shape.heads, shape.dim, g.q_rows);
    pack_lanes(g.q_rows, dim, shape.heads, shape.dim, g.q, g.lanes);
    pad_rows(w + pair, 1, shape.heads, g.weights);
    for (int h = 0; h < g.lanes; h += kLanes) store(g.d_weights + h, set1(0.0F));
    for (std::int64_t first = 0; first < entries; first += kTile) {
      const int count = static_cast<int>(clamp_count(entries - first));
      gather_rows(keys, shape.dim, list, first, count, g.tile);
      product(count, g.lanes, shape.dim, {g.tile, dim, 1}, g.q, g.lanes, g.dots, g.lanes);
      backward_dots(g, count, d_row + first);
      product(shape.heads, dim, count, {g.dots, 1, g.lanes}, g.tile, dim, g.d_q, dim,
              first == 0 ? Start::zero : Start::out);
      product(count, dim, shape.heads, {g.dots, g.lanes, 1}, g.q_rows, dim, g.d_tile, dim);
      scatter_rows(g.d_tile, shape.dim, list, first, count, d_keys);
    }
    for (int h = 0; h < shape.heads && entries > 0; ++h)
      add_row(g.d_q + h * dim, shape.dim, d_q + (pair + h) * shape.dim);
    add_row(g.d_weights, shape.heads, d_w + pair);
  }
}

}  // namespace
}  // namespace tidelock::numerics::TIDELOCK_ISA_NAMESPACE

// The attention kernels over V16; compiled once per instruction set by attention_{scalar,avx2,avx512}.cpp.
// attention_reference.cpp defines every chain.
//
// Query rows that share their keys (consecutive rows of dense attention) are taken in groups; a (row, head) pair is one
// lane of the scores, so maxima, exponentials and sums need no horizontal step. Keys are widened to float32 once per
// tile and group. Values have the latent's dimensions as lanes.
#pragma once

#include <initializer_list>
#include <limits>

#include "numerics/attention_kernels.hpp"
#include "numerics/math.inl"
#include "numerics/scratch.hpp"
#include "numerics/tiles.inl"

namespace tidelock::numerics::TIDELOCK_ISA_NAMESPACE {
namespace {

constexpr int kTile = kBlockTokens;
constexpr int kGroupPairs = 64;  // enough to pay for widening a tile, few enough for the second-level cache
constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline int padded(int n) {
  return (n + kLanes - 1) / kLanes * kLanes;
}

// Divides one piece of scratch memory into arrays.
class Arena {
 public:
  explicit Arena(std::size_t floats) : next_(kernel_scratch(floats)) {}
  float* take(int rows, int columns) {
    float* p = next_;
    next_ += static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns);
    return p;
  }

 private:
  float* next_;
};

// The keys of one query row: all positions from 0, or a list.
struct KeyList {
  const std::int32_t* positions;  // null: entry e is position e
  std::int64_t at(std::int64_t entry) const { return positions != nullptr ? positions[entry] : entry; }
};

inline void widen_row(const BlockView& view, std::int64_t position, float* to) {
  const std::byte* from = row_address(view, position);
  const int full = view.dim / kLanes * kLanes;
  for (int d = 0; d < full; d += kLanes)
    store(to + d, view.format == Format::f32 ? load(reinterpret_cast<const float*>(from) + d)
                                             : load(reinterpret_cast<const bf16*>(from) + d));
  if (full == view.dim) return;
  alignas(64) float tail[kLanes] = {};
  for (int d = full; d < view.dim; ++d)
    tail[d - full] = view.format == Format::f32 ? reinterpret_cast<const float*>(from)[d]
                                                : to_float(reinterpret_cast<const bf16*>(from)[d]);
  store(to + full, load(tail));
}

// Entries [first, first + count) of the list as rows [count][padded dim], zeros in the padding.
inline void load_tile(const BlockView& view, KeyList list, std::int64_t first, int count, float* tile) {
  const Stride row = padded(view.dim);
  for (int j = 0; j < count; ++j) widen_row(view, list.at(first + j), tile + j * row);
}

// x [rows][dim] at any stride, turned to [dim][lanes] with (absent) rows as zero lanes.
inline void pack_lanes(const float* x, Stride x_row, int rows, int dim, float* out, int lanes) {
  for (int p = 0; p < lanes; p += kLanes)
    to_lanes(x + p * x_row, x_row, rows - p < kLanes ? rows - p : kLanes, dim, out + p, lanes);
}

// A group of query rows and the running result of each of its lanes.
struct Group {
  int rows, heads, pairs, lanes;
  std::int64_t first_count;  // length of the first row's list; each later row has one more (dense), rows is 1 otherwise
  float *q, *tile, *scores, *out, *part;           // [dim][lanes], [64][dim], [64][lanes], [pairs][latent], [pairs][64]
  float *maximum, *sum, *keep, *take, *remaining;  // [lanes] each
};

inline std::int64_t clamp_count(std::int64_t n) {
  return n < 0 ? 0 : n > kTile ? kTile : n;
}

// How many entries of the tile at `first` each lane may see. Returns whether every lane sees all `count`.
inline bool set_remaining(Group& g, std::int64_t first, int count) {
  for (int p = 0; p < g.lanes; ++p)
    g.remaining[p] = p < g.pairs ? static_cast<float>(clamp_count(g.first_count + p / g.heads - first)) : 0.0F;
  return clamp_count(g.first_count - first) >= count;
}

// Scores of 16 lanes become probabilities relative to the tile's maximum, which is merged with the running one.
template <bool kMasked>
inline void soften_lanes(const Group& g, int lane, int count, float scale, bool first_tile) {
  float* s = g.scores + lane;
  const V16 seen = load(g.remaining + lane);
  const V16 factor = set1(scale);
  const V16 lowest = set1(-kInfinity);
  V16 top = lowest;
  for (int j = 0; j < count; ++j) {
    V16 x = mul(load(s + j * g.lanes), factor);
    if constexpr (kMasked) x = select(lt(set1(static_cast<float>(j)), seen), x, lowest);
    store(s + j * g.lanes, x);
    top = max(x, top);
  }
  V16 partial[kLanes];
  for (auto& x : partial) x = set1(0.0F);
  for (int j0 = 0; j0 < count; j0 += kLanes) {
    const int end = count - j0 < kLanes ? count - j0 : kLanes;
    for (int i = 0; i < end; ++i) {
      V16 p = vexp(sub(load(s + (j0 + i) * g.lanes), top));
      if constexpr (kMasked) p = select(lt(set1(static_cast<float>(j0 + i)), seen), p, set1(0.0F));
      store(s + (j0 + i) * g.lanes, p);
      partial[i] = add(partial[i], p);
    }
  }
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) partial[i] = add(partial[i], partial[i + half]);
  if (first_tile) {
    store(g.maximum + lane, top);
    store(g.sum + lane, partial[0]);
    return;
  }
  const V16 before = load(g.maximum + lane);
  const V16 after = max(before, top);
  const V16 keep = vexp(sub(before, after));
  const V16 take = vexp(sub(top, after));
  const V16 sum = load(g.sum + lane);
  const V16 merged = fma(partial[0], take, mul(sum, keep));
  store(g.keep + lane, keep);
  store(g.take + lane, take);
  store(g.maximum + lane, after);
  const M16 present = lt(set1(0.0F), seen);  // a row whose list has ended keeps what it has
  store(g.sum + lane, kMasked ? select(present, merged, sum) : merged);
}

// out of pairs [begin, begin + n) takes in this tile's `count` values.
inline void take_values(const Group& g, int begin, int n, int count, int latent, Stride tile_row, bool first_tile) {
  const Elements p{g.scores + begin, 1, g.lanes};
  float* out = g.out + static_cast<Stride>(begin) * latent;
  if (first_tile) {
    product(n, latent, count, p, g.tile, tile_row, out, latent);
    return;
  }
  for (int c = 0; c < latent; c += kTile) {
    const int width = latent - c < kTile ? latent - c : kTile;
    product(n, width, count, p, g.tile + c, tile_row, g.part, kTile);
    for (int r = 0; r < n; ++r) {
      const V16 keep = set1(g.keep[begin + r]);
      const V16 take = set1(g.take[begin + r]);
      float* to = out + r * latent + c;
      for (int x = 0; x < width; x += kLanes)
        store(to + x, fma(load(g.part + r * kTile + x), take, mul(load(to + x), keep)));
    }
  }
}

inline void attend_group(const MlaShape& shape, const BlockView& keys, KeyList list, Group& g) {
  const int dim = padded(keys.dim);
  const int latent = padded(shape.latent_dim);
  const std::int64_t longest = g.first_count + g.rows - 1;
  for (std::int64_t first = 0; first < longest; first += kTile) {
    const int count = static_cast<int>(clamp_count(longest - first));
    load_tile(keys, list, first, count, g.tile);
    product(count, g.lanes, keys.dim, {g.tile, dim, 1}, g.q, g.lanes, g.scores, g.lanes);
    const bool all = set_remaining(g, first, count);
    for (int lane = 0; lane < g.lanes; lane += kLanes) {
      if (all)
        soften_lanes<false>(g, lane, count, shape.scale, first == 0);
      else
        soften_lanes<true>(g, lane, count, shape.scale, first == 0);
    }
    if (all) {
      take_values(g, 0, g.pairs, count, latent, dim, first == 0);
      continue;
    }
    for (int r = 0; r < g.rows; ++r) {  // an unseen key must not touch a row, not even as 0 * key
      const int seen = static_cast<int>(clamp_count(g.first_count + r - first));
      if (seen > 0) take_values(g, r * g.heads, g.heads, seen, latent, dim, first == 0);
    }
  }
}

// context = out / sum, lse = maximum + log(sum).
inline void finish_group(const MlaShape& shape, const Group& g, float* context, float* lse) {
  const int latent = padded(shape.latent_dim);
  for (int p = 0; p < g.pairs; ++p) {
    const V16 sum = set1(g.sum[p]);
    float* to = context + static_cast<Stride>(p) * shape.latent_dim;
    for (int d = 0; d < shape.latent_dim; d += kLanes) {
      const V16 x = div(load(g.out + static_cast<Stride>(p) * latent + d), sum);
      if (d + kLanes <= shape.latent_dim)
        store(to + d, x);
      else
        store_n(to + d, x, shape.latent_dim - d);
    }
  }
  if (lse == nullptr) return;
  for (int lane = 0; lane < g.pairs; lane += kLanes) {
    const V16 x = add(load(g.maximum + lane), vlog(load(g.sum + lane)));
    store_n(lse + lane, x, g.pairs - lane < kLanes ? g.pairs - lane : kLanes);
  }
}

// How many consecutive rows with the same keys are taken together.
inline int group_rows(int heads, bool selected, std::int64_t rows) {
  if (selected || heads >= kGroupPairs) return 1;
  const int most = kGroupPairs / heads;
  return rows < most ? static_cast<int>(rows) : most;
}

void mla_attention(const MlaShape& shape, const BlockView& keys, std::int64_t position, std::int64_t rows,
                   const float* q, const std::int32_t* selected, std::int64_t selected_stride,
                   const std::int32_t* counts, float* context, float* lse) {
  const int most = group_rows(shape.heads, selected != nullptr, rows);
  const int max_pairs = most * shape.heads;
  const int max_lanes = padded(max_pairs);
  const int dim = padded(keys.dim);
  const int latent = padded(shape.latent_dim);
  Arena arena(static_cast<std::size_t>(dim + kTile + 5) * static_cast<std::size_t>(max_lanes) +
              static_cast<std::size_t>(kTile) * static_cast<std::size_t>(dim) +
              static_cast<std::size_t>(max_pairs) * static_cast<std::size_t>(latent + kTile));
  Group g{};
  g.heads = shape.heads;
  g.q = arena.take(dim, max_lanes);
  g.tile = arena.take(kTile, dim);
  g.scores = arena.take(kTile, max_lanes);
  g.out = arena.take(max_pairs, latent);
  g.part = arena.take(max_pairs, kTile);
  for (float** p : {&g.maximum, &g.sum, &g.keep, &g.take, &g.remaining}) *p = arena.take(1, max_lanes);
  for (std::int64_t r = 0; r < rows; r += g.rows) {
    g.rows = static_cast<int>(rows - r < most ? rows - r : most);
    g.pairs = g.rows * shape.heads;
    g.lanes = padded(g.pairs);
    g.first_count = selected != nullptr ? counts[r] : position + r + 1;
    const std::int64_t pair = r * shape.heads;
    pack_lanes(q + pair * keys.dim, keys.dim, g.pairs, keys.dim, g.q, g.lanes);
    attend_group(shape, keys, {selected != nullptr ? selected + r * selected_stride : nullptr}, g);
    finish_group(shape, g, context + pair * shape.latent_dim, lse != nullptr ? lse + pair : nullptr);
  }
}

// Scores of one row for the keys of one tile: lanes over keys, heads into 16 partial sums.
inline void score_tile(const IndexShape& shape, const float* dots, const float* w, int count, float* scores) {
  for (int lane = 0; lane < count; lane += kLanes) {
    V16 partial[kLanes];
    for (auto& x : partial) x = set1(0.0F);
    for (int h0 = 0; h0 < shape.heads; h0 += kLanes) {
      const int end = shape.heads - h0 < kLanes ? shape.heads - h0 : kLanes;
      for (int i = 0; i < end; ++i) {
        const V16 dot = max(load(dots + (h0 + i) * kTile + lane), set1(0.0F));
        partial[i] = fma(set1(w[h0 + i]), dot, partial[i]);
      }
    }
    for (int half = 8; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) partial[i] = add(partial[i], partial[i + half]);
    store_n(scores + lane, partial[0], count - lane < kLanes ? count - lane : kLanes);
  }
}

void index_scores(const IndexShape& shape, const BlockView& keys, std::int64_t position, std::int64_t rows,
                  const float* q, const float* w, float* scores, std::int64_t score_stride) {
  const int dim = padded(shape.dim);
  Arena arena(static_cast<std::size_t>(kTile) * static_cast<std::size_t>(2 * dim + shape.heads));
  float* tile = arena.take(kTile, dim);
  float* turned = arena.take(dim, kTile);
  float* dots = arena.take(shape.heads, kTile);
  for (std::int64_t first = 0; first < position + rows; first += kTile) {
    const int stored = static_cast<int>(clamp_count(position + rows - first));
    load_tile(keys, {nullptr}, first, stored, tile);
    pack_lanes(tile, dim, stored, shape.dim, turned, kTile);
    for (std::int64_t r = first > position ? first - position : 0; r < rows; ++r) {
      const int count = static_cast<int>(clamp_count(position + r + 1 - first));
      const std::int64_t pair = r * shape.heads;
      product(shape.heads, padded(count), shape.dim, {q + pair * shape.dim, shape.dim, 1}, turned, kTile, dots, kTile);
      score_tile(shape, dots, w + pair, count, scores + r * score_stride + first);
    }
  }
}

}  // namespace
}  // namespace tidelock::numerics::TIDELOCK_ISA_NAMESPACE

// The KDA forward kernels over V16; compiled once per instruction set by kda_{scalar,avx2,avx512}.cpp.
// kda_reference.cpp defines every chain; here rows of one chunk are only evaluated together.
#pragma once

#include <cstring>

#include "numerics/kda_kernels.hpp"
#include "numerics/math.inl"
#include "numerics/tiles.inl"

namespace tidelock::numerics::TIDELOCK_ISA_NAMESPACE {
namespace {

// Rows i0 .. i0+n-1 of one chunk of one head. Row r of q, k, g is at r * key_stride, of v and out at r * value_stride.
struct ChunkRows {
  int i0, n;
  const float *q, *k, *v, *g, *beta;
  Stride key_stride, value_stride, beta_stride;
};

// The open chunk of one head, as kept in its state.
struct OpenChunk {
  float *keys, *u, *gates;
};

struct ChunkScratch {
  alignas(64) float decayed[2 * kKdaChunk * kKdaMaxDim];  // [2n][key_dim]: k_i e^{G_i} (centred), then q_i
  alignas(64) float product[2 * kKdaChunk * kKdaMaxDim];  // [2n][value_dim]: decayed times S
  alignas(64) float pairs[2 * kKdaChunk * kKdaChunk];     // [2n][16]: a_ij, then b_ij; only j <= i means anything
  alignas(64) float rows[kKdaChunk * kKdaMaxDim];         // [n][key_dim]: keys before they are turned
};

// Columns i0 .. i0+n-1 of keys [key_dim][16] from rows [n][key_dim].
inline void store_columns(const float* rows, Stride stride, int i0, int n, int key_dim, float* keys) {
  if (n == kKdaChunk) {
    to_lanes(rows, stride, kKdaChunk, key_dim, keys, kKdaChunk);
    return;
  }
  for (int r = 0; r < n; ++r)
    for (int d = 0; d < key_dim; ++d) keys[d * kKdaChunk + i0 + r] = rows[r * stride + d];
}

// Bounded: the running gate is one vector per 16 channels; keys are stored times e^{-G} / centre.
[[gnu::flatten]] inline void decay_bounded(const KdaShape& shape, const ChunkRows& c, const OpenChunk& open,
                                           ChunkScratch& w) {
  const int dim = shape.key_dim;
  const V16 up = set1(kKdaCentre);
  const V16 down = set1(1.0F / kKdaCentre);
  for (int r = 0; r < c.n; ++r) {
    for (int d = 0; d < dim; d += kLanes) {
      const Stride at = r * c.key_stride + d;
      V16 gate = load(c.g + at);
      if (c.i0 + r > 0) gate = add(load(open.gates + d), gate);
      store(open.gates + d, gate);
      const V16 decay = mul(vexp(gate), up);
      const V16 key = load(c.k + at);
      store(w.decayed + r * dim + d, mul(key, decay));
      store(w.decayed + (c.n + r) * dim + d, mul(load(c.q + at), decay));
      store(w.rows + r * dim + d, mul(key, mul(vexp(sub(set1(0.0F), gate)), down)));
    }
  }
  store_columns(w.rows, dim, c.i0, c.n, dim, open.keys);
}

// Unbounded: all gates of the chunk are kept, [key_dim][16], and keys as they came.
[[gnu::flatten]] inline void decay_unbounded(const KdaShape& shape, const ChunkRows& c, const OpenChunk& open,
                                             ChunkScratch& w) {
  const int dim = shape.key_dim;
  alignas(64) float gates[kKdaMaxDim];
  for (int d = 0; d < dim && c.i0 > 0; ++d) gates[d] = open.gates[d * kKdaChunk + c.i0 - 1];
  for (int r = 0; r < c.n; ++r) {
    for (int d = 0; d < dim; d += kLanes) {
      const Stride at = r * c.key_stride + d;
      V16 gate = load(c.g + at);
      if (c.i0 + r > 0) gate = add(load(gates + d), gate);
      store(gates + d, gate);
      const V16 decay = vexp(gate);
      store(w.decayed + r * dim + d, mul(load(c.k + at), decay));
      store(w.decayed + (c.n + r) * dim + d, mul(load(c.q + at), decay));
      store(w.rows + r * dim + d, gate);
    }
  }
  store_columns(w.rows, dim, c.i0, c.n, dim, open.gates);
  store_columns(c.k, c.key_stride, c.i0, c.n, dim, open.keys);
}

// a_i. and b_i. of the unbounded form, for R rows at once: lanes over j.
template <int R>
inline void pairs_unbounded(const KdaShape& shape, const ChunkRows& c, const OpenChunk& open, int r0, float* a,
                            float* b) {
  V16 sum_a[R], sum_b[R];
  for (int r = 0; r < R; ++r) sum_a[r] = sum_b[r] = set1(0.0F);
  for (int d = 0; d < shape.key_dim; ++d) {
    const V16 key = load(open.keys + d * kKdaChunk);
    const V16 gate = load(open.gates + d * kKdaChunk);
    for (int r = 0; r < R; ++r) {
      const Stride at = (r0 + r) * c.key_stride + d;
      const V16 decay = vexp(sub(set1(open.gates[d * kKdaChunk + c.i0 + r0 + r]), gate));
      sum_a[r] = fma(mul(set1(c.k[at]), key), decay, sum_a[r]);
      sum_b[r] = fma(mul(set1(c.q[at]), key), decay, sum_b[r]);
    }
  }
  for (int r = 0; r < R; ++r) {
    store(a + Stride{r0 + r} * kKdaChunk, sum_a[r]);
    store(b + Stride{r0 + r} * kKdaChunk, sum_b[r]);
  }
}

inline void pair_products(const KdaShape& shape, const ChunkRows& c, const OpenChunk& open, ChunkScratch& w) {
  if (shape.bounded) {
    product(2 * c.n, kKdaChunk, shape.key_dim, {w.decayed, shape.key_dim, 1}, open.keys, kKdaChunk, w.pairs, kKdaChunk);
    return;
  }
  float* b = w.pairs + c.n * kKdaChunk;
  int r = 0;
  for (; r + 4 <= c.n; r += 4) pairs_unbounded<4>(shape, c, open, r, w.pairs, b);
  for (; r < c.n; ++r) pairs_unbounded<1>(shape, c, open, r, w.pairs, b);
}

// What takes the centre out of a product of decayed rows and S.
inline float uncentre(const KdaShape& shape) {
  return shape.bounded ? 1.0F / kKdaCentre : 1.0F;
}

// Body{}(Width<vectors>, column) over blocks of columns whose sums for four rows fit the registers.
template <int N>
struct Width {
  static constexpr int value = N;
};
template <class Body>
inline void for_columns(int dim, Body body) {
  int column = 0;
#if defined(__AVX512F__)
  for (; column + 4 * kLanes <= dim; column += 4 * kLanes) body(Width<4>{}, column);
  for (; column + 2 * kLanes <= dim; column += 2 * kLanes) body(Width<2>{}, column);
#endif
  for (; column < dim; column += kLanes) body(Width<1>{}, column);
}

// acc[r] = product of row r with S, the centre taken out.
template <int R, int C>
inline void start_rows(const KdaShape& shape, const float* product, V16 (&acc)[R][C]) {
  const V16 scale = set1(uncentre(shape));
  for (int r = 0; r < R; ++r)
    for (int x = 0; x < C; ++x) acc[r][x] = mul(load(product + r * shape.value_dim + x * kLanes), scale);
}

// Forward substitution for rows r0 .. r0+R-1: u_i = beta_i (v_i - (k_i e^{G_i} S + sum a_ij u_j)). What earlier rows
// add comes as a tile, what the block's own rows add follows, still ascending in j. `residual`, when not null, keeps
// the bracket [16][value_dim] for the backward pass.
template <int R, int C>
inline void correct_rows(const KdaShape& shape, const ChunkRows& c, const OpenChunk& open, const ChunkScratch& w,
                         int r0, int column, float* residual) {
  const Stride dim = shape.value_dim;
  const int before = c.i0 + r0;
  const float* a = w.pairs + Stride{r0} * kKdaChunk;
  float* u = open.u + column;
  V16 acc[R][C];
  start_rows(shape, w.product + r0 * dim + column, acc);
  accumulate(acc, {a, kKdaChunk, 1}, u, dim, before);
  for (int r = 0; r < R; ++r) {
    const V16 beta = set1(c.beta[(r0 + r) * c.beta_stride]);
    const float* v = c.v + (r0 + r) * c.value_stride + column;
    V16 corrected[C];
    for (int x = 0; x < C; ++x) {
      const V16 rest = sub(load(v + x * kLanes), acc[r][x]);
      if (residual != nullptr) store(residual + (before + r) * dim + column + x * kLanes, rest);
      corrected[x] = mul(beta, rest);
    }
    for (int x = 0; x < C; ++x) store(u + (before + r) * dim + x * kLanes, corrected[x]);
    for (int l = r + 1; l < R; ++l) {
      const V16 pair = set1(a[l * kKdaChunk + before + r]);
      for (int x = 0; x < C; ++x) acc[l][x] = fma(pair, corrected[x], acc[l][x]);
    }
  }
}

// o_i = q_i e^{G_i} S + sum over j <= i of b_ij u_j, for rows r0 .. r0+R-1.
template <int R, int C>
inline void output_rows(const KdaShape& shape, const ChunkRows& c, const OpenChunk& open, const ChunkScratch& w, int r0,
                        int column, float* out) {
  const Stride dim = shape.value_dim;
  const int common = c.i0 + r0 + 1;
  const float* b = w.pairs + Stride{c.n + r0} * kKdaChunk;
  const float* u = open.u + column;
  V16 acc[R][C];
  start_rows(shape, w.product + (c.n + r0) * dim + column, acc);
  accumulate(acc, {b, kKdaChunk, 1}, u, dim, common);
  for (int r = 1; r < R; ++r)
    for (int l = r; l < R; ++l) {
      const int j = common + r - 1;
      const V16 pair = set1(b[l * kKdaChunk + j]);
      for (int x = 0; x < C; ++x) acc[l][x] = fma(pair, load(u + j * dim + x * kLanes), acc[l][x]);
    }
  for (int r = 0; r < R; ++r)
    for (int x = 0; x < C; ++x) store(out + (r0 + r) * c.value_stride + column + x * kLanes, acc[r][x]);
}

inline void correct(const KdaShape& shape, const ChunkRows& c, const OpenChunk& open, const ChunkScratch& w,
                    float* residual) {
  for_columns(shape.value_dim, [&](auto width, int column) {
    constexpr int C = decltype(width)::value;
    int r = 0;
    for (; r + 4 <= c.n; r += 4) correct_rows<4, C>(shape, c, open, w, r, column, residual);
    for (; r < c.n; ++r) correct_rows<1, C>(shape, c, open, w, r, column, residual);
  });
}

inline void output(const KdaShape& shape, const ChunkRows& c, const OpenChunk& open, const ChunkScratch& w,
                   float* out) {
  for_columns(shape.value_dim, [&](auto width, int column) {
    constexpr int C = decltype(width)::value;
    int r = 0;
    for (; r + 4 <= c.n; r += 4) output_rows<4, C>(shape, c, open, w, r, column, out);
    for (; r < c.n; ++r) output_rows<1, C>(shape, c, open, w, r, column, out);
  });
}

inline void decay_and_pairs(const KdaShape& shape, const ChunkRows& c, const OpenChunk& open, ChunkScratch& w) {
  if (shape.bounded)
    decay_bounded(shape, c, open, w);
  else
    decay_unbounded(shape, c, open, w);
  pair_products(shape, c, open, w);
}

// e^{G_15} [key_dim] and k_j e^{G_15 - G_j} [key_dim][16] of a full chunk.
inline void commit_factors(const KdaShape& shape, const OpenChunk& open, int d, V16& decay16, float* kr) {
  alignas(64) float last[kLanes];
  if (shape.bounded)
    store(last, load(open.gates + d));
  else
    for (int i = 0; i < kLanes; ++i) last[i] = open.gates[(d + i) * kKdaChunk + kKdaChunk - 1];
  decay16 = vexp(load(last));
  alignas(64) float decay[kLanes];
  store(decay, decay16);
  for (int i = 0; i < kLanes; ++i) {
    const V16 key = load(open.keys + (d + i) * kKdaChunk);
    const V16 factor =
        shape.bounded ? set1(decay[i] * kKdaCentre) : vexp(sub(set1(last[i]), load(open.gates + (d + i) * kKdaChunk)));
    store(kr + i * kKdaChunk, mul(key, factor));
  }
}

// S = e^{G_15} S + sum over j of (k_j e^{G_15 - G_j}) u_j.
inline void commit_chunk(const KdaShape& shape, const OpenChunk& open, float* s) {
  constexpr int R = 4;
  const Stride dim = shape.value_dim;
  for (int d = 0; d < shape.key_dim; d += kLanes) {
    alignas(64) float kr[kLanes * kKdaChunk];
    alignas(64) float decay[kLanes];
    V16 decay16;
    commit_factors(shape, open, d, decay16, kr);
    store(decay, decay16);
    for_columns(shape.value_dim, [&](auto width, int column) {
      constexpr int C = decltype(width)::value;
      for (int i = 0; i < kLanes; i += R) {
        float* block = s + (d + i) * dim + column;
        V16 acc[R][C];
        for (int r = 0; r < R; ++r)
          for (int x = 0; x < C; ++x) acc[r][x] = mul(set1(decay[i + r]), load(block + r * dim + x * kLanes));
        accumulate(acc, {kr + i * kKdaChunk, kKdaChunk, 1}, open.u + column, dim, kKdaChunk);
        for (int r = 0; r < R; ++r)
          for (int x = 0; x < C; ++x) store(block + r * dim + x * kLanes, acc[r][x]);
      }
    });
  }
}

// Rows c of one head, all of one chunk. The state passes from one commit to the next.
inline void forward_chunk(const KdaShape& shape, const ChunkRows& c, float* state, float* out, float* entry_state,
                          ChunkScratch& w) {
  const KdaStateLayout layout(shape);
  const OpenChunk open{state + layout.keys, state + layout.corrected, state + layout.gates};
  if (c.i0 == 0 && entry_state != nullptr) std::memcpy(entry_state, state, layout.keys * sizeof(float));
  decay_and_pairs(shape, c, open, w);
  product(2 * c.n, shape.value_dim, shape.key_dim, {w.decayed, shape.key_dim, 1}, state, shape.value_dim, w.product,
          shape.value_dim);
  correct(shape, c, open, w, nullptr);
  output(shape, c, open, w, out);
  if (c.i0 + c.n < kKdaChunk) return;
  commit_chunk(shape, open, state);
  // A state holds nothing of a closed chunk: equal prefixes give equal bytes, however they were cut.
  std::memset(state + layout.keys, 0, (layout.size - layout.keys) * sizeof(float));
}

// Heads whose states fit half of a second-level cache of 1 MiB are taken chunk by chunk together: their rows share
// pages, and 16 rows of one head alone lie on as many pages as those of all.
inline int heads_together(std::size_t head_floats) {
  constexpr std::size_t kStateFloats = 384 * 1024 / sizeof(float);
  return head_floats < kStateFloats ? static_cast<int>(kStateFloats / head_floats) : 1;
}

void kda_forward(const KdaShape& shape, int head_begin, int head_end, std::int64_t position, std::int64_t rows,
                 const float* q, const float* k, const float* v, const float* g, const float* beta, float* state,
                 float* out, float* chunk_states) {
  const KdaStateLayout layout(shape);
  const int together = heads_together(layout.size);
  ChunkScratch w;
  ChunkRows c{};
  c.key_stride = Stride{shape.heads} * shape.key_dim;
  c.value_stride = Stride{shape.heads} * shape.value_dim;
  c.beta_stride = shape.heads;
  for (int first = head_begin; first < head_end; first += together) {
    const int last = head_end - first < together ? head_end : first + together;
    for (std::int64_t r = 0; r < rows; r += c.n) {
      c.i0 = static_cast<int>((position + r) % kKdaChunk);
      c.n = static_cast<int>(rows - r < kKdaChunk - c.i0 ? rows - r : kKdaChunk - c.i0);
      for (int h = first; h < last; ++h) {
        const Stride at = r * shape.heads + h;
        c.q = q + at * shape.key_dim;
        c.k = k + at * shape.key_dim;
        c.g = g + at * shape.key_dim;
        c.v = v + at * shape.value_dim;
        c.beta = beta + at;
        const auto chunk = static_cast<std::size_t>((position + r) / kKdaChunk * shape.heads + h);
        forward_chunk(shape, c, state + static_cast<std::size_t>(h) * layout.size, out + at * shape.value_dim,
                      chunk_states != nullptr ? chunk_states + chunk * layout.keys : nullptr, w);
      }
    }
  }
}

}  // namespace
}  // namespace tidelock::numerics::TIDELOCK_ISA_NAMESPACE

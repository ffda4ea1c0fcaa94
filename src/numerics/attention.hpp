// Multi-head latent attention in its absorbed form, dense or over a selected set, and the DSA index
// (spec/model.md 1.3, 4.1).
// Every function runs on the calling thread and is safe to call from many threads at once on disjoint outputs. Rows are
// independent, and so are heads: a caller may split a prefill by rows and a single row by heads (heads lie together).
// Lists must not be empty.
//
// Keys live in blocks of 64 tokens at absolute positions; a token's key is its latent followed by its shared extra dims
// (k_pe), its value is the latent. Scores of one query row: s_j = scale * sum over d ascending of q[d] * key_j[d] (fma
// chain from 0 in f32, keys widened from their stored format). The list of keys (all positions 0..t, or the selected
// ones in ascending position) is cut into tiles of 64 list entries; a tile yields its maximum, the sum of exp(s - max)
// (16 strided partial sums and the fixed tree) and o = sum of exp(s - max) * latent (fma chain ascending from 0). Tiles
// merge in ascending order: the first is taken as it is; then, with m' = max(m, m_t), c = exp(m - m') and
// c_t = exp(m_t - m'), l = fma(l_t, c_t, l * c) and o = fma(o_t, c_t, o * c). At the end context = o / l (a division
// per element) and lse = m + log(l). A selected list that holds every position equals dense attention by bits.
// A query row never reads a key after its own position, whatever that key holds.
#pragma once

#include <cstddef>
#include <cstdint>

#include "numerics/formats.hpp"

namespace tidelock::numerics {

inline constexpr int kBlockTokens = 64;

// Stored rows of one kind (latents or index keys) of one layer of one sequence: row s is `dim` elements of `format` at
// blocks[s / 64] + offset + (s % 64) * row_bytes. Not owned.
struct BlockView {
  std::byte* const* blocks = nullptr;
  std::size_t offset = 0;
  std::size_t row_bytes = 0;
  int dim = 0;
  Format format = Format::f32;
};

// Rounds x [rows, view.dim] to the view's format and stores it at positions [position, position + rows).
void store_rows(const BlockView& view, std::int64_t position, std::int64_t rows, const float* x);
// Reads rows [position, position + rows) back as float32 into x [rows, view.dim].
void load_rows(const BlockView& view, std::int64_t position, std::int64_t rows, float* x);

struct MlaShape {
  int heads, latent_dim, extra_dim;  // key dim = latent_dim + extra_dim
  float scale;
};

// Query rows at consecutive positions [position, position + rows) of one sequence; their keys are stored already.
// q: [rows, heads, latent_dim + extra_dim] (absorbed). selected: null for dense, else [rows, selected_stride] positions
// in ascending order, counts [rows]. context: [rows, heads, latent_dim]; lse: [rows, heads] log-sum-exp of scaled
// scores, may be null.
void mla_attention(const MlaShape& shape, const BlockView& keys, std::int64_t position, std::int64_t rows,
                   const float* q, const std::int32_t* selected, std::int64_t selected_stride,
                   const std::int32_t* counts, float* context, float* lse);

// Derivative for a sequence that starts at position 0; the selected set is a constant. keys: [rows, latent_dim +
// extra_dim] as stored (after load_rows). d_q, d_keys are added to. mean_probs, when not null: [rows, selected_stride
// or rows] receives the attention probabilities averaged over heads, by list entry (0 beyond a row's list). Rows are
// taken in ascending order, so gradients of keys add up in a fixed order.
void mla_attention_backward(const MlaShape& shape, const float* keys, std::int64_t rows, const float* q,
                            const std::int32_t* selected, std::int64_t selected_stride, const std::int32_t* counts,
                            const float* context, const float* lse, const float* d_context, float* d_q, float* d_keys,
                            float* mean_probs);

struct IndexShape {
  int heads, dim;
};

// scores[r][s] for s <= position + r (stride score_stride): sum over heads of w[r][h] * relu(q[r][h] . key_s), the dot
// as an ascending fma chain, the sum over heads as 16 strided partial sums (fma) and the fixed tree. q: [rows, heads,
// dim], w: [rows, heads] (already scaled).
void index_scores(const IndexShape& shape, const BlockView& keys, std::int64_t position, std::int64_t rows,
                  const float* q, const float* w, float* scores, std::int64_t score_stride);

// Derivative for a sequence from position 0 with gradients given for list entries only: d_scores [rows, selected_stride
// or rows]. keys [rows, dim] as stored. d_q, d_w, d_keys are added to.
void index_scores_backward(const IndexShape& shape, const float* keys, std::int64_t rows, const float* q,
                           const float* w, const std::int32_t* selected, std::int64_t selected_stride,
                           const std::int32_t* counts, const float* d_scores, float* d_q, float* d_w, float* d_keys);

// The min(k, n) best of scores[0..n) by the total order (score descending, then position descending: newer first),
// written in ascending position. Returns how many. NaN counts as -infinity; zeros of
// both signs and denormals are equal. Linear in n for every input.
std::int32_t select_top_k(const float* scores, std::int64_t n, std::int64_t k, std::int32_t* positions);

namespace reference {  // the definitions above as plain loops
void mla_attention(const MlaShape& shape, const BlockView& keys, std::int64_t position, std::int64_t rows,
                   const float* q, const std::int32_t* selected, std::int64_t selected_stride,
                   const std::int32_t* counts, float* context, float* lse);
void index_scores(const IndexShape& shape, const BlockView& keys, std::int64_t position, std::int64_t rows,
                  const float* q, const float* w, float* scores, std::int64_t score_stride);
}  // namespace reference

}  // namespace tidelock::numerics

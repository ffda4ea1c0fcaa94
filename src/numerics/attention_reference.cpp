// Attention and the DSA index as plain loops: the definition, and every rounding in it.
#include <cmath>
#include <limits>
#include <vector>

#include "numerics/attention_kernels.hpp"
#include "numerics/rowops.hpp"

namespace tidelock::numerics::reference {
namespace {

std::vector<float> widened(const BlockView& view, std::int64_t position) {
  std::vector<float> row(static_cast<std::size_t>(view.dim));
  load_rows(view, position, 1, row.data());
  return row;
}

// 16 strided partial sums start in `partial`; the fixed tree.
float tree(float (&partial)[16]) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) partial[i] += partial[i + half];
  return partial[0];
}

struct Partial {
  float maximum, sum;
  std::vector<float> out;  // [latent_dim]
};

// One tile: `keys` holds its rows in list order.
Partial attend_tile(const MlaShape& shape, const float* q, const std::vector<std::vector<float>>& keys) {
  Partial t{-std::numeric_limits<float>::infinity(), 0.0F,
            std::vector<float>(static_cast<std::size_t>(shape.latent_dim))};
  std::vector<float> p;
  for (const auto& key : keys) {
    float acc = 0.0F;
    for (std::size_t d = 0; d < key.size(); ++d) acc = std::fma(q[d], key[d], acc);
    p.push_back(acc * shape.scale);
    t.maximum = p.back() > t.maximum ? p.back() : t.maximum;
  }
  float partial[16] = {};
  for (std::size_t j = 0; j < keys.size(); ++j) {
    p[j] = exp(p[j] - t.maximum);
    partial[j % 16] += p[j];
    for (std::size_t d = 0; d < t.out.size(); ++d) t.out[d] = std::fma(p[j], keys[j][d], t.out[d]);
  }
  t.sum = tree(partial);
  return t;
}

void merge(Partial& all, const Partial& tile) {
  const float maximum = all.maximum > tile.maximum ? all.maximum : tile.maximum;
  const float keep = exp(all.maximum - maximum);
  const float take = exp(tile.maximum - maximum);
  all.maximum = maximum;
  all.sum = std::fma(tile.sum, take, all.sum * keep);
  for (std::size_t d = 0; d < all.out.size(); ++d) all.out[d] = std::fma(tile.out[d], take, all.out[d] * keep);
}

}  // namespace

void mla_attention(const MlaShape& shape, const BlockView& keys, std::int64_t position, std::int64_t rows,
                   const float* q, const std::int32_t* selected, std::int64_t selected_stride,
                   const std::int32_t* counts, float* context, float* lse) {
  for (std::int64_t r = 0; r < rows; ++r)
    for (int h = 0; h < shape.heads; ++h) {
      const std::int64_t count = selected != nullptr ? counts[r] : position + r + 1;
      Partial all{};
      for (std::int64_t first = 0; first < count; first += kBlockTokens) {
        std::vector<std::vector<float>> tile;
        for (std::int64_t e = first; e < count && e < first + kBlockTokens; ++e)
          tile.push_back(widened(keys, selected != nullptr ? selected[r * selected_stride + e] : e));
        const Partial part = attend_tile(shape, q + (r * shape.heads + h) * keys.dim, tile);
        if (first == 0)
          all = part;
        else
          merge(all, part);
      }
      float* out = context + (r * shape.heads + h) * shape.latent_dim;
      for (int d = 0; d < shape.latent_dim; ++d) out[d] = all.out[static_cast<std::size_t>(d)] / all.sum;
      if (lse != nullptr) lse[r * shape.heads + h] = all.maximum + log(all.sum);
    }
}

void index_scores(const IndexShape& shape, const BlockView& keys, std::int64_t position, std::int64_t rows,
                  const float* q, const float* w, float* scores, std::int64_t score_stride) {
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t s = 0; s <= position + r; ++s) {
      const std::vector<float> key = widened(keys, s);
      float partial[16] = {};
      for (int h = 0; h < shape.heads; ++h) {
        float dot = 0.0F;
        for (int d = 0; d < shape.dim; ++d)
          dot = std::fma(q[(r * shape.heads + h) * shape.dim + d], key[static_cast<std::size_t>(d)], dot);
        partial[h % 16] = std::fma(w[r * shape.heads + h], dot > 0.0F ? dot : 0.0F, partial[h % 16]);
      }
      scores[r * score_stride + s] = tree(partial);
    }
}

}  // namespace tidelock::numerics::reference

// Stored rows; chooses the instruction set's attention kernels.
#include "numerics/attention.hpp"

#include "base/error.hpp"
#include "numerics/attention_kernels.hpp"

namespace tidelock::numerics {
namespace {

void check_heads(const char* what, int heads, int dim) {
  if (heads < 1 || dim < 1) fail(ErrorCode::invalid_argument, "{}: {} heads of dimension {}", what, heads, dim);
}

void check_view(const MlaShape& shape, const BlockView& keys) {
  check_heads("attention", shape.heads, shape.latent_dim);
  if (shape.extra_dim < 0 || keys.dim != shape.latent_dim + shape.extra_dim)
    fail(ErrorCode::invalid_argument, "attention: stored keys of dimension {}, expected {} + {}", keys.dim,
         shape.latent_dim, shape.extra_dim);
}

}  // namespace

const AttentionKernels& attention_kernels() {
  switch (isa()) {
    case Isa::scalar:
      return attention_kernels_scalar();
    case Isa::avx2:
      return attention_kernels_avx2();
    case Isa::avx512:
    case Isa::avx512bf16:
      break;
  }
  return attention_kernels_avx512();
}

void store_rows(const BlockView& view, std::int64_t position, std::int64_t rows, const float* x) {
  for (std::int64_t r = 0; r < rows; ++r, x += view.dim) {
    std::byte* to = row_address(view, position + r);
    if (view.format == Format::f32) {
      auto* y = reinterpret_cast<float*>(to);
      for (int d = 0; d < view.dim; ++d) y[d] = x[d];
    } else {
      auto* y = reinterpret_cast<bf16*>(to);
      for (int d = 0; d < view.dim; ++d) y[d] = to_bf16(x[d]);
    }
  }
}

void load_rows(const BlockView& view, std::int64_t position, std::int64_t rows, float* x) {
  for (std::int64_t r = 0; r < rows; ++r, x += view.dim) {
    const std::byte* from = row_address(view, position + r);
    if (view.format == Format::f32) {
      const auto* y = reinterpret_cast<const float*>(from);
      for (int d = 0; d < view.dim; ++d) x[d] = y[d];
    } else {
      const auto* y = reinterpret_cast<const bf16*>(from);
      for (int d = 0; d < view.dim; ++d) x[d] = to_float(y[d]);
    }
  }
}

void mla_attention(const MlaShape& shape, const BlockView& keys, std::int64_t position, std::int64_t rows,
                   const float* q, const std::int32_t* selected, std::int64_t selected_stride,
                   const std::int32_t* counts, float* context, float* lse) {
  check_view(shape, keys);
  attention_kernels().mla_attention(shape, keys, position, rows, q, selected, selected_stride, counts, context, lse);
}

void mla_attention_backward(const MlaShape& shape, const float* keys, std::int64_t rows, const float* q,
                            const std::int32_t* selected, std::int64_t selected_stride, const std::int32_t* counts,
                            const float* context, const float* lse, const float* d_context, float* d_q, float* d_keys,
                            float* mean_probs) {
  check_heads("attention backward", shape.heads, shape.latent_dim);
  attention_kernels().mla_attention_backward(shape, keys, rows, q, selected, selected_stride, counts, context, lse,
                                             d_context, d_q, d_keys, mean_probs);
}

void index_scores(const IndexShape& shape, const BlockView& keys, std::int64_t position, std::int64_t rows,
                  const float* q, const float* w, float* scores, std::int64_t score_stride) {
  check_heads("index scores", shape.heads, shape.dim);
  if (keys.dim != shape.dim)
    fail(ErrorCode::invalid_argument, "index scores: stored keys of dimension {}, expected {}", keys.dim, shape.dim);
  attention_kernels().index_scores(shape, keys, position, rows, q, w, scores, score_stride);
}

void index_scores_backward(const IndexShape& shape, const float* keys, std::int64_t rows, const float* q,
                           const float* w, const std::int32_t* selected, std::int64_t selected_stride,
                           const std::int32_t* counts, const float* d_scores, float* d_q, float* d_w, float* d_keys) {
  check_heads("index scores backward", shape.heads, shape.dim);
  attention_kernels().index_scores_backward(shape, keys, rows, q, w, selected, selected_stride, counts, d_scores, d_q,
                                            d_w, d_keys);
}

}  // namespace tidelock::numerics

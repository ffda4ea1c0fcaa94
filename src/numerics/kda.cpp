// Chooses the instruction set's KDA kernels.
#include "numerics/kda.hpp"

#include "base/error.hpp"
#include "numerics/kda_kernels.hpp"

namespace tidelock::numerics {
namespace {

void check(const KdaShape& shape, int head_begin, int head_end) {
  const auto allowed = [](int dim) { return dim >= 16 && dim <= kKdaMaxDim && dim % 16 == 0; };
  if (!allowed(shape.key_dim) || !allowed(shape.value_dim))
    fail(ErrorCode::invalid_argument, "KDA: key_dim {}, value_dim {}: expected multiples of 16 up to {}", shape.key_dim,
         shape.value_dim, kKdaMaxDim);
  if (head_begin < 0 || head_begin > head_end || head_end > shape.heads)
    fail(ErrorCode::invalid_argument, "KDA: heads [{}, {}) of {}", head_begin, head_end, shape.heads);
}

}  // namespace

const KdaKernels& kda_kernels() {
  switch (isa()) {
    case Isa::scalar:
      return kda_kernels_scalar();
    case Isa::avx2:
      return kda_kernels_avx2();
    case Isa::avx512:
    case Isa::avx512bf16:
      break;
  }
  return kda_kernels_avx512();
}

std::size_t kda_head_state_floats(const KdaShape& shape) {
  return KdaStateLayout(shape).size;
}

void kda_forward(const KdaShape& shape, int head_begin, int head_end, std::int64_t position, std::int64_t rows,
                 const float* q, const float* k, const float* v, const float* g, const float* beta, float* state,
                 float* out, float* chunk_states) {
  check(shape, head_begin, head_end);
  kda_kernels().forward(shape, head_begin, head_end, position, rows, q, k, v, g, beta, state, out, chunk_states);
}

void kda_backward(const KdaShape& shape, int head_begin, int head_end, std::int64_t rows, const float* q,
                  const float* k, const float* v, const float* g, const float* beta, const float* chunk_states,
                  const float* d_out, float* d_q, float* d_k, float* d_v, float* d_g, float* d_beta) {
  check(shape, head_begin, head_end);
  kda_kernels().backward(shape, head_begin, head_end, rows, q, k, v, g, beta, chunk_states, d_out, d_q, d_k, d_v, d_g,
                         d_beta);
}

}  // namespace tidelock::numerics

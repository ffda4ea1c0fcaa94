// The triple loops that define the matrix products of the contract.
#include <cmath>
#include <vector>

#include "numerics/matmul.hpp"
#include "numerics/quant.hpp"

namespace tidelock::numerics::reference {
namespace {

// One output: `chain(k0, k1)` is the chain from zero over that run of k.
template <typename Chain>
void finish(float& y, std::int64_t in, int segments, Output output, Chain chain) {
  const std::int64_t length = in / segments;
  float total = chain(0, length);
  for (int s = 1; s < segments; ++s) total = total + chain(s * length, (s + 1) * length);
  y = output == Output::add ? y + total : total;
}

}  // namespace

void matmul_bf16(const bf16* w, const bf16* x, std::int64_t rows, std::int64_t out, std::int64_t in, int segments,
                 float* y, Output output) {
  for (std::int64_t m = 0; m < rows; ++m) {
    for (std::int64_t o = 0; o < out; ++o) {
      finish(y[m * out + o], in, segments, output, [&](std::int64_t k0, std::int64_t k1) {
        float acc = 0;
        for (std::int64_t k = k0; k < k1; k += 2) {
          const bool paired = k + 1 < k1;
          acc = std::fma(paired ? to_float(x[m * in + k + 1]) : 0.0F, paired ? to_float(w[o * in + k + 1]) : 0.0F, acc);
          acc = std::fma(to_float(x[m * in + k]), to_float(w[o * in + k]), acc);
        }
        return acc;
      });
    }
  }
}

void matmul_f32(const float* w, const float* x, std::int64_t rows, std::int64_t out, std::int64_t in, int segments,
                float* y, Output output) {
  for (std::int64_t m = 0; m < rows; ++m) {
    for (std::int64_t o = 0; o < out; ++o) {
      finish(y[m * out + o], in, segments, output, [&](std::int64_t k0, std::int64_t k1) {
        float acc = 0;
        for (std::int64_t k = k0; k < k1; ++k) acc = std::fma(x[m * in + k], w[o * in + k], acc);
        return acc;
      });
    }
  }
}

namespace {

// A row in blocks of 32 (quant.hpp).
struct QuantizedRow {
  std::vector<int> q;
  std::vector<float> d;
};
QuantizedRow quantize_row(const bf16* x, std::int64_t in) {
  QuantizedRow row;
  for (std::int64_t k = 0; k < in; k += kInputBlock) {
    float largest = 0;
    for (std::int64_t i = k; i < k + kInputBlock; ++i) largest = std::fmax(largest, std::fabs(to_float(x[i])));
    const bool empty = largest < kSmallestInput;
    row.d.push_back(empty ? 0.0F : largest / 127.0F);
    const float inverse = empty ? 0.0F : 127.0F / largest;
    for (std::int64_t i = k; i < k + kInputBlock; ++i)
      row.q.push_back(static_cast<int>(std::nearbyint(to_float(x[i]) * inverse)));
  }
  return row;
}

}  // namespace

void matmul_blocks(Format format, const std::byte* w, const bf16* x, std::int64_t rows, std::int64_t out,
                   std::int64_t in, int segments, float* y, Output output) {
  const std::int64_t sub = sub_block(format);
  std::vector<std::int8_t> codes(static_cast<std::size_t>(in));
  std::vector<float> scales(codes.size()), mins(codes.size());
  for (std::int64_t m = 0; m < rows; ++m) {
    const QuantizedRow row = quantize_row(x + m * in, in);
    for (std::int64_t o = 0; o < out; ++o) {
      unpack_codes(format, w + static_cast<std::size_t>(o) * row_bytes(format, in), in, codes.data(), scales.data(),
                   mins.data());
      finish(y[m * out + o], in, segments, output, [&](std::int64_t k0, std::int64_t k1) {
        float acc = 0;
        for (std::int64_t b = k0 / sub; b < k1 / sub; ++b) {
          int dot = 0, sum = 0;
          for (std::int64_t k = b * sub; k < (b + 1) * sub; ++k) {
            const auto i = static_cast<std::size_t>(k);
            dot += row.q[i] * codes[i];
            sum += row.q[i];
          }
          const auto s = static_cast<std::size_t>(b);
          const float d = row.d[static_cast<std::size_t>(b * sub / kInputBlock)];
          acc = std::fma(scales[s] * d, static_cast<float>(dot), acc);
          if (has_minimum(format)) acc = std::fma(-mins[s], d * static_cast<float>(sum), acc);
        }
        return acc;
      });
    }
  }
}

void matmul_transposed_a(const float* a, const float* b, std::int64_t rows, std::int64_t n, std::int64_t k, float* c,
                         Output output) {
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t j = 0; j < k; ++j) {
      float acc = output == Output::add ? c[i * k + j] : 0.0F;
      for (std::int64_t m = 0; m < rows; ++m) acc = std::fma(a[m * n + i], b[m * k + j], acc);
      c[i * k + j] = acc;
    }
  }
}

}  // namespace tidelock::numerics::reference

// Register tiles over V16 that KDA and attention share: a small matrix product and a 16 x 16 transposition.
#pragma once

#include <cstddef>

#include "numerics/simd.hpp"

namespace tidelock::numerics::TIDELOCK_ISA_NAMESPACE {

using Stride = std::ptrdiff_t;

// A matrix that is read element by element: element (r, k) at data[r * row + k * col].
struct Elements {
  const float* data;
  Stride row, col;
};

// acc[r][c] = fma(x(r, k), y[k][c], acc[r][c]) for k = 0 .. n-1 ascending.
template <int R, int C>
[[gnu::always_inline]] inline void accumulate(V16 (&acc)[R][C], Elements x, const float* y, Stride y_row, int n) {
  for (int k = 0; k < n; ++k) {
    V16 b[C];
    for (int c = 0; c < C; ++c) b[c] = load(y + c * kLanes);
    for (int r = 0; r < R; ++r) {
      const V16 a = set1(x.data[r * x.row]);
      for (int c = 0; c < C; ++c) acc[r][c] = fma(a, b[c], acc[r][c]);
    }
    x.data += x.col;
    y += y_row;
  }
}

template <int R, int C, bool kAccumulate>
inline void product_tile(Elements x, const float* y, Stride y_row, int n, float* out, Stride out_row) {
  V16 acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = kAccumulate ? load(out + r * out_row + c * kLanes) : set1(0.0F);
  accumulate(acc, x, y, y_row, n);
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(out + r * out_row + c * kLanes, acc[r][c]);
}

// The row tail halves the tile until one row is left.
template <int R, int C, bool kAccumulate>
inline void product_rows(int rows, Elements x, const float* y, Stride y_row, int n, float* out, Stride out_row) {
  int r = 0;
  for (; r + R <= rows; r += R)
    product_tile<R, C, kAccumulate>({x.data + r * x.row, x.row, x.col}, y, y_row, n, out + r * out_row, out_row);
  if constexpr (R > 1)
    if (r < rows)
      product_rows<R / 2, C, kAccumulate>(rows - r, {x.data + r * x.row, x.row, x.col}, y, y_row, n, out + r * out_row,
                                          out_row);
}

// Tile shapes: accumulators and one row of y fit the registers (32 of one V16, or 16 of half a V16).
template <bool kAccumulate>
inline void product_columns(int rows, int columns, Elements x, const float* y, Stride y_row, int n, float* out,
                            Stride out_row) {
  int c = 0;
#if defined(__AVX512F__)
  if (rows <= 2)
    for (; c + 8 * kLanes <= columns; c += 8 * kLanes)
      product_rows<2, 8, kAccumulate>(rows, x, y + c, y_row, n, out + c, out_row);
  for (; c + 4 * kLanes <= columns; c += 4 * kLanes)
    product_rows<4, 4, kAccumulate>(rows, x, y + c, y_row, n, out + c, out_row);
  for (; c + 2 * kLanes <= columns; c += 2 * kLanes)
    product_rows<8, 2, kAccumulate>(rows, x, y + c, y_row, n, out + c, out_row);
  for (; c < columns; c += kLanes) product_rows<8, 1, kAccumulate>(rows, x, y + c, y_row, n, out + c, out_row);
#else
  if (rows <= 2)
    for (; c + 2 * kLanes <= columns; c += 2 * kLanes)
      product_rows<2, 2, kAccumulate>(rows, x, y + c, y_row, n, out + c, out_row);
  for (; c < columns; c += kLanes) product_rows<4, 1, kAccumulate>(rows, x, y + c, y_row, n, out + c, out_row);
#endif
}

enum class Start { zero, out };

// out[r][c] (from 0, or from its value) = fma(x(r, k), y[k][c], ...) for k = 0 .. n-1 ascending. columns is a multiple
// of
// 16. k is walked in blocks, so that a block of y stays in the first-level cache while all rows pass over it; the
// partial chain waits in `out`, which rounds nothing.
inline void product(int rows, int columns, int n, Elements x, const float* y, Stride y_row, float* out, Stride out_row,
                    Start start = Start::zero) {
  constexpr int kBlock = 64;
  int k = 0;
  do {
    const int rest = n - k;
    const int count = rows > 4 && rest > kBlock ? kBlock : rest;
    const Elements part{x.data + k * x.col, x.row, x.col};
    if (k == 0 && start == Start::zero)
      product_columns<false>(rows, columns, part, y, y_row, count, out, out_row);
    else
      product_columns<true>(rows, columns, part, y + k * y_row, y_row, count, out, out_row);
    k += count;
  } while (k < n);
}

#if defined(__AVX512F__)

inline void transpose16(V16 (&r)[16]) {
  __m512 a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_ps(r[i].v, r[i + 1].v);
    a[i + 1] = _mm512_unpackhi_ps(r[i].v, r[i + 1].v);
  }
  const auto join_lo = [](__m512 x, __m512 y) { return _mm512_shuffle_ps(x, y, 0x44); };
  const auto join_hi = [](__m512 x, __m512 y) { return _mm512_shuffle_ps(x, y, 0xEE); };
  for (int i = 0; i < 16; i += 4) {  // b[i + c]: rows i..i+3, column c of each 128-bit part
    b[i] = join_lo(a[i], a[i + 2]);
    b[i + 1] = join_hi(a[i], a[i + 2]);
    b[i + 2] = join_lo(a[i + 1], a[i + 3]);
    b[i + 3] = join_hi(a[i + 1], a[i + 3]);
  }
  for (int c = 0; c < 4; ++c) {
    const __m512 even_lo = _mm512_shuffle_f32x4(b[c], b[4 + c], 0x88);       // parts 0, 2 of rows 0-3, 4-7
    const __m512 odd_lo = _mm512_shuffle_f32x4(b[c], b[4 + c], 0xDD);        // parts 1, 3
    const __m512 even_hi = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0x88);  // of rows 8-11, 12-15
    const __m512 odd_hi = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0xDD);
    r[c].v = _mm512_shuffle_f32x4(even_lo, even_hi, 0x88);
    r[8 + c].v = _mm512_shuffle_f32x4(even_lo, even_hi, 0xDD);
    r[4 + c].v = _mm512_shuffle_f32x4(odd_lo, odd_hi, 0x88);
    r[12 + c].v = _mm512_shuffle_f32x4(odd_lo, odd_hi, 0xDD);
  }
}

#elif defined(__AVX2__)

inline void transpose8(__m256 (&r)[8]) {
  __m256 a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    a[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xEE);
    b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xEE);
  }
  for (int c = 0; c < 4; ++c) {
    r[c] = _mm256_permute2f128_ps(b[c], b[4 + c], 0x20);
    r[4 + c] = _mm256_permute2f128_ps(b[c], b[4 + c], 0x31);
  }
}

inline void transpose16(V16 (&r)[16]) {
  __m256 q[4][8];  // quarters: rows 0-7 lo, rows 8-15 lo, rows 0-7 hi, rows 8-15 hi
  for (int i = 0; i < 8; ++i) {
    q[0][i] = r[i].lo;
    q[1][i] = r[8 + i].lo;
    q[2][i] = r[i].hi;
    q[3][i] = r[8 + i].hi;
  }
  for (auto& quarter : q) transpose8(quarter);
  for (int i = 0; i < 8; ++i) {
    r[i] = {q[0][i], q[1][i]};
    r[8 + i] = {q[2][i], q[3][i]};
  }
}

#else

inline void transpose16(V16 (&r)[16]) {
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < i; ++j) {
      const float t = r[i].v[j];
      r[i].v[j] = r[j].v[i];
      r[j].v[i] = t;
    }
}

#endif

// out[c][0..16) = column c of the `rows` (0..16) rows of x, for c < columns; lanes of absent rows are +0.
inline void to_lanes(const float* x, Stride x_row, int rows, int columns, float* out, Stride out_row) {
  for (int c = 0; c < columns; c += kLanes) {
    const int width = columns - c < kLanes ? columns - c : kLanes;
    V16 t[16];
    for (int r = 0; r < 16; ++r) {
      if (r >= rows)
        t[r] = set1(0.0F);
      else
        t[r] = width == kLanes ? load(x + r * x_row + c) : load_n(x + r * x_row + c, width);
    }
    transpose16(t);
    for (int i = 0; i < width; ++i) store(out + (c + i) * out_row, t[i]);
  }
}

}  // namespace tidelock::numerics::TIDELOCK_ISA_NAMESPACE

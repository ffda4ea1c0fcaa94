// Matrix products of the contract. GEMV and GEMM are one function.
//
//   y[m][o] = sum over k of x[m][k] * w[o][k]
//
// Every y[m][o] owns one accumulation chain over ascending k:
//   bf16:  for each pair (2p, 2p+1): acc = fma(x[2p+1], w[2p+1], acc), then acc = fma(x[2p], w[2p], acc)   (odd element
//          first, then even: the order in which vdpbf16ps rounds); an odd k is padded with a zero;
//   f32:   acc = fma(x[k], w[k], acc).
//   block formats (quant.hpp): x becomes integers q with a scale d for every 32 k. For each sub-block the integer dot
//          product n of q and codes, which is exact in any order; then acc = fma(scale * d, n, acc), and where the
//          format has minima acc = fma(-min, d * (sum of q), acc).
// With `segments` > 1 (rule 2: inputs that may be split over ranks) k is cut into that many equal runs; each has its
// own chain from zero, and the sums are added in ascending order. Flush-to-zero and denormals-are-zero throughout.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/team.hpp"
#include "numerics/formats.hpp"
#include "numerics/isa.hpp"

namespace tidelock::numerics {

// A weight matrix packed for the kernels. Immutable after packing, shareable between threads. It owns its bytes, or
// shows bytes that somebody else keeps (view, and pack_blocks with `to`).
class PackedMatrix {
 public:
  PackedMatrix() = default;
  // w is [out, in] row-major; for Format::bf16 the values are rounded to bf16 here. segments must divide in
  // (bf16: in / segments must be even unless segments is 1).
  static PackedMatrix pack(Format format, const float* w, std::int64_t out, std::int64_t in, int segments = 1);
  static PackedMatrix pack(const bf16* w, std::int64_t out, std::int64_t in, int segments = 1);
  // Rows of a format's own blocks (quant.hpp: row_bytes(format, in) each, row_stride bytes apart), f32 and bf16 too. In
  // must be whole blocks, a segment whole sub-blocks of 32. Lossless. `to`, when not null, takes the packed form:
  // packed_bytes of it, 64-byte aligned, to live as long as the matrix.
  static PackedMatrix pack_blocks(Format format, const std::byte* rows, std::size_t row_stride, std::int64_t out,
                                  std::int64_t in, int segments = 1, std::byte* to = nullptr);
  // What was packed before: packed_bytes(format, out, in) at `packed`, under the same conditions.
  static PackedMatrix view(Format format, const std::byte* packed, std::int64_t out, std::int64_t in, int segments = 1);
  // The transpose as f32, for the backward pass: a matrix of shape [in, out] made of w [out, in], so that
  // matmul(x = dy [rows, out]) gives dx [rows, in]. With Format::bf16 the values are those of the rounded weights.
  static PackedMatrix pack_transposed(Format format, const float* w, std::int64_t out, std::int64_t in);

  // The weights as the kernels read them, [out, in] row-major.
  std::vector<float> unpack() const;

  Format format() const { return format_; }
  std::int64_t out() const { return out_; }
  std::int64_t in() const { return in_; }
  int segments() const { return segments_; }
  std::size_t bytes() const { return size_; }
  const std::byte* data() const { return data_; }  // 64-byte aligned

 private:
  static PackedMatrix describe(Format format, std::int64_t out, std::int64_t in, int segments);
  static PackedMatrix allocate(Format format, std::int64_t out, std::int64_t in, int segments);

  struct Free {
    void operator()(std::byte* p) const;
  };
  Format format_ = Format::f32;
  std::int64_t out_ = 0, in_ = 0;
  int segments_ = 1;
  std::size_t size_ = 0;
  const std::byte* data_ = nullptr;
  std::unique_ptr<std::byte[], Free> own_;  // null: somebody else's
};

// Bytes that a matrix of this shape has once packed; it need not exist.
std::size_t packed_bytes(Format format, std::int64_t out, std::int64_t in);

// The largest power of two up to 8 that rule 2 allows for an input dimension `in` of that format.
int split_segments(Format format, std::int64_t in);

enum class Output { store, add };  // y = result, or y = y + result (one rounding more)

// same: x holds what it held in this thread's previous product of bf16 rows; work done for its rows may serve again.
enum class Input { fresh, same };

// x: [rows, in] with row stride ldx (elements), y: [rows, out] with row stride ldy. noexcept in its loops; throws
// Error{internal} when the format of w does not fit the type of x.
void matmul(const PackedMatrix& w, const bf16* x, std::int64_t ldx, std::int64_t rows, float* y, std::int64_t ldy,
            Output output, Team& team, Input input = Input::fresh);
void matmul(const PackedMatrix& w, const float* x, std::int64_t ldx, std::int64_t rows, float* y, std::int64_t ldy,
            Output output, Team& team);

// c[i][j] = c[i][j] (or 0 with Output::store) then, for ascending m, c = fma(a[m][i], b[m][j], c): the weight gradient,
// with a = dy [rows, n] (stride lda), b = x [rows, k] (stride ldb), c [n, k] (stride ldc).
void matmul_transposed_a(const float* a, std::int64_t lda, const float* b, std::int64_t ldb, std::int64_t rows,
                         std::int64_t n, std::int64_t k, float* c, std::int64_t ldc, Output output, Team& team);

// How many products of this process took the kernels of that instruction set: the proof that a forced path ran.
std::uint64_t matmul_path_count(Isa path);

namespace reference {  // scalar triple loops that define the above
void matmul_bf16(const bf16* w, const bf16* x, std::int64_t rows, std::int64_t out, std::int64_t in, int segments,
                 float* y, Output output);
void matmul_f32(const float* w, const float* x, std::int64_t rows, std::int64_t out, std::int64_t in, int segments,
                float* y, Output output);
// w: [out] rows of blocks.
void matmul_blocks(Format format, const std::byte* w, const bf16* x, std::int64_t rows, std::int64_t out,
                   std::int64_t in, int segments, float* y, Output output);
void matmul_transposed_a(const float* a, const float* b, std::int64_t rows, std::int64_t n, std::int64_t k, float* c,
                         Output output);
}  // namespace reference

}  // namespace tidelock::numerics

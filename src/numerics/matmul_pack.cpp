// Weights into the kernels' form.
#include <stdlib.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "base/error.hpp"
#include "numerics/matmul.hpp"
#include "numerics/matmul_kernels.hpp"
#include "numerics/quant.hpp"

namespace tidelock::numerics {
namespace {

constexpr std::int64_t kSegmentBlock = 32;  // a segment holds whole sub-blocks

void check_shape(std::int64_t out, std::int64_t in, int segments, Format format) {
  if (out < 1 || in < 1) fail(ErrorCode::invalid_argument, "matrix [{}, {}]: both sizes must be at least 1", out, in);
  if (segments < 1 || in % segments != 0)
    fail(ErrorCode::invalid_argument, "matrix [{}, {}]: {} segments do not divide {}", out, in, segments, in);
  if (is_quantized(format) && (in % block_elements(format) != 0 || in / segments % kSegmentBlock != 0))
    fail(ErrorCode::invalid_argument,
         "matrix [{}, {}]: {} in {} segments: expected whole blocks of {} and segments of {}", out, in,
         format_name(format), segments, block_elements(format), kSegmentBlock);
  if (format == Format::bf16 && segments > 1 && in / segments % 2 != 0)
    fail(ErrorCode::invalid_argument, "matrix [{}, {}]: {} segments of bf16 would have an odd length", out, in,
         segments);
}

// at(o, k) is the weight; to_float or to_bf16 as the format asks.
template <typename At>
void fill(Format format, std::byte* to, std::int64_t out, std::int64_t in, At at) {
  const std::size_t stride = panel_bytes(format, in);
  for (std::int64_t panel = 0; panel * kPanel < out; ++panel) {
    const std::int64_t columns = std::min(kPanel, out - panel * kPanel);
    std::byte* data = to + static_cast<std::size_t>(panel) * stride;
    if (columns < kPanel || in % 2 != 0) std::memset(data, 0, stride);
    for (std::int64_t column = 0; column < columns; ++column) {
      const std::int64_t o = panel * kPanel + column;
      if (format == Format::bf16) {
        auto* pairs = reinterpret_cast<bf16*>(data) + column * 2;
        for (std::int64_t k = 0; k < in; ++k) pairs[k / 2 * 2 * kPanel + k % 2] = to_bf16(at(o, k));
      } else {
        auto* values = reinterpret_cast<float*>(data) + column;
        for (std::int64_t k = 0; k < in; ++k) values[k * kPanel] = at(o, k);
      }
    }
  }
}

template <typename T>
T read(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

// 32 codes of one output as they are packed (unsigned, code + code_offset), from block row `row` at element k.
using Codes = std::array<std::uint8_t, 32>;
Codes codes_at(Format format, const std::byte* row, std::int64_t k) {
  Codes out{};
  const std::byte* block = row + static_cast<std::size_t>(k / block_elements(format)) * block_bytes(format);
  const auto j = static_cast<int>(k % block_elements(format) / 32);
  if (format == Format::q8_0) {
    for (std::size_t i = 0; i < 32; ++i) out[i] = static_cast<std::uint8_t>(block[2 + i] ^ std::byte{0x80});
  } else if (format == Format::mxfp4) {
    for (std::size_t i = 0; i < 16; ++i) {  // packed as in the file, looked up by the kernel
      out[i] = static_cast<std::uint8_t>(block[1 + i] & std::byte{15});
      out[i + 16] = static_cast<std::uint8_t>(block[1 + i] >> 4);
    }
  } else if (format == Format::q5_1) {
    const auto high = read<std::uint32_t>(block + 4);
    for (std::size_t i = 0; i < 32; ++i)
      out[i] = static_cast<std::uint8_t>(std::to_integer<unsigned>(block[8 + i % 16] >> (i / 16 * 4) & std::byte{15}) |
                                         (high >> i & 1U) << 4);
  } else if (format == Format::q6_k) {
    const std::byte* low = block + j / 4 * 64 + j % 2 * 32;
    const std::byte* high = block + 128 + j / 4 * 32;
    const int quarter = j % 4;
    for (std::size_t i = 0; i < 32; ++i)
      out[i] = static_cast<std::uint8_t>((low[i] >> (quarter / 2 * 4) & std::byte{15}) |
                                         (high[i] >> (quarter * 2) & std::byte{3}) << 4);
  } else {
    const std::byte* low = block + (format == Format::q5_k ? 48 : 16) + j / 2 * 32;
    for (std::size_t i = 0; i < 32; ++i) out[i] = static_cast<std::uint8_t>(low[i] >> (j % 2 * 4) & std::byte{15});
    if (format == Format::q5_k)
      for (std::size_t i = 0; i < 32; ++i)
        out[i] |= static_cast<std::uint8_t>((block[16 + i] >> j & std::byte{1}) << 4);
  }
  return out;
}

// Codes of 32 k into the 32-k group `to` of a packed chunk.
void place_codes(int bits, const Codes& codes, std::int64_t column, std::byte* to) {
  std::byte* own = to + column * 4;
  for (std::size_t t = 0; t < 8; ++t) {
    for (std::size_t i = 0; i < 4; ++i) {
      const auto code = static_cast<std::byte>(codes[4 * t + i]);
      if (bits == 8) {
        own[t * 64 + i] = code;
        continue;
      }
      own[t / 2 * 64 + i] |= (code & std::byte{15}) << (t % 2 * 4);
      if (bits == 5) own[256 + i] |= (code >> 4) << t;
      if (bits == 6) own[256 + t / 4 * 64 + i] |= (code >> 4) << (t % 4 * 2);
    }
  }
}

// The scales of one output in one chunk.
void place_scales(Format format, const std::byte* row, std::int64_t k0, std::int64_t count, std::int64_t column,
                  std::byte* chunk) {
  const std::byte* block = row + static_cast<std::size_t>(k0 / block_elements(format)) * block_bytes(format);
  const auto put_half = [&](std::int64_t at, const std::byte* from) { std::memcpy(chunk + at + column * 2, from, 2); };
  if (format == Format::q8_0) {
    for (std::int64_t b = 0; b < count / 32; ++b) put_half(b * 32, block + b * 34);
  } else if (format == Format::q5_1) {
    for (std::int64_t b = 0; b < count / 32; ++b) {
      const auto minus_m = static_cast<std::uint16_t>(read<std::uint16_t>(block + b * 24 + 2) ^ 0x8000U);
      put_half(b * 64, block + b * 24);
      put_half(b * 64 + 32, reinterpret_cast<const std::byte*>(&minus_m));
    }
  } else if (format == Format::mxfp4) {
    for (std::int64_t b = 0; b < count / 32; ++b) chunk[b * 16 + column] = block[b * 17];
  } else if (format == Format::q6_k) {
    put_half(0, block + 208);
    for (std::int64_t b = 0; b < 16; ++b) chunk[32 + b * 16 + column] = block[192 + b];
  } else {
    put_half(0, block);
    put_half(32, block + 2);
    for (int b = 0; b < 8; ++b) {
      const SixBits pair = six_bits(block + 4, b);
      chunk[64 + b * 16 + column] = static_cast<std::byte>(pair.scale);
      chunk[192 + b * 16 + column] = static_cast<std::byte>(pair.min);
    }
  }
}

}  // namespace

void PackedMatrix::Free::operator()(std::byte* p) const {
  std::free(p);
}

PackedMatrix PackedMatrix::describe(Format format, std::int64_t out, std::int64_t in, int segments) {
  check_shape(out, in, segments, format);
  PackedMatrix m;
  m.format_ = format;
  m.out_ = out;
  m.in_ = in;
  m.segments_ = segments;
  m.size_ = packed_bytes(format, out, in);
  return m;
}

PackedMatrix PackedMatrix::view(Format format, const std::byte* packed, std::int64_t out, std::int64_t in,
                                int segments) {
  PackedMatrix m = describe(format, out, in, segments);
  m.data_ = packed;
  return m;
}

PackedMatrix PackedMatrix::allocate(Format format, std::int64_t out, std::int64_t in, int segments) {
  PackedMatrix m = describe(format, out, in, segments);
  // Decoding reads every weight once a token: with small pages it would wait for the page walks.
  constexpr std::size_t kHugePage = 2U << 20;
  const std::size_t alignment = m.size_ >= kHugePage ? kHugePage : 64;
  void* data = nullptr;
  if (::posix_memalign(&data, alignment, m.size_) != 0)
    fail(ErrorCode::exhausted, "matrix [{}, {}]: no memory for {} bytes", out, in, m.size_);
  if (alignment == kHugePage) ::madvise(data, m.size_, MADV_HUGEPAGE);  // a wish: small pages work too
  m.own_.reset(static_cast<std::byte*>(data));
  m.data_ = m.own_.get();
  return m;
}

PackedMatrix PackedMatrix::pack(Format format, const float* w, std::int64_t out, std::int64_t in, int segments) {
  PackedMatrix m = allocate(format, out, in, segments);
  fill(format, m.own_.get(), out, in, [&](std::int64_t o, std::int64_t k) { return w[o * in + k]; });
  return m;
}

PackedMatrix PackedMatrix::pack(const bf16* w, std::int64_t out, std::int64_t in, int segments) {
  PackedMatrix m = allocate(Format::bf16, out, in, segments);
  fill(Format::bf16, m.own_.get(), out, in, [&](std::int64_t o, std::int64_t k) { return to_float(w[o * in + k]); });
  return m;
}

PackedMatrix PackedMatrix::pack_blocks(Format format, const std::byte* rows, std::size_t row_stride, std::int64_t out,
                                       std::int64_t in, int segments, std::byte* to) {
  PackedMatrix m = to == nullptr ? allocate(format, out, in, segments) : view(format, to, out, in, segments);
  if (to == nullptr) to = m.own_.get();
  if (!is_quantized(format)) {
    fill(format, to, out, in, [&](std::int64_t o, std::int64_t k) {
      const std::byte* row = rows + static_cast<std::size_t>(o) * row_stride;
      return format == Format::f32 ? read<float>(row + k * 4) : to_float(read<bf16>(row + k * 2));
    });
    return m;
  }
  const std::size_t stride = panel_bytes(format, in);
  for (std::int64_t panel = 0; panel * kPanel < out; ++panel) {
    std::byte* data = to + static_cast<std::size_t>(panel) * stride;
    const std::int64_t columns = std::min(kPanel, out - panel * kPanel);
    std::memset(data, 0, stride);  // columns that do not exist, and the padding of scales
    for (std::int64_t k0 = 0; k0 < in; k0 += kChunk, data += chunk_bytes(format, kChunk)) {
      const std::int64_t count = std::min(kChunk, in - k0);
      for (std::int64_t column = 0; column < columns; ++column) {
        const std::byte* row = rows + static_cast<std::size_t>(panel * kPanel + column) * row_stride;
        place_scales(format, row, k0, count, column, data);
        for (std::int64_t k = 0; k < count; k += 32)
          place_codes(code_bits(format), codes_at(format, row, k0 + k), column,
                      data + codes_offset(format, count) + k * kPanel * code_bits(format) / 8);
      }
    }
  }
  return m;
}

PackedMatrix PackedMatrix::pack_transposed(Format format, const float* w, std::int64_t out, std::int64_t in) {
  PackedMatrix m = allocate(Format::f32, in, out, 1);
  fill(Format::f32, m.own_.get(), in, out, [&](std::int64_t o, std::int64_t k) {
    const float value = w[k * in + o];
    return format == Format::bf16 ? to_float(to_bf16(value)) : value;
  });
  return m;
}

std::vector<float> PackedMatrix::unpack() const {
  if (is_quantized(format_)) fail(ErrorCode::internal, "{} weights are not unpacked to float32", format_name(format_));
  std::vector<float> w(static_cast<std::size_t>(out_ * in_));
  for (std::int64_t o = 0; o < out_; ++o) {
    const std::byte* panel = data_ + static_cast<std::size_t>(o / kPanel) * panel_bytes(format_, in_);
    for (std::int64_t k = 0; k < in_; ++k) {
      float& value = w[static_cast<std::size_t>(o * in_ + k)];
      if (format_ == Format::bf16) {
        value = to_float(reinterpret_cast<const bf16*>(panel)[(k / 2 * kPanel + o % kPanel) * 2 + k % 2]);
      } else {
        value = reinterpret_cast<const float*>(panel)[k * kPanel + o % kPanel];
      }
    }
  }
  return w;
}

std::size_t packed_bytes(Format format, std::int64_t out, std::int64_t in) {
  return static_cast<std::size_t>(panel_count(out)) * panel_bytes(format, in);
}

int split_segments(Format format, std::int64_t in) {
  const std::int64_t whole = is_quantized(format) ? kSegmentBlock : 2;  // pairs of bf16 in every segment
  int segments = 1;
  while (segments < 8 && in % (segments * 2 * whole) == 0) segments *= 2;
  return segments;
}

}  // namespace tidelock::numerics

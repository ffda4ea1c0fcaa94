// Private: one table of KDA kernels per instruction set; kda.cpp calls through the one that isa() names.
#pragma once

#include "numerics/isa.hpp"
#include "numerics/kda.hpp"

namespace tidelock::numerics {

inline constexpr int kKdaMaxDim = 256;

// The bounded form multiplies e^{G_i} by this and e^{-G_j} by its inverse. G is within [-80, 0], so both factors stay
// within about e^{+-40}: unscaled, x e^{-80} would be flushed for |x| < 7e-4. A power of two rounds nothing.
inline constexpr float kKdaCentre = 0x1p58F;

struct KdaKernels {
  const char* name;  // the instruction set that the table was compiled for
  decltype(&numerics::kda_forward) forward;
  decltype(&numerics::kda_backward) backward;
};

// Where a head's state keeps its parts (offsets in floats).
struct KdaStateLayout {
  std::size_t keys, corrected, gates, size;
  explicit constexpr KdaStateLayout(const KdaShape& s) {
    const std::size_t key_dim = static_cast<std::size_t>(s.key_dim);
    keys = key_dim * static_cast<std::size_t>(s.value_dim);
    corrected = keys + key_dim * kKdaChunk;
    gates = corrected + static_cast<std::size_t>(s.value_dim) * kKdaChunk;
    size = gates + key_dim * (s.bounded ? 1 : kKdaChunk);
  }
};

const KdaKernels& kda_kernels_scalar();
const KdaKernels& kda_kernels_avx2();
const KdaKernels& kda_kernels_avx512();

// The table in use. avx512bf16 uses that of avx512: KDA has no bf16 product.
const KdaKernels& kda_kernels();

}  // namespace tidelock::numerics

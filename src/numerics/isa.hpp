// Which instruction set the kernels use. Chosen once at start; every choice gives the same bits.
#pragma once

namespace tidelock::numerics {

enum class Isa { scalar, avx2, avx512, avx512bf16 };

const char* isa_name(Isa isa);

// Whether this CPU and kernel can run it.
bool isa_available(Isa isa);

// The one in use: the widest available, or the one that TIDELOCK_ISA names (scalar, avx2, avx512, avx512bf16), which
// must be available (Error{not_supported} otherwise). Fixed at the first call, except by force_isa.
Isa isa();

// For tests and benchmarks: makes isa() return `isa` from now on. Not while other threads compute.
void force_isa(Isa isa);

}  // namespace tidelock::numerics

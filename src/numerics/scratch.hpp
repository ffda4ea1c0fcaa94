// Private: work memory of the attention and KDA kernels.
#pragma once

#include <cstddef>

namespace tidelock::numerics {

// At least `floats` floats, 64-byte aligned, owned by the calling thread and kept for its next call (contents
// undefined). A kernel takes it once per call and divides it; kernels do not call each other, so it is never shared.
float* kernel_scratch(std::size_t floats);

}  // namespace tidelock::numerics

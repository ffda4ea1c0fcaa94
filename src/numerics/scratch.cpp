#include "numerics/scratch.hpp"

#include <memory>
#include <new>

namespace tidelock::numerics {
namespace {

struct Aligned {
  void operator()(float* p) const { ::operator delete[](p, std::align_val_t{64}); }
};

}  // namespace

float* kernel_scratch(std::size_t floats) {
  thread_local std::unique_ptr<float[], Aligned> memory;
  thread_local std::size_t size = 0;
  if (size < floats) {
    memory.reset();  // before the larger one is asked for: the old contents are not needed
    size = 0;
    memory.reset(static_cast<float*>(::operator new[](floats * sizeof(float), std::align_val_t{64})));
    size = floats;
  }
  return memory.get();
}

}  // namespace tidelock::numerics

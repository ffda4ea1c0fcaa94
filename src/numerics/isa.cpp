#include "numerics/isa.hpp"

#include <atomic>
#include <cstdlib>
#include <string>

#include "base/error.hpp"

namespace tidelock::numerics {
namespace {

constexpr Isa kAll[] = {Isa::scalar, Isa::avx2, Isa::avx512, Isa::avx512bf16};

Isa choose() {
  if (const char* wanted = std::getenv("TIDELOCK_ISA")) {
    for (const Isa isa : kAll) {
      if (std::string(wanted) != isa_name(isa)) continue;
      if (!isa_available(isa)) fail(ErrorCode::not_supported, "TIDELOCK_ISA={}: this CPU does not have it", wanted);
      return isa;
    }
    fail(ErrorCode::invalid_argument, "TIDELOCK_ISA={}: expected scalar, avx2, avx512 or avx512bf16", wanted);
  }
  Isa best = Isa::scalar;
  for (const Isa isa : kAll)
    if (isa_available(isa)) best = isa;
  return best;
}

std::atomic<Isa>& current() {
  static std::atomic<Isa> chosen{choose()};
  return chosen;
}

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::scalar:
      return "scalar";
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512";
    case Isa::avx512bf16:
      return "avx512bf16";
  }
  return "?";
}

bool isa_available(Isa isa) {
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  switch (isa) {
    case Isa::scalar:
      return true;
    case Isa::avx2:
      return avx2;
    case Isa::avx512:
      return avx512;
    case Isa::avx512bf16:
      return avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  }
  return false;
}

Isa isa() {
  return current().load(std::memory_order_relaxed);
}

void force_isa(Isa isa) {
  if (!isa_available(isa)) fail(ErrorCode::not_supported, "this CPU does not have {}", isa_name(isa));
  current().store(isa);
}

}  // namespace tidelock::numerics

#include "peak.inl"

namespace tidelock::bench {
using TIDELOCK_ISA_NAMESPACE::shape;
TIDELOCK_PEAK(kPeakAvx2, shape<1, 2, 2>, shape<1, 1, 4>, shape<2, 1, 2>);
}  // namespace tidelock::bench

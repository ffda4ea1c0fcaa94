#include "peak.inl"

namespace tidelock::bench {
using TIDELOCK_ISA_NAMESPACE::shape;
TIDELOCK_PEAK(kPeakAvx512, shape<1, 8, 2>, shape<1, 4, 4>, shape<8, 3, 1>, shape<4, 3, 2>, shape<2, 6, 2>);
}  // namespace tidelock::bench

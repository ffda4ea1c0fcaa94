#include "bench_kda_peer.inl"

namespace tidelock::bench {
const KdaPeers kKdaPeersAvx2{&two_passes, &one_pass};
}  // namespace tidelock::bench

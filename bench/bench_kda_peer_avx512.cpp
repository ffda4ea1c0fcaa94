#include "bench_kda_peer.inl"

namespace tidelock::bench {
const KdaPeers kKdaPeersAvx512{&two_passes, &one_pass};
}  // namespace tidelock::bench

// The peers of the chunked KDA prefill: the same head, token by token, without the contract.
#pragma once

#include <cstdint>

namespace tidelock::bench {

// One head, sizes multiples of 128 (value) and 16 (key, up to 256). Its rows of q, k, v, g are contiguous, as suits it
// best; beta [rows]; s [key_dim][value_dim].
struct RecurrenceHead {
  std::int64_t rows;
  int key_dim, value_dim;
  const float *q, *k, *v, *g, *beta;
  float *s, *out;
};

struct KdaPeers {
  // As the recurrence is written: S = e^g S with S^T k, then S += k u with S^T q. Two passes over S per token.
  void (*two_passes)(const RecurrenceHead& head);
  // One pass: the rank-1 update of a token waits for the next token's pass.
  void (*one_pass)(const RecurrenceHead& head);
};

extern const KdaPeers kKdaPeersAvx2, kKdaPeersAvx512;

}  // namespace tidelock::bench

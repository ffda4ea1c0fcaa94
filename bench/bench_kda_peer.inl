// Included once per instruction set.
#include "bench_kda_peer.hpp"
#include "numerics/math.inl"

namespace tidelock::bench {
namespace {

using namespace numerics::TIDELOCK_ISA_NAMESPACE;

#if defined(__AVX512F__)
constexpr int kBlock = 8;  // vectors of columns whose sums stay in registers
#else
constexpr int kBlock = 2;
#endif

constexpr int kMaxKeys = 256;

inline void exponentials(const float* g, int n, float* decay) {
  for (int d = 0; d < n; d += kLanes) store(decay + d, vexp(load(g + d)));
}

void two_passes(const RecurrenceHead& h) {
  const int dim = h.value_dim;
  for (std::int64_t t = 0; t < h.rows; ++t) {
    const float* k = h.k + t * h.key_dim;
    const float* q = h.q + t * h.key_dim;
    alignas(64) float decay[kMaxKeys];
    exponentials(h.g + t * h.key_dim, h.key_dim, decay);
    for (int c = 0; c < dim; c += kBlock * kLanes) {
      V16 x[kBlock], o[kBlock];
      for (int i = 0; i < kBlock; ++i) x[i] = o[i] = set1(0.0F);
      float* s = h.s + c;
      for (int d = 0; d < h.key_dim; ++d, s += dim)
        for (int i = 0; i < kBlock; ++i) {
          const V16 decayed = mul(set1(decay[d]), load(s + i * kLanes));
          store(s + i * kLanes, decayed);
          x[i] = fma(set1(k[d]), decayed, x[i]);
        }
      for (int i = 0; i < kBlock; ++i) x[i] = mul(set1(h.beta[t]), sub(load(h.v + t * dim + c + i * kLanes), x[i]));
      s = h.s + c;
      for (int d = 0; d < h.key_dim; ++d, s += dim)
        for (int i = 0; i < kBlock; ++i) {
          const V16 updated = fma(set1(k[d]), x[i], load(s + i * kLanes));
          store(s + i * kLanes, updated);
          o[i] = fma(set1(q[d]), updated, o[i]);
        }
      for (int i = 0; i < kBlock; ++i) store(h.out + t * dim + c + i * kLanes, o[i]);
    }
  }
}

// o = S'^T q with S' = S + k u is S^T q + (k . q) u, so both sums are taken before u is known.
void one_pass(const RecurrenceHead& h) {
  const int dim = h.value_dim;
  for (int c = 0; c < dim; c += kBlock * kLanes) {
    V16 u[kBlock];
    for (auto& x : u) x = set1(0.0F);
    const float* before = h.k;
    for (std::int64_t t = 0; t < h.rows; ++t) {
      const float* k = h.k + t * h.key_dim;
      const float* q = h.q + t * h.key_dim;
      alignas(64) float decay[kMaxKeys];
      exponentials(h.g + t * h.key_dim, h.key_dim, decay);
      V16 x[kBlock], o[kBlock];
      for (int i = 0; i < kBlock; ++i) x[i] = o[i] = set1(0.0F);
      float* s = h.s + c;
      for (int d = 0; d < h.key_dim; ++d, s += dim)
        for (int i = 0; i < kBlock; ++i) {
          const V16 decayed = mul(set1(decay[d]), fma(set1(before[d]), u[i], load(s + i * kLanes)));
          store(s + i * kLanes, decayed);
          x[i] = fma(set1(k[d]), decayed, x[i]);
          o[i] = fma(set1(q[d]), decayed, o[i]);
        }
      V16 dot = set1(0.0F);
      for (int d = 0; d < h.key_dim; d += kLanes) dot = fma(load(k + d), load(q + d), dot);
      const V16 kq = set1(sum_tree(dot));
      for (int i = 0; i < kBlock; ++i) {
        u[i] = mul(set1(h.beta[t]), sub(load(h.v + t * dim + c + i * kLanes), x[i]));
        store(h.out + t * dim + c + i * kLanes, fma(kq, u[i], o[i]));
      }
      before = k;
    }
    float* s = h.s + c;
    for (int d = 0; d < h.key_dim; ++d, s += dim)
      for (int i = 0; i < kBlock; ++i) store(s + i * kLanes, fma(set1(before[d]), u[i], load(s + i * kLanes)));
  }
}

}  // namespace
}  // namespace tidelock::bench

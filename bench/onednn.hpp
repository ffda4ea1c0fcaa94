// oneDNN's matmul as a peer: dst[rows, out] = src[rows, in] * weights, with the weights in the layout that oneDNN likes
// best (packed before any clock starts).
#pragma once

#include <cstdint>
#include <memory>

namespace tidelock::bench {

enum class PeerFormat { f32, bf16 };

class OneDnnMatmul {
 public:
  // Random values. bf16: bf16 source and weights, f32 result.
  OneDnnMatmul(PeerFormat format, std::int64_t rows, std::int64_t out, std::int64_t in);
  ~OneDnnMatmul();
  void run(int threads);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tidelock::bench

#include <malloc.h>

#include <array>
#include <cmath>

#include "base/error.hpp"
#include "train/put_away.hpp"
#include "train/train.hpp"

namespace tidelock::train {

AdamW::AdamW(std::size_t count) : m_(count), v_(count) {}
AdamW::~AdamW() = default;

std::size_t AdamW::put_away(const std::filesystem::path& folder) {
  if (away_) return 0;
  const std::array<std::span<const float>, 2> moments{m_, v_};
  away_ = std::make_unique<PutAway>(folder, moments);
  count_ = m_.size();
  std::vector<float>().swap(m_);
  std::vector<float>().swap(v_);
  ::malloc_trim(0);  // or the allocator keeps it
  return 2 * count_ * sizeof(float);
}

void AdamW::retrieve() {
  if (!away_) return;
  std::vector<float> m(count_), v(count_);
  const std::array<std::span<float>, 2> moments{m, v};
  away_->read(moments);
  m_ = std::move(m);
  v_ = std::move(v);
  away_.reset();
}

void AdamW::step(std::span<float> values, std::span<const float> gradient, float scale, const AdamWOptions& o,
                 std::span<const std::uint8_t> decay) {
  if (values.size() != m_.size() || gradient.size() != m_.size())
    fail(ErrorCode::internal, "optimizer of {} values given {} values and {} gradients", m_.size(), values.size(),
         gradient.size());
  ++steps_;
  const double t = static_cast<double>(steps_);
  const auto c1 = static_cast<float>(1.0 / (1.0 - std::pow(static_cast<double>(o.beta1), t)));
  const auto c2 = static_cast<float>(1.0 / (1.0 - std::pow(static_cast<double>(o.beta2), t)));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float g = gradient[i] * scale;
    m_[i] = o.beta1 * m_[i] + (1.0F - o.beta1) * g;
    v_[i] = o.beta2 * v_[i] + (1.0F - o.beta2) * (g * g);
    const float wd = decay.empty() || decay[i] != 0 ? o.weight_decay : 0.0F;
    values[i] -= o.learning_rate * (m_[i] * c1 / (std::sqrt(v_[i] * c2) + o.epsilon) + wd * values[i]);
  }
}

double gradient_norm(std::span<const float> gradient) {
  double sum = 0;
  for (const float g : gradient) sum += static_cast<double>(g) * static_cast<double>(g);
  return std::sqrt(sum);
}

float clip_scale(double norm, double limit) {
  return limit > 0 && norm > limit ? static_cast<float>(limit / norm) : 1.0F;
}

}  // namespace tidelock::train

// Gradients of attention and of the DSA index against float64 finite differences, dense and over lists; the same bits
// on every instruction set.
#include <functional>

#include "numerics/attention_support.hpp"

namespace tidelock::numerics::testing {
namespace attention_backward_test {

class AttentionBackward : public RowOps {};

using Doubles = std::vector<double>;

Doubles widen(const Floats& x) {
  return {x.begin(), x.end()};
}

std::int64_t list_length(const Lists* lists, std::int64_t row) {
  return lists != nullptr ? lists->counts[static_cast<std::size_t>(row)] : row + 1;
}
std::int64_t list_entry(const Lists* lists, std::int64_t row, std::int64_t e) {
  return lists != nullptr ? lists->positions[static_cast<std::size_t>(row * lists->stride + e)] : e;
}

// d loss / d x by central differences.
Doubles differences(Doubles& x, const std::function<double()>& loss) {
  constexpr double kStep = 1e-5;
  Doubles d;
  for (double& value : x) {
    const double before = value;
    value = before + kStep;
    const double up = loss();
    value = before - kStep;
    d.push_back((up - loss()) / (2 * kStep));
    value = before;
  }
  return d;
}

double relative_rms(const Floats& a, const Doubles& b) {
  double error = 0;
  double size = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    error += (a[i] - b[i]) * (a[i] - b[i]);
    size += b[i] * b[i];
  }
  return std::sqrt(error / size);
}

void expect_gradient(Floats got, const Doubles& expected, const char* name) {
  EXPECT_LT(relative_rms(got, expected), 1e-5) << name;
  // The check can fail: one entry, the largest, wrong by 1 %.
  const auto largest = std::max_element(expected.begin(), expected.end(),
                                        [](double a, double b) { return std::fabs(a) < std::fabs(b); });
  got[static_cast<std::size_t>(largest - expected.begin())] *= 1.01F;
  EXPECT_GT(relative_rms(got, expected), 1e-5) << name;
}

double mla_loss(const MlaInputs& in, const Lists* lists, const Doubles& q, const Doubles& keys, const Floats& w) {
  const int dim = in.key_dim();
  double loss = 0;
  for (std::int64_t r = 0; r < in.rows; ++r)
    for (int h = 0; h < in.shape.heads; ++h) {
      const std::int64_t pair = r * in.shape.heads + h;
      double sum = 0;
      double value = 0;
      for (std::int64_t e = 0; e < list_length(lists, r); ++e) {
        const double* key = keys.data() + list_entry(lists, r, e) * dim;
        double dot = 0;
        for (int d = 0; d < dim; ++d) dot += q[static_cast<std::size_t>(pair * dim + d)] * key[d];
        const double p = std::exp(dot * in.shape.scale);
        sum += p;
        for (int d = 0; d < in.shape.latent_dim; ++d)
          value += p * key[d] * w[static_cast<std::size_t>(pair * in.shape.latent_dim + d)];
      }
      loss += value / sum;
    }
  return loss;
}

struct MlaGradients {
  Floats q, keys, probs;
};

MlaGradients mla_gradients(const MlaInputs& in, const Lists* lists, const Floats& d_context) {
  const MlaResult forward = run_mla(in, Format::f32, lists);
  const std::int64_t stride = lists != nullptr ? lists->stride : in.rows;
  MlaGradients d{Floats(in.q.size()), Floats(in.keys.size()),
                 Floats(static_cast<std::size_t>(in.rows * stride), -1.0F)};
  mla_attention_backward(in.shape, in.keys.data(), in.rows, in.q.data(),
                         lists != nullptr ? lists->positions.data() : nullptr, stride,
                         lists != nullptr ? lists->counts.data() : nullptr, forward.context.data(), forward.lse.data(),
                         d_context.data(), d.q.data(), d.keys.data(), d.probs.data());
  return d;
}

Floats context_weights(const MlaInputs& in) {
  Random random(51);
  return normals(random, in.rows * in.shape.heads * in.shape.latent_dim);
}

TEST_F(AttentionBackward, MlaAgreesWithFiniteDifferences) {
  const Lists lists = random_lists(52, 21, 9);
  const Lists long_lists = random_lists(53, 70, 68);  // two tiles
  for (const auto& [shape, rows, list] :
       {std::tuple{MlaShape{3, 20, 5, 0.3F}, 21, static_cast<const Lists*>(nullptr)},
        std::tuple{MlaShape{3, 20, 5, 0.3F}, 21, &lists}, std::tuple{MlaShape{1, 4, 2, 0.5F}, 70, &long_lists},
        std::tuple{MlaShape{1, 4, 2, 0.5F}, 70, static_cast<const Lists*>(nullptr)}}) {
    const MlaInputs in = make_mla_inputs(shape, rows, 54);
    const Floats w = context_weights(in);
    const MlaGradients got = mla_gradients(in, list, w);
    Doubles q = widen(in.q);
    Doubles keys = widen(in.keys);
    const auto loss = [&] { return mla_loss(in, list, q, keys, w); };
    expect_gradient(got.q, differences(q, loss), "q");
    expect_gradient(got.keys, differences(keys, loss), "keys");
  }
}

TEST_F(AttentionBackward, MeanProbsAreTheAverageOverHeads) {
  const MlaInputs in = make_mla_inputs({3, 32, 8, 0.25F}, 90, 55);
  const Lists lists = random_lists(56, in.rows, 70);
  for (const Lists* list : {static_cast<const Lists*>(nullptr), &lists}) {
    const MlaGradients got = mla_gradients(in, list, context_weights(in));
    const std::int64_t stride = list != nullptr ? list->stride : in.rows;
    for (std::int64_t r = 0; r < in.rows; ++r) {
      Doubles mean(static_cast<std::size_t>(stride));
      for (int h = 0; h < 3; ++h) {
        Doubles p;
        double sum = 0;
        for (std::int64_t e = 0; e < list_length(list, r); ++e) {
          double dot = 0;
          for (int d = 0; d < 40; ++d)
            dot += static_cast<double>(in.q[static_cast<std::size_t>((r * 3 + h) * 40 + d)]) *
                   in.keys[static_cast<std::size_t>(list_entry(list, r, e) * 40 + d)];
          p.push_back(std::exp(dot * 0.25F));
          sum += p.back();
        }
        for (std::size_t e = 0; e < p.size(); ++e) mean[e] += p[e] / sum / 3;
      }
      for (std::int64_t e = 0; e < stride; ++e)
        ASSERT_NEAR(got.probs[static_cast<std::size_t>(r * stride + e)], mean[static_cast<std::size_t>(e)], 2e-6);
    }
  }
}

TEST_F(AttentionBackward, MlaHasTheSameBitsOnEveryInstructionSet) {
  const Lists lists = random_lists(57, 140, 70);
  for (const MlaShape& shape : {MlaShape{4, 32, 8, 0.2F}, MlaShape{5, 40, 9, 0.2F}, MlaShape{20, 64, 16, 0.1F}})
    for (const Lists* list : {static_cast<const Lists*>(nullptr), &lists}) {
      const MlaInputs in = make_mla_inputs(shape, 140, 58);
      const Floats w = context_weights(in);
      force_isa(Isa::scalar);
      const MlaGradients expected = mla_gradients(in, list, w);
      for (const Isa isa : available_isas()) {
        force_isa(isa);
        const MlaGradients got = mla_gradients(in, list, w);
        EXPECT_TRUE(same_bits(got.q, expected.q) && same_bits(got.keys, expected.keys) &&
                    same_bits(got.probs, expected.probs))
            << isa_name(isa) << " heads " << shape.heads;
      }
    }
}

struct IndexCase {
  IndexShape shape;
  std::int64_t rows;
  const Lists* lists;
  Floats q, w, keys, d_scores;
  std::int64_t stride() const { return lists != nullptr ? lists->stride : rows; }
};

IndexCase make_index_case(const IndexShape& shape, std::int64_t rows, const Lists* lists, std::uint64_t seed) {
  Random random(seed);
  IndexCase c{shape, rows, lists, {}, {}, {}, {}};
  c.q = normals(random, rows * shape.heads * shape.dim);
  c.w = normals(random, rows * shape.heads);
  c.keys = normals(random, rows * shape.dim);
  c.d_scores = normals(random, rows * c.stride());
  return c;
}

struct IndexGradients {
  Floats q, w, keys;
};

IndexGradients index_gradients(const IndexCase& c) {
  IndexGradients d{Floats(c.q.size()), Floats(c.w.size()), Floats(c.keys.size())};
  index_scores_backward(c.shape, c.keys.data(), c.rows, c.q.data(), c.w.data(),
                        c.lists != nullptr ? c.lists->positions.data() : nullptr, c.stride(),
                        c.lists != nullptr ? c.lists->counts.data() : nullptr, c.d_scores.data(), d.q.data(),
                        d.w.data(), d.keys.data());
  return d;
}

double index_loss(const IndexCase& c, const Doubles& q, const Doubles& w, const Doubles& keys) {
  double loss = 0;
  for (std::int64_t r = 0; r < c.rows; ++r)
    for (std::int64_t e = 0; e < list_length(c.lists, r); ++e)
      for (int h = 0; h < c.shape.heads; ++h) {
        const std::int64_t pair = r * c.shape.heads + h;
        double dot = 0;
        for (int d = 0; d < c.shape.dim; ++d)
          dot += q[static_cast<std::size_t>(pair * c.shape.dim + d)] *
                 keys[static_cast<std::size_t>(list_entry(c.lists, r, e) * c.shape.dim + d)];
        loss += c.d_scores[static_cast<std::size_t>(r * c.stride() + e)] * w[static_cast<std::size_t>(pair)] *
                std::max(dot, 0.0);
      }
  return loss;
}

TEST_F(AttentionBackward, IndexAgreesWithFiniteDifferences) {
  const Lists lists = random_lists(61, 25, 9);
  const Lists long_lists = random_lists(62, 70, 67);
  for (const auto& [shape, rows, list] :
       {std::tuple{IndexShape{3, 12}, 25, static_cast<const Lists*>(nullptr)},
        std::tuple{IndexShape{3, 12}, 25, &lists}, std::tuple{IndexShape{2, 4}, 70, &long_lists},
        std::tuple{IndexShape{17, 2}, 20, static_cast<const Lists*>(nullptr)}}) {
    const IndexCase c = make_index_case(shape, rows, list, 63);
    const IndexGradients got = index_gradients(c);
    Doubles q = widen(c.q);
    Doubles w = widen(c.w);
    Doubles keys = widen(c.keys);
    const auto loss = [&] { return index_loss(c, q, w, keys); };
    expect_gradient(got.q, differences(q, loss), "q");
    expect_gradient(got.w, differences(w, loss), "w");
    expect_gradient(got.keys, differences(keys, loss), "keys");
  }
}

TEST_F(AttentionBackward, ReluIsClosedAtZero) {
  const IndexShape shape{1, 2};
  const Floats q{1.0F, 0.0F};
  const Floats keys{0.0F, 1.0F};  // the dot product is exactly 0
  const float w = 2.0F;
  const float d_score = 3.0F;
  Floats d_q(2);
  Floats d_keys(2);
  float d_w = 0.0F;
  index_scores_backward(shape, keys.data(), 1, q.data(), &w, nullptr, 0, nullptr, &d_score, d_q.data(), &d_w,
                        d_keys.data());
  EXPECT_EQ(d_q, Floats(2));
  EXPECT_EQ(d_keys, Floats(2));
  EXPECT_EQ(d_w, 0.0F);
}

TEST_F(AttentionBackward, IndexHasTheSameBitsOnEveryInstructionSet) {
  const Lists lists = random_lists(64, 140, 70);
  for (const IndexShape& shape : {IndexShape{4, 16}, IndexShape{5, 24}, IndexShape{20, 32}})
    for (const Lists* list : {static_cast<const Lists*>(nullptr), &lists}) {
      const IndexCase c = make_index_case(shape, 140, list, 65);
      force_isa(Isa::scalar);
      const IndexGradients expected = index_gradients(c);
      for (const Isa isa : available_isas()) {
        force_isa(isa);
        const IndexGradients got = index_gradients(c);
        EXPECT_TRUE(same_bits(got.q, expected.q) && same_bits(got.w, expected.w) && same_bits(got.keys, expected.keys))
            << isa_name(isa) << " heads " << shape.heads;
      }
    }
}

}  // namespace attention_backward_test
}  // namespace tidelock::numerics::testing

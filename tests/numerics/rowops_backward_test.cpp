// The derivatives of the row operations: against central differences, in double, of forwards written again in double;
// equal bits on every instruction set. That forward bits agree and that gradients are right are two claims.
#include <algorithm>
#include <functional>

#include "numerics/rowops_support.hpp"

namespace tidelock::numerics::testing {
namespace rowops_backward_test {

using Doubles = std::vector<double>;
using Forward = std::function<Doubles(const std::vector<Doubles>&)>;
using Backward = std::function<void(const std::vector<Floats>& inputs, const Floats& d_y, std::vector<Floats>& d)>;

// One operation at one size. `forward` maps all inputs to the output; `backward` adds d(output . d_y)/d(inputs[k]) to
// d[k] for the first `differentiable` inputs.
struct Problem {
  const char* name;
  std::vector<Floats> inputs;
  std::size_t outputs;
  Forward forward;
  Backward backward;
};

double logistic(double x) {
  return 1 / (1 + std::exp(-x));
}

// ---- the problems: rows x dim, independent forwards in double

Problem rms_problem(Random& random, Index rows, Index dim) {
  return {"rms_norm",
          {normals(random, rows * dim), normals(random, dim)},
          static_cast<std::size_t>(rows * dim),
          [=](const std::vector<Doubles>& in) {
            Doubles y = in[0];
            for (Index r = 0; r < rows; ++r) {
              double square = 0;
              for (Index i = 0; i < dim; ++i) square += std::pow(in[0][r * dim + i], 2);
              for (Index i = 0; i < dim; ++i) y[r * dim + i] *= in[1][i] / std::sqrt(square / dim + 1e-3);
            }
            return y;
          },
          [=](const std::vector<Floats>& in, const Floats& d_y, std::vector<Floats>& d) {
            Floats y(in[0].size());
            Floats inv(static_cast<std::size_t>(rows));
            rms_norm(in[0].data(), in[1].data(), rows, dim, 1e-3F, y.data(), inv.data());
            rms_norm_backward(in[0].data(), in[1].data(), inv.data(), d_y.data(), rows, dim, d[0].data(), d[1].data());
          }};
}

Problem layer_problem(Random& random, Index rows, Index dim) {
  return {"layer_norm",
          {normals(random, rows * dim), normals(random, dim), normals(random, dim)},
          static_cast<std::size_t>(rows * dim),
          [=](const std::vector<Doubles>& in) {
            Doubles y = in[0];
            for (Index r = 0; r < rows; ++r) {
              double mean = 0;
              double square = 0;
              for (Index i = 0; i < dim; ++i) mean += y[r * dim + i] / dim;
              for (Index i = 0; i < dim; ++i) square += std::pow(y[r * dim + i] - mean, 2) / dim;
              for (Index i = 0; i < dim; ++i)
                y[r * dim + i] = (y[r * dim + i] - mean) / std::sqrt(square + 1e-3) * in[1][i] + in[2][i];
            }
            return y;
          },
          [=](const std::vector<Floats>& in, const Floats& d_y, std::vector<Floats>& d) {
            Floats y(in[0].size());
            Floats stats(static_cast<std::size_t>(2 * rows));
            layer_norm(in[0].data(), in[1].data(), in[2].data(), rows, dim, 1e-3F, y.data(), stats.data());
            layer_norm_backward(in[0].data(), in[1].data(), stats.data(), d_y.data(), rows, dim, d[0].data(),
                                d[1].data(), d[2].data());
          }};
}

Problem l2_problem(Random& random, Index rows, Index dim) {
  return {"l2_norm",
          {normals(random, rows * dim)},
          static_cast<std::size_t>(rows * dim),
          [=](const std::vector<Doubles>& in) {
            Doubles y = in[0];
            for (Index r = 0; r < rows; ++r) {
              double square = 1e-2;
              for (Index i = 0; i < dim; ++i) square += std::pow(in[0][r * dim + i], 2);
              for (Index i = 0; i < dim; ++i) y[r * dim + i] *= 0.25 / std::sqrt(square);
            }
            return y;
          },
          [=](const std::vector<Floats>& in, const Floats& d_y, std::vector<Floats>& d) {
            Floats y(in[0].size());
            Floats inv(static_cast<std::size_t>(rows));
            l2_norm(in[0].data(), rows, dim, 1e-2F, 0.25F, y.data(), inv.data());
            l2_norm_backward(in[0].data(), inv.data(), d_y.data(), rows, dim, 0.25F, d[0].data());
          }};
}

Problem silu_problem(Random& random, Index rows, Index dim) {
  const Index n = rows * dim;
  return {"silu_glu",
          {normals(random, n, 3.0F), normals(random, n)},
          static_cast<std::size_t>(n),
          [=](const std::vector<Doubles>& in) {
            Doubles y = in[0];
            for (std::size_t i = 0; i < y.size(); ++i) y[i] = in[0][i] * logistic(in[0][i]) * in[1][i];
            return y;
          },
          [=](const std::vector<Floats>& in, const Floats& d_y, std::vector<Floats>& d) {
            silu_glu_backward(in[0].data(), in[1].data(), d_y.data(), n, d[0].data(), d[1].data());
          }};
}

Problem situ_problem(Random& random, Index rows, Index dim) {
  const Index n = rows * dim;
  return {"situ_glu",
          {normals(random, n, 4.0F), normals(random, n, 3.0F)},
          static_cast<std::size_t>(n),
          [=](const std::vector<Doubles>& in) {
            Doubles y = in[0];
            for (std::size_t i = 0; i < y.size(); ++i)
              y[i] = 4 * std::tanh(in[0][i] / 4) * logistic(in[0][i]) * 5 * std::tanh(in[1][i] / 5);
            return y;
          },
          [=](const std::vector<Floats>& in, const Floats& d_y, std::vector<Floats>& d) {
            situ_glu_backward(in[0].data(), in[1].data(), d_y.data(), n, 4.0F, 5.0F, d[0].data(), d[1].data());
          }};
}

Problem sigmoid_gate_problem(Random& random, Index rows, Index dim) {
  const Index n = rows * dim;
  return {"sigmoid_gate",
          {normals(random, n), normals(random, n, 3.0F)},
          static_cast<std::size_t>(n),
          [=](const std::vector<Doubles>& in) {
            Doubles y = in[0];
            for (std::size_t i = 0; i < y.size(); ++i) y[i] *= logistic(in[1][i]);
            return y;
          },
          [=](const std::vector<Floats>& in, const Floats& d_y, std::vector<Floats>& d) {
            sigmoid_gate_backward(in[0].data(), in[1].data(), d_y.data(), n, d[0].data(), d[1].data());
          }};
}

Problem conv_problem(Random& random, Index rows, Index dim) {
  return {"causal_conv",
          {normals(random, rows * dim), normals(random, 4 * dim)},
          static_cast<std::size_t>(rows * dim),
          [=](const std::vector<Doubles>& in) {
            Doubles y = in[0];
            for (Index t = 0; t < rows; ++t)
              for (Index c = 0; c < dim; ++c) {
                double u = 0;
                for (Index j = std::max<Index>(0, 3 - t); j < 4; ++j)
                  u += in[1][j * dim + c] * in[0][(t - 3 + j) * dim + c];
                y[t * dim + c] = u * logistic(u);
              }
            return y;
          },
          [=](const std::vector<Floats>& in, const Floats& d_y, std::vector<Floats>& d) {
            Floats y(in[0].size());
            Floats u(in[0].size());
            Floats tail(static_cast<std::size_t>(3 * dim));
            causal_conv(in[0].data(), in[1].data(), rows, dim, tail.data(), u.data(), y.data());
            causal_conv_backward(in[0].data(), in[1].data(), u.data(), d_y.data(), rows, dim, d[0].data(), d[1].data());
          }};
}

template <bool bounded>
Problem gate_problem(Random& random, Index rows, Index dim) {
  constexpr Index heads = 2;
  const GateShape shape{heads, dim, bounded, -5.0F};
  return {bounded ? "kda_gate bounded" : "kda_gate unbounded",
          {normals(random, rows * heads * dim), normals(random, heads * dim), normals(random, heads, 0.5F)},
          static_cast<std::size_t>(rows * heads * dim),
          [=](const std::vector<Doubles>& in) {
            Doubles g = in[0];
            for (std::size_t i = 0; i < g.size(); ++i) {
              const std::size_t channel = i % static_cast<std::size_t>(heads * dim);
              const double x = in[0][i] + in[1][channel];
              const double rate = std::exp(in[2][channel / static_cast<std::size_t>(dim)]);
              g[i] = bounded ? -5 * logistic(rate * x) : -rate * std::log1p(std::exp(x));
            }
            return g;
          },
          [=](const std::vector<Floats>& in, const Floats& d_y, std::vector<Floats>& d) {
            kda_gate_backward(shape, in[0].data(), in[1].data(), in[2].data(), d_y.data(), rows, d[0].data(),
                              d[1].data(), d[2].data());
          }};
}

// The chosen set is a constant of the derivative, so the forward in double takes the ids of the float forward.
template <bool renormalize>
Problem route_problem(Random& random, Index rows, Index dim) {
  const Index top_k = std::min<Index>(dim, 4);
  const RouterShape shape{dim, top_k, renormalize, 2.5F};
  const Floats logits = normals(random, rows * dim);
  const Floats bias = normals(random, dim, 0.1F);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(rows * top_k));
  Floats weights(ids.size());
  route(shape, logits.data(), bias.data(), rows, ids.data(), weights.data());
  return {renormalize ? "route renormalised" : "route",
          {logits},
          ids.size(),
          [=](const std::vector<Doubles>& in) {
            Doubles w(ids.size());
            for (Index r = 0; r < rows; ++r) {
              double sum = 0;
              for (Index k = 0; k < top_k; ++k) {
                const std::size_t slot = static_cast<std::size_t>(r * top_k + k);
                w[slot] = logistic(in[0][static_cast<std::size_t>(r * dim + ids[slot])]);
                sum += w[slot];
              }
              for (Index k = 0; k < top_k; ++k)
                w[static_cast<std::size_t>(r * top_k + k)] *= 2.5 / (renormalize ? sum : 1);
            }
            return w;
          },
          [=](const std::vector<Floats>& in, const Floats& d_y, std::vector<Floats>& d) {
            route_backward(shape, in[0].data(), ids.data(), weights.data(), d_y.data(), rows, d[0].data());
          }};
}

Problem block_mix_problem(Random& random, Index rows, Index dim) {
  constexpr int n_sources = 5;
  std::vector<Floats> inputs;
  inputs.reserve(n_sources + 1);
  for (int s = 0; s < n_sources; ++s) inputs.push_back(normals(random, rows * dim));
  inputs.push_back(normals(random, dim, 0.5F));
  return {"block_mix", inputs, static_cast<std::size_t>(rows * dim),
          [=](const std::vector<Doubles>& in) {
            Doubles out(static_cast<std::size_t>(rows * dim));
            for (Index r = 0; r < rows; ++r) {
              double total = 0;
              Doubles p(n_sources);
              for (int s = 0; s < n_sources; ++s) {
                double square = 0;
                double product = 0;
                for (Index i = 0; i < dim; ++i) {
                  square += std::pow(in[s][r * dim + i], 2) / dim;
                  product += in[s][r * dim + i] * in[n_sources][i];
                }
                total += p[s] = std::exp(product / std::sqrt(square + 1e-3));
              }
              for (int s = 0; s < n_sources; ++s)
                for (Index i = 0; i < dim; ++i) out[r * dim + i] += p[s] / total * in[s][r * dim + i];
            }
            return out;
          },
          [=](const std::vector<Floats>& in, const Floats& d_y, std::vector<Floats>& d) {
            const float* sources[n_sources];
            float* d_sources[n_sources];
            for (int s = 0; s < n_sources; ++s) {
              sources[s] = in[s].data();
              d_sources[s] = d[s].data();
            }
            Floats out(d_y.size());
            Floats probs(static_cast<std::size_t>(rows * n_sources));
            const float* w = in[n_sources].data();
            block_mix(sources, n_sources, w, rows, dim, 1e-3F, out.data(), probs.data());
            block_mix_backward(sources, n_sources, w, probs.data(), d_y.data(), rows, dim, 1e-3F, d_sources,
                               d[n_sources].data());
          }};
}

// Output: the negative log-likelihood of one token per row; its derivative is softmax - one_hot.
Problem softmax_problem(Random& random, Index rows, Index dim) {
  return {"softmax",
          {normals(random, rows * dim, 2.0F)},
          static_cast<std::size_t>(rows),
          [=](const std::vector<Doubles>& in) {
            Doubles loss(static_cast<std::size_t>(rows));
            for (Index r = 0; r < rows; ++r) {
              double sum = 0;
              for (Index i = 0; i < dim; ++i) sum += std::exp(in[0][r * dim + i]);
              loss[r] = std::log(sum) - in[0][r * dim + r % dim];
            }
            return loss;
          },
          [=](const std::vector<Floats>& in, const Floats& d_y, std::vector<Floats>& d) {
            for (Index r = 0; r < rows; ++r) {
              const float* row = in[0].data() + r * dim;
              softmax_accumulate(row, dim, log_sum_exp(row, dim), d_y[r], d[0].data() + r * dim);
              d[0][r * dim + r % dim] -= d_y[r];
            }
          }};
}

using Maker = Problem (*)(Random&, Index rows, Index dim);
const Maker kProblems[] = {rms_problem,         layer_problem,        l2_problem,           silu_problem,
                           situ_problem,        sigmoid_gate_problem, conv_problem,         gate_problem<true>,
                           gate_problem<false>, route_problem<true>,  route_problem<false>, block_mix_problem,
                           softmax_problem};

// ---- the comparison

struct Gradients {
  Floats d_y;
  std::vector<Floats> initial;  // what d_* held before
  std::vector<Floats> after;
};

Gradients gradients(const Problem& problem, Random& random) {
  Gradients g;
  g.d_y = normals(random, static_cast<Index>(problem.outputs));
  for (const Floats& input : problem.inputs) g.initial.push_back(normals(random, static_cast<Index>(input.size())));
  g.after = g.initial;
  problem.backward(problem.inputs, g.d_y, g.after);
  return g;
}

Doubles finite_differences(const Problem& problem, const Floats& d_y, std::size_t k) {
  std::vector<Doubles> in;
  for (const Floats& input : problem.inputs) in.emplace_back(input.begin(), input.end());
  const auto loss = [&] {
    const Doubles y = problem.forward(in);
    double sum = 0;
    for (std::size_t i = 0; i < y.size(); ++i) sum += y[i] * static_cast<double>(d_y[i]);
    return sum;
  };
  Doubles result(in[k].size());
  for (std::size_t i = 0; i < result.size(); ++i) {
    const double x = in[k][i];
    constexpr double step = 1e-5;
    in[k][i] = x + step;
    const double above = loss();
    in[k][i] = x - step;
    result[i] = (above - loss()) / (2 * step);
    in[k][i] = x;
  }
  return result;
}

// The greatest error in units of what is allowed: 1e-4 of the element plus 1e-5 of the largest (at least of 1, the size
// of what the gradients were added to).
double excess(const Doubles& want, const std::function<double(std::size_t)>& got) {
  double largest = 1;
  for (const double w : want) largest = std::max(largest, std::fabs(w));
  double worst = 0;
  for (std::size_t i = 0; i < want.size(); ++i)
    worst = std::max(worst, std::fabs(got(i) - want[i]) / (1e-4 * std::fabs(want[i]) + 1e-5 * largest));
  return worst;
}

class RowOpsBackward : public RowOps {};

TEST_F(RowOpsBackward, EqualsFiniteDifferencesAndAWrongDerivativeIsCaught) {
  for (const Maker make : kProblems)
    for (const Index dim : {7, 37}) {
      Random random(21, static_cast<std::uint64_t>(dim));
      const Problem problem = make(random, 6, dim);
      const Gradients g = gradients(problem, random);
      for (std::size_t k = 0; k < problem.inputs.size(); ++k) {
        const Doubles want = finite_differences(problem, g.d_y, k);
        const auto added = [&](std::size_t i) { return static_cast<double>(g.after[k][i]) - g.initial[k][i]; };
        const std::string where = std::string(problem.name) + " input " + std::to_string(k);
        EXPECT_LT(excess(want, added), 1) << where;
        EXPECT_GT(excess(want, [&](std::size_t i) { return -added(i); }), 1) << where << ": wrong sign";
        EXPECT_GT(excess(want, [&](std::size_t i) { return 1.01 * added(i); }), 1) << where << ": 1 % too large";
        EXPECT_GT(excess(want, [&](std::size_t i) { return g.after[k][i]; }), 1) << where << ": not added";
        EXPECT_GT(excess(want, [&](std::size_t i) { return added(want.size() - 1 - i); }), 1) << where << ": permuted";
      }
    }
}

TEST_F(RowOpsBackward, EveryInstructionSetGivesTheSameBits) {
  std::vector<Index> sizes = {128, 896};
  for (Index dim = 1; dim <= 70; ++dim) sizes.push_back(dim);
  for (const Maker make : kProblems)
    for (const Index dim : sizes) {
      std::vector<Floats> want;
      for (const Isa isa : available_isas()) {
        force_isa(isa);
        Random random(22, static_cast<std::uint64_t>(dim));
        const Problem problem = make(random, 3, dim);
        const std::vector<Floats> got = gradients(problem, random).after;
        if (isa == Isa::scalar) want = got;
        for (std::size_t k = 0; k < got.size(); ++k)
          ASSERT_EQ(first_difference(got[k], want[k]), -1) << problem.name << ' ' << dim << ' ' << isa_name(isa);
      }
    }
}

// Rows one call at a time, ascending, give the parameter gradients of one call over all rows.
TEST_F(RowOpsBackward, RowsMayBeSplitBetweenCalls) {
  constexpr Index rows = 5;
  constexpr Index dim = 37;
  Random random(23);
  const Floats x = normals(random, rows * dim);
  const Floats w = normals(random, dim);
  const Floats d_y = normals(random, rows * dim);
  Floats y(x.size());
  Floats inv(rows);
  rms_norm(x.data(), w.data(), rows, dim, 1e-5F, y.data(), inv.data());
  Floats d_x(x.size());
  Floats d_w(w.size());
  rms_norm_backward(x.data(), w.data(), inv.data(), d_y.data(), rows, dim, d_x.data(), d_w.data());
  const auto by_rows = [&](bool ascending) {
    std::pair<Floats, Floats> d{Floats(x.size()), Floats(w.size())};
    for (Index i = 0; i < rows; ++i) {
      const Index r = ascending ? i : rows - 1 - i;
      const Index at = r * dim;
      rms_norm_backward(x.data() + at, w.data(), inv.data() + r, d_y.data() + at, 1, dim, d.first.data() + at,
                        d.second.data());
    }
    return d;
  };
  const auto ascending = by_rows(true);
  EXPECT_EQ(first_difference(ascending.first, d_x), -1);
  EXPECT_EQ(first_difference(ascending.second, d_w), -1);
  EXPECT_NE(first_difference(by_rows(false).second, d_w), -1) << "another order of rows must show";
}

// Frozen parameters: null gradients leave the others as they are.
TEST_F(RowOpsBackward, ParameterGradientsMayBeNull) {
  constexpr Index rows = 4;
  constexpr Index dim = 37;
  constexpr Index n = rows * dim;
  Random random(24);
  const Floats x = normals(random, n);
  const Floats w = normals(random, 4 * dim);
  const Floats d_y = normals(random, n);
  Floats stats(2 * rows, 0.5F);
  Floats with(x.size());
  Floats without(x.size());
  Floats d_w(static_cast<std::size_t>(4 * dim));
  Floats d_b(static_cast<std::size_t>(dim));
  const auto both_equal = [&](const char* name) {
    EXPECT_EQ(first_difference(with, without), -1) << name;
    std::fill(with.begin(), with.end(), 0.0F);
    std::fill(without.begin(), without.end(), 0.0F);
  };
  rms_norm_backward(x.data(), w.data(), stats.data(), d_y.data(), rows, dim, with.data(), d_w.data());
  rms_norm_backward(x.data(), w.data(), stats.data(), d_y.data(), rows, dim, without.data(), nullptr);
  both_equal("rms_norm");
  layer_norm_backward(x.data(), w.data(), stats.data(), d_y.data(), rows, dim, with.data(), d_w.data(), d_b.data());
  layer_norm_backward(x.data(), w.data(), stats.data(), d_y.data(), rows, dim, without.data(), nullptr, nullptr);
  both_equal("layer_norm");
  causal_conv_backward(x.data(), w.data(), x.data(), d_y.data(), rows, dim, with.data(), d_w.data());
  causal_conv_backward(x.data(), w.data(), x.data(), d_y.data(), rows, dim, without.data(), nullptr);
  both_equal("causal_conv");
  for (const bool bounded : {true, false}) {
    const GateShape shape{1, dim, bounded, -5.0F};
    const float a_log = 0.3F;
    float d_a_log = 0;
    kda_gate_backward(shape, x.data(), w.data(), &a_log, d_y.data(), rows, with.data(), d_w.data(), &d_a_log);
    kda_gate_backward(shape, x.data(), w.data(), &a_log, d_y.data(), rows, without.data(), nullptr, nullptr);
    both_equal("kda_gate");
  }
  const float* source = x.data();
  const Floats probs(static_cast<std::size_t>(rows), 1.0F);
  float* d_with = with.data();
  float* d_without = without.data();
  block_mix_backward(&source, 1, w.data(), probs.data(), d_y.data(), rows, dim, 1e-5F, &d_with, d_w.data());
  block_mix_backward(&source, 1, w.data(), probs.data(), d_y.data(), rows, dim, 1e-5F, &d_without, nullptr);
  both_equal("block_mix");
}

}  // namespace rowops_backward_test
}  // namespace tidelock::numerics::testing

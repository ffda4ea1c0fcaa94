// Small random models of the three families, sequence state in plain buffers, and comparisons by bits.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <ostream>

#include "base/base.hpp"
#include "model/forward.hpp"

namespace tidelock::model::testing {

using numerics::Format;  // for tests of other rooms, which open this namespace only

enum class Family : std::uint8_t { linear, k3, k31 };
inline constexpr int kIndexTopK = 24;  // smaller than the contexts that the tests use

struct Variant {
  Family family = Family::k31;
  Format format = Format::f32;
  std::string name() const {
    const char* families[] = {"linear", "k3", "k31"};
    return std::string(families[static_cast<int>(family)]) + (format == Format::f32 ? "_f32" : "_bf16");
  }
};
inline void PrintTo(const Variant& v, std::ostream* out) {
  *out << v.name();
}

inline std::vector<Variant> all_variants() {
  std::vector<Variant> out;
  for (const Family family : {Family::linear, Family::k3, Family::k31})
    for (const Format format : {Format::f32, Format::bf16}) out.push_back({family, format});
  return out;
}

// Widths are odd on purpose: no row ends at a vector's or a tile's end.
inline Config small_config(Variant v) {
  using enum LayerKind;
  Config c;
  c.hidden = 44;
  c.vocab = 67;
  c.intermediate = 60;
  c.format = v.format;
  c.max_context = 200;
  c.mla = {.heads = 3, .q_lora = 0, .latent = 20, .nope = 10, .extra = 4, .value = 14};
  c.experts = {.count = 6, .top_k = 2, .intermediate = 18, .shared = 1, .scale = 2.446F};
  c.kda = {.heads = 2, .head_dim = 16};
  c.layers = {kda, kda, mla, kda};
  if (v.family == Family::linear) return c;
  c.activation = Activation::situ;
  c.layers = {kda, mla, kda, kda, mla};
  c.kda = {.heads = 3, .head_dim = 16, .full_rank_gate = true, .bounded = true, .lower_bound = -5};
  c.mla.q_lora = 18;
  c.mla.output_gate = true;
  c.experts.latent = 28;
  c.experts.latent_norm = true;
  c.experts.shared = 2;
  c.residual_block = 2;
  c.tensor_prefix = "language_model.";
  if (v.family == Family::k31) c.index = {.heads = 3, .dim = 12, .top_k = kIndexTopK};
  return c;
}

// Fresh values; vectors are shaken so that no norm is 1 and no bias 0.
inline std::vector<float> small_values(const Model& model, ParameterId id, std::uint64_t seed) {
  std::vector<float> values = initial_values(model, id, seed);
  Random random(seed + 1, static_cast<std::uint64_t>(id));
  if (model.parameter(id).kind == ParameterKind::vector)
    for (float& x : values) x += 0.2F * random.normal();
  return values;
}

inline std::unique_ptr<Model> make_small_model(const Config& config, std::uint64_t seed = 7, bool for_training = true) {
  auto model = std::make_unique<Model>(config, for_training);
  for (ParameterId id = 0; id < static_cast<ParameterId>(model->parameters().size()); ++id)
    model->set(id, small_values(*model, id, seed));
  return model;
}

inline std::vector<std::int32_t> random_tokens(std::int64_t n, std::uint64_t seed, int vocab = 67) {
  Random random(seed);
  std::vector<std::int32_t> out;
  for (std::int64_t i = 0; i < n; ++i)
    out.push_back(static_cast<std::int32_t>(random.below(static_cast<std::uint32_t>(vocab))));
  return out;
}

// One sequence's state. Copying is a deep copy: a fork. Fresh blocks hold NaN, since their content is undefined.
class PlainState {
 public:
  explicit PlainState(const StateLayout& layout)
      : block_lines_(layout.block_bytes() / 64), recurrent_(layout.recurrent_bytes() / 64) {}
  SequenceView view(std::int64_t tokens) {
    const auto wanted = block_lines_ == 0 ? 0U : static_cast<std::size_t>(StateLayout::blocks_for(position + tokens));
    while (blocks_.size() < wanted) {
      blocks_.emplace_back(block_lines_);
      std::memset(static_cast<void*>(blocks_.back().data()), 0xFF, block_lines_ * 64);
    }
    pointers_.clear();
    for (auto& block : blocks_) pointers_.push_back(block.data()->bytes);
    return {pointers_.data(), recurrent_.empty() ? nullptr : recurrent_.data()->bytes};
  }
  bool same_bytes(const PlainState& other) const {
    return position == other.position && blocks_ == other.blocks_ && recurrent_ == other.recurrent_;
  }
  std::int64_t position = 0;

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
    bool operator==(const Line& other) const { return std::memcmp(bytes, other.bytes, 64) == 0; }
  };
  std::size_t block_lines_;
  std::vector<std::vector<Line>> blocks_;
  std::vector<Line> recurrent_;
  std::vector<std::byte*> pointers_;
};

// Rows of results: the final hidden row and its logits side by side.
struct Rows {
  std::int64_t width = 0;
  std::vector<float> values;
  std::int64_t count() const { return width == 0 ? 0 : static_cast<std::int64_t>(values.size()) / width; }
  Rows part(std::int64_t begin, std::int64_t end) const {
    return {width, {values.begin() + begin * width, values.begin() + end * width}};
  }
  void append(const Rows& more) {
    width = more.width;
    values.insert(values.end(), more.values.begin(), more.values.end());
  }
};

// The comparison that every test uses, and that every twin must fail.
inline ::testing::AssertionResult same_bits(const Rows& a, const Rows& b) {
  if (a.width != b.width || a.values.size() != b.values.size() || a.values.empty())
    return ::testing::AssertionFailure() << a.count() << " rows against " << b.count();
  for (std::size_t i = 0; i < a.values.size(); ++i)
    if (std::memcmp(&a.values[i], &b.values[i], sizeof(float)) != 0)
      return ::testing::AssertionFailure()
             << "row " << i / static_cast<std::size_t>(a.width) << ", column " << i % static_cast<std::size_t>(a.width)
             << ": " << a.values[i] << " against " << b.values[i];
  return ::testing::AssertionSuccess();
}

// Some tokens of one sequence, to be fed in one pass.
struct Feed {
  PlainState* state;
  std::span<const std::int32_t> tokens;
  const Adapter* adapter = nullptr;
};

class Runner {
 public:
  explicit Runner(const Model& model, Team& team = solo_team(), ForwardOptions options = {})
      : model_(model), layout(model.config()), team_(team), options_(options) {}

  // One pass over all feeds; the rows of each.
  std::vector<Rows> run(std::span<const Feed> feeds) {
    std::vector<Span> spans;
    for (const Feed& feed : feeds)
      spans.push_back({feed.state->view(static_cast<std::int64_t>(feed.tokens.size())), feed.state->position,
                       feed.tokens, feed.adapter});
    const float* hidden = forward(model_, layout, spans, options_, workspace, team_);
    const std::int64_t h = model_.config().hidden, v = model_.config().vocab;
    std::vector<Rows> out;
    std::int64_t row = 0;
    for (const Feed& feed : feeds) {
      const auto n = static_cast<std::int64_t>(feed.tokens.size());
      feed.state->position += n;
      Rows rows{h + v, std::vector<float>(static_cast<std::size_t>(n * (h + v)))};
      std::vector<float> logits(static_cast<std::size_t>(n * v));
      head_forward(model_, hidden + row * h, n, logits.data(), workspace, team_);
      for (std::int64_t i = 0; i < n; ++i) {
        float* to = rows.values.data() + i * (h + v);
        std::copy_n(logits.data() + i * v, v, std::copy_n(hidden + (row + i) * h, h, to));
      }
      row += n;
      out.push_back(std::move(rows));
    }
    return out;
  }
  Rows run(PlainState& state, std::span<const std::int32_t> tokens, const Adapter* adapter = nullptr) {
    const Feed feed{&state, tokens, adapter};
    return run(std::span(&feed, 1)).front();
  }
  // A whole sequence from the start, alone.
  Rows whole(std::span<const std::int32_t> tokens, const Adapter* adapter = nullptr) {
    PlainState state(layout);
    return run(state, tokens, adapter);
  }

 private:
  const Model& model_;

 public:
  StateLayout layout;
  Workspace workspace;

 private:
  Team& team_;
  ForwardOptions options_;
};

// Random adapter values for every adaptable parameter; `b_scale` 0 makes the identity.
inline AdapterValues random_adapter(const Model& model, int rank, float b_scale, std::uint64_t seed) {
  AdapterValues out{rank, 2.0F * static_cast<float>(rank), {}};
  for (const ParameterId id : adaptable_parameters(model)) {
    const Parameter& p = model.parameter(id);
    Random random(seed, static_cast<std::uint64_t>(id));
    AdapterValues::Pair pair{id, std::vector<float>(static_cast<std::size_t>(rank * p.shape[1])),
                             std::vector<float>(static_cast<std::size_t>(p.shape[0] * rank))};
    for (float& x : pair.a) x = 0.2F * random.normal();
    for (float& x : pair.b) x = b_scale * random.normal();
    out.pairs.push_back(std::move(pair));
  }
  return out;
}

}  // namespace tidelock::model::testing

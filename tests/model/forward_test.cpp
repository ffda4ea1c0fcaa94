// The properties that must never break. A row's bits depend on the weights, the adapter and the row's own prefix - and
// on nothing else:
//   solo == batched == shuffled batch; whole prefill == every split point == token by token; 1 thread == 2 == 3; every
//   instruction set; later tokens leave earlier rows alone; below top_k the indexer changes nothing; with a tape ==
//   without; fork == uninterrupted; an adapter of zeros == none, mixed adapters == each alone.
// All go through same_bits(); the twins at the end sabotage a weight, a state or a fork and must fail it.
#include <algorithm>

#include "model/small_model.hpp"

namespace tidelock::model {
namespace forward_test {

using namespace testing;
using Tokens = std::vector<std::int32_t>;

constexpr std::int64_t kTokens = 70;  // over a 64-token block, and four 16-token chunks

std::span<const std::int32_t> piece(const Tokens& tokens, std::int64_t begin, std::int64_t end) {
  return std::span(tokens).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin));
}

class Forward : public ::testing::TestWithParam<Variant> {
 protected:
  Config config = small_config(GetParam());
  std::unique_ptr<Model> model = make_small_model(config);
  Runner runner{*model};
  Tokens tokens = random_tokens(kTokens, 1);
  Rows whole = runner.whole(tokens);
};
INSTANTIATE_TEST_SUITE_P(Family, Forward, ::testing::ValuesIn(all_variants()),
                         [](const auto& test) { return test.param.name(); });

// ---- batch composition ----------------------------------------------------------------------------------------------

TEST_P(Forward, BatchCompositionChangesNoBit) {
  // Prefill from the start, prefill that goes on, and single decode rows, in one batch.
  struct Part {
    Tokens tokens;
    std::int64_t done;  // tokens that are in the state before the batch
  };
  std::vector<Part> parts;
  const std::int64_t lengths[] = {70, 1, 33, 17, 65, 40, 16}, done[] = {0, 0, 0, 16, 64, 39, 15};
  for (std::size_t i = 0; i < std::size(lengths); ++i) parts.push_back({random_tokens(lengths[i], 10 + i), done[i]});
  std::vector<std::size_t> order(parts.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  Random random(3);
  for (int round = 0; round < 5; ++round) {
    std::vector<PlainState> states(parts.size(), PlainState(runner.layout));
    std::vector<Feed> feeds;
    for (const std::size_t i : order) {
      if (parts[i].done != 0) runner.run(states[i], piece(parts[i].tokens, 0, parts[i].done));
      feeds.push_back({&states[i], std::span(parts[i].tokens).subspan(static_cast<std::size_t>(parts[i].done))});
    }
    const auto rows = runner.run(feeds);
    for (std::size_t at = 0; at < order.size(); ++at) {
      const Part& part = parts[order[at]];
      const auto n = static_cast<std::int64_t>(part.tokens.size());
      EXPECT_TRUE(same_bits(rows[at], runner.whole(part.tokens).part(part.done, n)))
          << "round " << round << ", part " << order[at];
    }
    for (std::size_t i = order.size() - 1; i > 0; --i)
      std::swap(order[i], order[random.below(static_cast<std::uint32_t>(i) + 1)]);
  }
}

// ---- where the prefix was cut ---------------------------------------------------------------------------------------

TEST_P(Forward, EverySplitPointGivesTheSameBits) {
  PlainState reference(runner.layout);
  runner.run(reference, tokens);
  for (std::int64_t at = 1; at < kTokens; ++at) {
    PlainState state(runner.layout);
    Rows rows = runner.run(state, piece(tokens, 0, at));
    rows.append(runner.run(state, piece(tokens, at, kTokens)));
    ASSERT_TRUE(same_bits(rows, whole)) << "split at " << at;
    ASSERT_TRUE(state.same_bytes(reference)) << "the state differs after a split at " << at;
  }
}

TEST_P(Forward, TokenByTokenGivesTheSameBits) {
  PlainState reference(runner.layout), state(runner.layout);
  runner.run(reference, tokens);
  Rows rows;
  for (std::int64_t i = 0; i < kTokens; ++i) rows.append(runner.run(state, piece(tokens, i, i + 1)));
  EXPECT_TRUE(same_bits(rows, whole));
  EXPECT_TRUE(state.same_bytes(reference));
}

TEST_P(Forward, RandomChunksGiveTheSameBits) {
  Random random(11);
  for (int round = 0; round < 10; ++round) {
    PlainState state(runner.layout);
    Rows rows;
    while (state.position < kTokens) {
      const std::int64_t from = state.position, to = std::min<std::int64_t>(kTokens, from + random.between(1, 20));
      rows.append(runner.run(state, piece(tokens, from, to)));
    }
    EXPECT_TRUE(same_bits(rows, whole)) << "round " << round;
  }
}

TEST_P(Forward, LaterTokensLeaveEarlierRowsAlone) {
  for (const std::int64_t from : {1, 2, 15, 16, 17, 31, 40, 63, 64, 65, 69}) {
    Tokens changed = tokens;
    for (std::int64_t i = from; i < kTokens; ++i) {
      std::int32_t& token = changed[static_cast<std::size_t>(i)];
      token = (token + 1) % config.vocab;
    }
    const Rows rows = runner.whole(changed);
    EXPECT_TRUE(same_bits(rows.part(0, from), whole.part(0, from))) << "tokens from " << from << " changed";
    EXPECT_FALSE(same_bits(rows.part(from, from + 1), whole.part(from, from + 1))) << "a changed token must matter";
  }
}

// ---- threads and instruction sets -----------------------------------------------------------------------------------

TEST_P(Forward, ThreadsChangeNoBit) {
  const Tokens other = random_tokens(33, 2), single = random_tokens(1, 3);
  const Rows expected[] = {whole, runner.whole(other), runner.whole(single)};
  for (const int threads : {2, 3}) {
    Team team(threads);
    Runner many(*model, team);
    std::vector<PlainState> states(3, PlainState(many.layout));
    const Feed feeds[] = {{&states[0], tokens}, {&states[1], other}, {&states[2], single}};
    const auto rows = many.run(feeds);
    for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(same_bits(rows[i], expected[i])) << threads << " threads";
  }
}

// Makes isa() what it was when it goes.
struct RestoreIsa {
  numerics::Isa before = numerics::isa();
  ~RestoreIsa() { numerics::force_isa(before); }
};

TEST_P(Forward, EveryInstructionSetGivesTheSameBits) {
  using numerics::Isa;
  const RestoreIsa restore;
  for (const Isa isa : {Isa::scalar, Isa::avx2, Isa::avx512, Isa::avx512bf16}) {
    if (!numerics::isa_available(isa)) continue;
    numerics::force_isa(isa);
    ASSERT_EQ(numerics::isa(), isa);
    const std::uint64_t before = numerics::matmul_path_count(isa);
    PlainState state(runner.layout);
    Rows rows = runner.run(state, piece(tokens, 0, 50));
    for (std::int64_t i = 50; i < kTokens; ++i) rows.append(runner.run(state, piece(tokens, i, i + 1)));
    EXPECT_TRUE(same_bits(rows, whole)) << numerics::isa_name(isa);
    EXPECT_GT(numerics::matmul_path_count(isa), before) << numerics::isa_name(isa) << " did not run";
    const auto again = make_small_model(config);  // packed by this path as well
    EXPECT_TRUE(same_bits(Runner(*again).whole(tokens), whole)) << numerics::isa_name(isa);
  }
}

// ---- sparse attention -----------------------------------------------------------------------------------------------

class Sparse : public ::testing::TestWithParam<Format> {};
INSTANTIATE_TEST_SUITE_P(Format, Sparse, ::testing::Values(Format::f32, Format::bf16),
                         [](const auto& test) { return test.param == Format::f32 ? "f32" : "bf16"; });

TEST_P(Sparse, BelowTopKTheIndexerChangesNothing) {
  Config config = small_config({Family::k31, GetParam()});
  const auto sparse = make_small_model(config);
  config.index.top_k = 1 << 20;
  const auto dense = make_small_model(config);
  const Tokens tokens = random_tokens(kTokens, 1);
  const Rows a = Runner(*sparse).whole(tokens), b = Runner(*dense).whole(tokens);
  // The first rows stand in a pass that selects; alone they do not. Both are the dense model's bits.
  EXPECT_TRUE(same_bits(a.part(0, kIndexTopK), b.part(0, kIndexTopK)));
  EXPECT_TRUE(same_bits(Runner(*sparse).whole(piece(tokens, 0, kIndexTopK)), b.part(0, kIndexTopK)));
  EXPECT_FALSE(same_bits(a.part(kIndexTopK, kTokens), b.part(kIndexTopK, kTokens))) << "selection never ran";
  EXPECT_TRUE(same_bits(Runner(*sparse, solo_team(), {.dense_attention = true}).whole(tokens), b));
}

// ---- training and serving -------------------------------------------------------------------------------------------

TEST_P(Forward, ATapeChangesNoBit) {
  const Tokens other = random_tokens(33, 2);
  const Rows expected = runner.whole(other);
  for (const TapeMode mode : {TapeMode::full, TapeMode::recompute}) {
    Runner taping(*model, solo_team(), {.tape = mode});
    PlainState first(taping.layout), second(taping.layout);
    const Feed feeds[] = {{&first, tokens}, {&second, other}};
    const auto rows = taping.run(feeds);
    EXPECT_TRUE(same_bits(rows[0], whole));
    EXPECT_TRUE(same_bits(rows[1], expected));
  }
  const auto serving = make_small_model(config, 7, false);
  EXPECT_TRUE(same_bits(Runner(*serving).whole(tokens), whole));
}

TEST_P(Forward, AForkContinuesAsIfUninterrupted) {
  for (const std::int64_t at : {1, 7, 16, 37, 63, 64, 65}) {
    PlainState parent(runner.layout);
    runner.run(parent, piece(tokens, 0, at));
    PlainState child = parent;
    runner.run(parent, random_tokens(20, 99));  // the parent goes elsewhere and must not reach the child
    EXPECT_TRUE(same_bits(runner.run(child, piece(tokens, at, kTokens)), whole.part(at, kTokens))) << "fork at " << at;
  }
}

// ---- adapters -------------------------------------------------------------------------------------------------------

TEST_P(Forward, AnAdapterOfZerosIsNoAdapter) {
  const auto zero = make_adapter(*model, random_adapter(*model, 3, 0, 5));
  EXPECT_TRUE(same_bits(runner.whole(tokens, zero.get()), whole));
  const auto real = make_adapter(*model, random_adapter(*model, 3, 0.05F, 5));
  EXPECT_FALSE(same_bits(runner.whole(tokens, real.get()), whole)) << "an adapter must matter";
}

TEST_P(Forward, EveryAdaptedMapMatters) {
  config.experts.top_k = config.experts.count;  // so that every expert is chosen
  const auto wide = make_small_model(config);
  Runner wide_runner(*wide);
  const AdapterValues values = random_adapter(*wide, 2, 0.3F, 5);
  const Rows base = wide_runner.whole(tokens);
  for (const auto& pair : values.pairs) {
    const auto one = make_adapter(*wide, {values.rank, values.alpha, {pair}});
    EXPECT_FALSE(same_bits(wide_runner.whole(tokens, one.get()), base)) << wide->parameter(pair.id).name;
  }
}

TEST_P(Forward, MixedAdaptersEqualEachAlone) {
  const auto a = make_adapter(*model, random_adapter(*model, 3, 0.05F, 5));
  const auto b = make_adapter(*model, random_adapter(*model, 5, 0.05F, 6));
  const Adapter* choice[] = {a.get(), nullptr, b.get(), b.get(), a.get(), nullptr};
  const std::int64_t lengths[] = {40, 17, 1, 33, 1, 70};
  std::vector<Tokens> sequences;
  std::vector<PlainState> states(std::size(lengths), PlainState(runner.layout));
  std::vector<Feed> feeds;
  for (std::size_t i = 0; i < std::size(lengths); ++i) sequences.push_back(random_tokens(lengths[i], 20 + i));
  for (std::size_t i = 0; i < std::size(lengths); ++i) feeds.push_back({&states[i], sequences[i], choice[i]});
  const auto rows = runner.run(feeds);
  for (std::size_t i = 0; i < rows.size(); ++i)
    EXPECT_TRUE(same_bits(rows[i], runner.whole(sequences[i], choice[i]))) << "sequence " << i;
  PlainState state(runner.layout);  // and with an adapter, where the prefix was cut still does not matter
  Rows cut = runner.run(state, piece(tokens, 0, 30), a.get());
  for (std::int64_t i = 30; i < kTokens; ++i) cut.append(runner.run(state, piece(tokens, i, i + 1), a.get()));
  EXPECT_TRUE(same_bits(cut, runner.whole(tokens, a.get())));
}

// ---- refusals -------------------------------------------------------------------------------------------------------

TEST_P(Forward, BadTokensAreRefusedBeforeStateIsTouched) {
  PlainState good(runner.layout), state(runner.layout);
  runner.run(state, piece(tokens, 0, 20));
  state.view(30);  // the blocks that the refused pass would use
  const PlainState before = state;
  for (const std::int32_t bad : {-1, config.vocab, 1 << 30}) {
    Tokens more = random_tokens(30, 4);
    more[29] = bad;
    const Feed feeds[] = {{&good, tokens}, {&state, more}};
    try {
      runner.run(feeds);
      FAIL() << "token " << bad << " was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_NE(std::string(error.what()).find(std::to_string(bad)), std::string::npos) << error.what();
    }
    EXPECT_TRUE(state.same_bytes(before));
  }
  EXPECT_TRUE(same_bits(runner.run(good, tokens), whole)) << "the other sequence of the refused batch was touched";
  EXPECT_THROW(runner.whole(random_tokens(config.max_context + 1, 4)), Error);
  Runner taping(*model, solo_team(), {.tape = TapeMode::full});
  EXPECT_THROW(taping.run(state, piece(tokens, 20, 30)), Error) << "a tape needs whole sequences";
}

// ---- twins: what same_bits must catch -------------------------------------------------------------------------------

TEST_P(Forward, OneBitOfAnyWeightIsCaught) {
  const Tokens many = random_tokens(150, 8);
  const Rows base = runner.whole(many);
  // The lowest bit that the format keeps. The selection bias and the indexer only choose, so a bit of theirs may
  // vanish.
  const std::uint32_t bit = config.format == Format::bf16 ? 1U << 17 : 1U << 6;
  const LayerIds& first = model->layers[0];
  const auto mla = static_cast<std::size_t>(std::find(config.layers.begin(), config.layers.end(), LayerKind::mla) -
                                            config.layers.begin());
  const LayerIds& second = model->layers[mla];
  for (const ParameterId id :
       {model->final_norm, model->head, first.kda.q, first.kda.v_conv, first.kda.a_log, first.kda.o, first.ffn.down,
        second.mla.kv_a, second.mla.kv_b, second.mla.o, second.ffn.router, second.ffn.expert_down[0]}) {
    std::vector<float> values = small_values(*model, id, 7);
    const auto old = values;
    float& x = values[values.size() / 2];
    x = std::bit_cast<float>(std::bit_cast<std::uint32_t>(x) ^ bit);
    model->set(id, values);
    EXPECT_FALSE(same_bits(runner.whole(many), base)) << model->parameter(id).name;
    model->set(id, old);
  }
  EXPECT_TRUE(same_bits(runner.whole(many), base));
}

TEST_P(Forward, ADamagedStateIsCaught) {
  const auto layer_of = [&](LayerKind kind) {
    return static_cast<int>(std::find(config.layers.begin(), config.layers.end(), kind) - config.layers.begin());
  };
  const int mla = layer_of(LayerKind::mla), kda = layer_of(LayerKind::kda);
  const std::int64_t at = 20;
  PlainState state(runner.layout);
  runner.run(state, piece(tokens, 0, at));
  const auto continued = [&](const std::function<void(const SequenceView&)>& damage) {
    PlainState fork = state;
    damage(fork.view(kTokens - at));
    return runner.run(fork, piece(tokens, at, kTokens));
  };
  const Rows expected = whole.part(at, kTokens);
  ASSERT_TRUE(same_bits(continued([](const SequenceView&) {}), expected));
  const auto flip = [](void* byte, int bit) {
    *static_cast<unsigned char*>(byte) ^= static_cast<unsigned char>(1 << bit);
  };
  EXPECT_FALSE(same_bits(continued([&](const SequenceView& v) {
                           const auto latents = runner.layout.latents(v, mla);
                           flip(latents.blocks[0] + latents.offset + 5 * latents.row_bytes + 1, 2);
                         }),
                         expected))
      << "a bit of a latent";
  EXPECT_FALSE(same_bits(continued([&](const SequenceView& v) {
                           std::fill_n(runner.layout.conv_tails(v, kda), 9 * config.kda.channels(), 0.0F);
                         }),
                         expected))
      << "the convolution tail was not forked";
  const std::int64_t head = static_cast<std::int64_t>(config.kda.head_dim) * config.kda.head_dim;
  EXPECT_FALSE(same_bits(continued([&](const SequenceView& v) {
                           flip(reinterpret_cast<char*>(runner.layout.kda_state(v, kda) + head / 2) + 2, 6);
                         }),
                         expected))
      << "a bit of the chunk's entry state";
  EXPECT_FALSE(same_bits(continued([&](const SequenceView& v) {
                           std::fill_n(runner.layout.kda_state(v, kda) + head, 16 * config.kda.head_dim, 0.0F);
                         }),
                         expected))
      << "the open chunk's rows were not forked";
  if (config.index.heads == 0) return;
  EXPECT_FALSE(same_bits(continued([&](const SequenceView& v) {
                           const auto keys = runner.layout.index_keys(v, mla);
                           std::memset(keys.blocks[0] + keys.offset, 0, 10 * keys.row_bytes);
                         }),
                         expected))
      << "index keys were lost";
}

TEST_P(Forward, AWrongPositionIsCaught) {
  PlainState state(runner.layout);
  runner.run(state, piece(tokens, 0, 20));
  state.position = 21;  // one token was never computed
  EXPECT_FALSE(same_bits(runner.run(state, piece(tokens, 20, kTokens)), whole.part(20, kTokens)));
}

}  // namespace forward_test
}  // namespace tidelock::model

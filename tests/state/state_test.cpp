// Where a sequence's state lives: slots come back empty, copies are deep, and no two parts of a layout overlap.
#include "state/state.hpp"

#include <rapidcheck.h>

#include <algorithm>
#include <set>

#include "model/small_model.hpp"

namespace tidelock::state {
namespace state_test {

using namespace model::testing;
using model::LayerKind;
using model::StateLayout;

class State : public ::testing::TestWithParam<Variant> {
 protected:
  std::unique_ptr<model::Model> model = make_small_model(small_config(GetParam()), 7, false);
  StateLayout layout{model->config()};
  Pool pool{layout};
  std::vector<std::int32_t> tokens = random_tokens(150, 1);
  Rows whole = Runner(*model).whole(tokens);
  model::Workspace workspace;

  // Runs tokens [position, to) of the sequence through the model; their hidden rows.
  std::vector<float> feed(SequenceState& s, std::span<const std::int32_t> all, std::int64_t to) {
    const std::int64_t from = s.position(), hidden = model->config().hidden;
    const model::Span span{s.extend(to - from), from,
                           all.subspan(static_cast<std::size_t>(from), static_cast<std::size_t>(to - from)), nullptr};
    const float* rows = model::forward(*model, layout, std::span(&span, 1), {}, workspace, solo_team());
    s.advance(to - from);
    return {rows, rows + (to - from) * hidden};
  }
  std::vector<float> expected(std::int64_t from, std::int64_t to) const {
    std::vector<float> out;
    for (std::int64_t i = from; i < to; ++i)
      out.insert(out.end(), whole.values.begin() + i * whole.width,
                 whole.values.begin() + i * whole.width + model->config().hidden);
    return out;
  }
  bool empty(const std::byte* slot) const {
    return std::all_of(slot, slot + layout.recurrent_bytes(), [](std::byte b) { return b == std::byte{0}; });
  }
};
INSTANTIATE_TEST_SUITE_P(Family, State,
                         ::testing::Values(Variant{Family::linear, Format::bf16}, Variant{Family::k31, Format::f32}),
                         [](const auto& test) { return test.param.name(); });

TEST_P(State, AReusedSlotIsEmpty) {
  std::byte* slot = pool.take_slot();
  EXPECT_TRUE(empty(slot));
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(slot) % 64, 0U);
  std::fill_n(slot, layout.recurrent_bytes(), std::byte{0xAB});
  pool.give_slot(slot);
  std::byte* again = pool.take_slot();
  EXPECT_EQ(again, slot) << "memory is used again";
  EXPECT_TRUE(empty(again));
  pool.give_slot(again);
}

TEST_P(State, AReusedSequenceGivesTheSameBits) {
  for (int round = 0; round < 3; ++round) {
    SequenceState s(pool);
    EXPECT_EQ(feed(s, tokens, 150), expected(0, 150)) << "round " << round;
    const std::size_t bytes = pool.allocated_bytes();
    s.reset();
    EXPECT_EQ(s.position(), 0);
    feed(s, random_tokens(100, 9), 100);
    s.reset();
    EXPECT_EQ(feed(s, tokens, 150), expected(0, 150)) << "after a reset, round " << round;
    EXPECT_EQ(pool.allocated_bytes(), bytes) << "a reset keeps its memory";
  }
  EXPECT_EQ(pool.allocated_bytes(), 3 * layout.block_bytes() + layout.recurrent_bytes());
}

TEST_P(State, AForkIsApart) {
  for (const std::int64_t at : {0, 1, 16, 37, 63, 64, 65, 130}) {
    SequenceState parent(pool);
    if (at != 0) feed(parent, tokens, at);
    SequenceState child = parent.fork();
    EXPECT_EQ(child.position(), at);
    const auto other = random_tokens(150, 9);
    if (at != 0) feed(parent, other, 150);
    EXPECT_EQ(feed(child, tokens, 150), expected(at, 150)) << "fork at " << at;
    // And the other way round.
    SequenceState second(pool);
    feed(second, tokens, 100);
    {
      SequenceState brief = second.fork();
      feed(brief, other, 150);
    }
    EXPECT_EQ(feed(second, tokens, 150), expected(100, 150));
  }
}

TEST_P(State, AShallowForkWouldBeCaught) {
  SequenceState parent(pool), child(pool);
  feed(parent, tokens, 37);
  // As a fork that forgot the recurrent slot: blocks and position, but an empty recurrent state.
  feed(child, random_tokens(37, 9), 37);
  EXPECT_NE(feed(child, tokens, 150), expected(37, 150));
}

TEST_P(State, MovesTakeEverythingAlong) {
  SequenceState a(pool);
  feed(a, tokens, 70);
  SequenceState b = std::move(a);
  EXPECT_EQ(b.position(), 70);
  SequenceState c(pool);
  feed(c, random_tokens(10, 9), 10);
  c = std::move(b);
  EXPECT_EQ(c.position(), 70);
  EXPECT_EQ(feed(c, tokens, 150), expected(70, 150));
  std::vector<SequenceState> many;  // grows, and so moves
  for (int i = 0; i < 5; ++i) {
    many.push_back(c.fork());
    EXPECT_EQ(many.front().position(), 150);
  }
}

TEST_P(State, EveryByteIsGivenBack) {
  {
    std::vector<SequenceState> live;
    for (int i = 0; i < 4; ++i) {
      live.emplace_back(pool);
      feed(live.back(), tokens, 65);
    }
    live.erase(live.begin() + 1);
    EXPECT_EQ(pool.allocated_bytes(), 4 * (2 * layout.block_bytes() + layout.recurrent_bytes()));
  }
  std::set<std::byte*> blocks;
  for (int i = 0; i < 8; ++i) blocks.insert(pool.take_block());
  EXPECT_EQ(blocks.size(), 8U) << "a block was handed out twice";
  EXPECT_EQ(pool.allocated_bytes(), 8 * layout.block_bytes() + 4 * layout.recurrent_bytes()) << "memory was lost";
  for (std::byte* block : blocks) pool.give_block(block);
}

TEST(Pool, ServesThreadsAtOnce) {
  const StateLayout layout(small_config({Family::linear, Format::f32}));
  Pool pool(layout);
  Team team(4);
  team.parallel(200, 1, [&](std::int64_t i, std::int64_t) {
    SequenceState s(pool);
    const auto view = s.extend(130);
    for (int b = 0; b < 3; ++b) std::fill_n(view.blocks[b], layout.block_bytes(), static_cast<std::byte>(i));
    std::fill_n(view.recurrent, layout.recurrent_bytes(), static_cast<std::byte>(i));
    for (int b = 0; b < 3; ++b)
      if (view.blocks[b][layout.block_bytes() - 1] != static_cast<std::byte>(i))
        fail(ErrorCode::internal, "a block is shared");
  });
  EXPECT_LE(pool.allocated_bytes(), 4 * (3 * layout.block_bytes() + layout.recurrent_bytes()));
}

// ---- layout ---------------------------------------------------------------------------------------------------------

// The byte ranges of every part, as the layout's views give them; each must be aligned, inside, and its own.
struct Range {
  std::size_t begin, end;
};
bool fit(std::vector<Range> ranges, std::size_t size) {
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  std::size_t at = 0;
  for (const Range& r : ranges) {
    if (r.begin < at || r.begin % 64 != 0 || r.end > size) return false;
    at = r.end;
  }
  return true;
}

TEST(Layout, PartsFitAndDoNotOverlap) {
  EXPECT_TRUE(rc::check("layout of a random config", [] {
    model::Config c;
    c.format = *rc::gen::arbitrary<bool>() ? Format::bf16 : Format::f32;
    c.kda = {.heads = *rc::gen::inRange(1, 6),
             .head_dim = 16 * *rc::gen::inRange(1, 5),
             .bounded = *rc::gen::arbitrary<bool>()};
    c.mla = {.heads = 2, .latent = *rc::gen::inRange(1, 70), .nope = 4, .extra = *rc::gen::inRange(1, 10), .value = 4};
    if (*rc::gen::arbitrary<bool>()) c.index = {.heads = 2, .dim = *rc::gen::inRange(1, 40), .top_k = 8};
    for (const bool mla : *rc::gen::container<std::vector<bool>>(rc::gen::arbitrary<bool>()))
      c.layers.push_back(mla ? LayerKind::mla : LayerKind::kda);
    const StateLayout layout(c);
    // Views over one block and a recurrent part that start at address 0 of their own.
    std::vector<std::byte> block(layout.block_bytes() + 64), recurrent(layout.recurrent_bytes() + 64);
    std::byte* pointers[] = {block.data()};
    const model::SequenceView view{pointers, recurrent.data()};
    std::vector<Range> in_block, in_recurrent;
    const std::size_t element = c.format == Format::bf16 ? 2 : 4;
    const numerics::KdaShape shape{c.kda.heads, c.kda.head_dim, c.kda.head_dim, c.kda.bounded};
    const std::size_t state_bytes = static_cast<std::size_t>(c.kda.heads) * numerics::kda_head_state_floats(shape) * 4;
    const std::size_t tail_bytes = 9 * static_cast<std::size_t>(c.kda.channels()) * 4;
    const auto offset = [&](const float* p) {
      return static_cast<std::size_t>(reinterpret_cast<const std::byte*>(p) - recurrent.data());
    };
    for (int layer = 0; layer < c.layer_count(); ++layer) {
      if (c.layers[static_cast<std::size_t>(layer)] == LayerKind::mla) {
        const auto latents = layout.latents(view, layer), keys = layout.index_keys(view, layer);
        RC_ASSERT(latents.row_bytes >= element * static_cast<std::size_t>(c.mla.key_dim()));
        RC_ASSERT(keys.row_bytes >= element * static_cast<std::size_t>(c.index.dim));
        in_block.push_back({latents.offset, latents.offset + 64 * latents.row_bytes});
        if (c.index.heads != 0) in_block.push_back({keys.offset, keys.offset + 64 * keys.row_bytes});
      } else {
        const std::size_t state = offset(layout.kda_state(view, layer)), tails = offset(layout.conv_tails(view, layer));
        in_recurrent.push_back({state, state + state_bytes});
        in_recurrent.push_back({tails, tails + tail_bytes});
      }
    }
    RC_ASSERT(fit(in_block, layout.block_bytes()));
    RC_ASSERT(fit(in_recurrent, layout.recurrent_bytes()));
    RC_ASSERT(layout.block_bytes() % 64 == 0U && layout.recurrent_bytes() % 64 == 0U);
    RC_ASSERT((layout.block_bytes() == 0U) == in_block.empty());
    RC_ASSERT((layout.recurrent_bytes() == 0U) == in_recurrent.empty());
    if (in_recurrent.size() >= 2) {  // the check itself must be able to fail
      in_recurrent[1].begin -= 64;
      RC_ASSERT(!fit(in_recurrent, layout.recurrent_bytes()));
    }
  }));
}

TEST(Layout, BlocksForTokens) {
  EXPECT_EQ(StateLayout::blocks_for(0), 0);
  EXPECT_EQ(StateLayout::blocks_for(1), 1);
  EXPECT_EQ(StateLayout::blocks_for(64), 1);
  EXPECT_EQ(StateLayout::blocks_for(65), 2);
}

}  // namespace state_test
}  // namespace tidelock::state

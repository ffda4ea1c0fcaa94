// What is kept for sequences to come. The head property: over any operations the cache finds exactly what a list of all
// kept prefixes finds, hands out the bytes that were put in, and holds exactly the memory that they need.
#include "state/prefix_cache.hpp"

#include <algorithm>
#include <list>
#include <set>

#include "base/base.hpp"
#include "model/expect_refused.hpp"
#include "model/small_model.hpp"
#include "state/marked_states.hpp"

namespace tidelock::state {
namespace prefix_cache_test {

using namespace testing;
using namespace model::testing;

class Prefixes : public ::testing::TestWithParam<Kind>, protected MarkedStates {
 protected:
  Prefixes() : MarkedStates(GetParam()) {}
};
INSTANTIATE_TEST_SUITE_P(Models, Prefixes, ::testing::Values(Kind::hybrid, Kind::attention_only, Kind::recurrent_only),
                         [](const auto& test) { return name_of(test.param); });

// All kept prefixes in a list, the next to go in front; probation is not bounded here (the pool has no limit).
struct Kept {
  std::uint64_t tenant;
  Tokens tokens;
};

struct Reference {
  bool recurrent, blocks;
  std::list<Kept> protected_use, probation;

  static bool starts(const Tokens& tokens, std::span<const std::int32_t> with) {
    return with.size() <= tokens.size() && std::equal(with.begin(), with.end(), tokens.begin());
  }
  std::list<Kept>::iterator find(std::list<Kept>& in, std::uint64_t tenant, std::span<const std::int32_t> tokens) {
    return std::find_if(in.begin(), in.end(), [&](const Kept& k) {
      return k.tenant == tenant && k.tokens.size() == tokens.size() && starts(k.tokens, tokens);
    });
  }
  void touch(std::uint64_t tenant, std::span<const std::int32_t> tokens) {
    for (auto* from : {&protected_use, &probation})
      if (const auto it = find(*from, tenant, tokens); it != from->end())
        return protected_use.splice(protected_use.end(), *from, it);
  }
  void insert(const Kept& kept, Segment segment) {
    if (kept.tokens.empty()) return;
    for (auto* in : {&protected_use, &probation})
      if (find(*in, kept.tenant, kept.tokens) != in->end()) {
        if (segment == Segment::protected_use) touch(kept.tenant, kept.tokens);
        return;
      }
    (segment == Segment::protected_use ? protected_use : probation).push_back(kept);
  }
  bool evict() {
    auto& from = protected_use.empty() ? probation : protected_use;
    if (from.empty()) return false;
    from.pop_front();
    return true;
  }
  // Position of the hit, and how far whole blocks are known.
  std::pair<std::size_t, std::size_t> lookup(std::uint64_t tenant, const Tokens& prompt) {
    const auto usable = std::span(prompt).first(prompt.size() - 1);
    std::size_t hit = 0, known = 0;
    for (const auto* in : {&protected_use, &probation})
      for (const Kept& k : *in) {
        if (k.tenant != tenant) continue;
        const auto differ = std::mismatch(k.tokens.begin(), k.tokens.end(), usable.begin(), usable.end()).first;
        const auto common = static_cast<std::size_t>(differ - k.tokens.begin());
        known = std::max(known, common / 64 * 64);
        if (common == k.tokens.size()) hit = std::max(hit, common);
      }
    if (!recurrent && known > hit) return {known, known};
    if (hit > 0) touch(tenant, usable.first(hit));
    return {hit, known};
  }
  std::size_t bytes(const model::StateLayout& layout) const {
    std::set<std::pair<std::uint64_t, Tokens>> chains;
    std::size_t count = 0, tails = 0;
    for (const auto* in : {&protected_use, &probation})
      for (const Kept& k : *in) {
        ++count;
        tails += k.tokens.size() % 64 != 0 ? 1 : 0;
        for (std::size_t n = 64; n <= k.tokens.size(); n += 64)
          chains.insert({k.tenant, {k.tokens.begin(), k.tokens.begin() + static_cast<std::ptrdiff_t>(n)}});
      }
    return (chains.size() + tails) * layout.block_bytes() + count * layout.recurrent_bytes();
  }
};

TEST_P(Prefixes, AgreeWithAListOfAllKeptOnes) {
  std::int64_t hits = 0;
  for (std::uint64_t seed = 0; seed < 30; ++seed) {
    Random random(seed);
    Pool pool(layout);
    PrefixCache cache(pool);
    Reference reference{recurrent, blocks, {}, {}};
    for (int i = 0; i < 150; ++i) {
      const std::uint64_t tenant = random.below(2);
      const Tokens tokens = some_tokens(random);
      switch (random.below(5)) {
        case 0:
          EXPECT_EQ(cache.evict(), reference.evict());
          break;
        case 1:
          if (random.below(20) == 0) {
            cache.clear();
            reference.protected_use.clear();
            reference.probation.clear();
          }
          break;
        default: {  // a request: what is kept is gone on from, and what comes of it is kept
          PrefixCache::Hit hit = cache.lookup(lineage_of(tenant), tokens);
          const auto [position, known] = reference.lookup(tenant, tokens);
          ASSERT_EQ(hit.state.position(), static_cast<std::int64_t>(position))
              << "seed " << seed << ", operation " << i;
          ASSERT_EQ(hit.known, static_cast<std::int64_t>(known));
          ASSERT_TRUE(position == 0 || holds(hit.state, tenant, tokens)) << "seed " << seed << ", operation " << i;
          hits += position > 0 ? 1 : 0;
          feed(hit.state, tenant, tokens);
          const Segment segment = random.below(2) == 0 ? Segment::probation : Segment::protected_use;
          cache.insert(lineage_of(tenant), tokens, random.below(2) == 0 ? hit.state.fork() : std::move(hit.state),
                       segment);
          reference.insert({tenant, tokens}, segment);
        }
      }
      ASSERT_NO_THROW(cache.check()) << "seed " << seed << ", operation " << i;
      ASSERT_EQ(pool.used_bytes(), reference.bytes(layout)) << "seed " << seed << ", operation " << i;
    }
  }
  EXPECT_GT(hits, 300);
}

TEST_P(Prefixes, WhoGoesOnDoesNotWriteIntoWhatIsKept) {
  Pool pool(layout);
  PrefixCache cache(pool);
  const Tokens tokens = random_tokens(100, 1);
  SequenceState first(pool);
  feed(first, 7, tokens);
  cache.insert(lineage_of(7), tokens, first.fork(), Segment::protected_use);
  Tokens a = tokens, b = tokens;
  for (int i = 0; i < 40; ++i) {
    a.push_back(1);
    b.push_back(2);
  }
  for (int round = 0; round < 2; ++round)
    for (const Tokens& longer : {a, b}) {
      PrefixCache::Hit hit = cache.lookup(lineage_of(7), longer);
      ASSERT_EQ(hit.state.position(), 100);
      feed(hit.state, 7, longer);
      EXPECT_TRUE(holds(hit.state, 7, longer));
    }
  feed(first, 7, a);  // the donor, too
  PrefixCache::Hit hit = cache.lookup(lineage_of(7), b);
  EXPECT_TRUE(holds(hit.state, 7, b));
}

TEST_P(Prefixes, AStateThatIsNotWhatItSaysIsRefused) {
  Pool pool(layout);
  PrefixCache cache(pool);
  SequenceState s(pool);
  feed(s, 1, random_tokens(10, 1));
  model::testing::expect_refused(ErrorCode::internal, "a state at 10 was to be kept for 11 tokens", [&] {
    cache.insert(lineage_of(1), random_tokens(11, 1), s.fork(), Segment::protected_use);
  });
}

TEST(Lineage, PartsDoNotRunTogether) {
  const std::array<std::string_view, 2> a{"ab", "c"}, b{"a", "bc"}, c{"ab", "c"};
  EXPECT_NE(lineage(a), lineage(b));
  EXPECT_EQ(lineage(a), lineage(c));
}

TEST(Eviction, ProbationGoesFirstWhenItIsOverItsBound) {
  EvictionOrder order(100);
  order.insert(1, 10, Segment::protected_use);
  order.insert(2, 90, Segment::probation);
  EXPECT_EQ(order.victim(), 1U) << "probation is within its bound";
  order.insert(3, 20, Segment::probation);
  EXPECT_TRUE(order.over());
  EXPECT_EQ(order.victim(), 2U);
  order.touch(2);  // hit: it moves up
  EXPECT_FALSE(order.over());
  EXPECT_EQ(order.victim(), 1U);
  order.touch(1);
  EXPECT_EQ(order.victim(), 2U);
  order.erase(2);
  order.erase(1);
  EXPECT_EQ(order.victim(), 3U);
  order.erase(3);
  EXPECT_EQ(order.victim(), std::nullopt);
}

TEST(Eviction, ProbationMayAlwaysHoldOne) {
  EvictionOrder order(5);
  order.insert(1, 1000, Segment::probation);
  EXPECT_FALSE(order.over());
  order.insert(2, 1000, Segment::probation);
  EXPECT_TRUE(order.over());
  EXPECT_EQ(order.victim(), 1U);
}

TEST(Pool, IdleMemoryOfOneKindMakesRoomForTheOther) {
  const model::StateLayout layout(small_config({Family::linear, Format::f32}));
  const std::size_t limit = 8 * layout.block_bytes() + 4 * layout.recurrent_bytes();
  Pool pool(layout, limit);
  std::vector<std::byte*> taken;
  while (pool.used_bytes() + layout.block_bytes() <= limit) taken.push_back(pool.take_block());
  for (std::byte* block : taken) pool.give_block(block);
  EXPECT_EQ(pool.used_bytes(), 0U);
  taken.clear();
  while (pool.used_bytes() + layout.recurrent_bytes() <= limit) taken.push_back(pool.take_slot());
  EXPECT_LE(pool.allocated_bytes(), limit);
  EXPECT_GT(taken.size(), 4U);
  for (std::byte* slot : taken) pool.give_slot(slot);
}

}  // namespace prefix_cache_test
}  // namespace tidelock::state

// Plans: their bytes are those that a run allocates, and their speed follows from them.
#include "model/plan.hpp"

#include "model/convert.hpp"
#include "model/gguf_stored.hpp"
#include "model/temporary_folder.hpp"
#include "state/state.hpp"

namespace tidelock::model {
namespace plan_test {

using namespace testing;

std::uint64_t sum(const std::vector<LedgerLine>& lines) {
  std::uint64_t total = 0;
  for (const LedgerLine& line : lines) total += line.bytes;
  return total;
}
std::uint64_t line(const std::vector<LedgerLine>& lines, const std::string& begin) {
  for (const LedgerLine& l : lines)
    if (l.what.starts_with(begin)) return l.bytes;
  return 0;
}

class PlanOf : public ::testing::TestWithParam<Variant> {};
INSTANTIATE_TEST_SUITE_P(Family, PlanOf, ::testing::ValuesIn(all_variants()),
                         [](const auto& test) { return test.param.name(); });

TEST_P(PlanOf, WeightsAreThoseOfALoadedModel) {
  TemporaryFolder folder;
  const auto model = make_small_model(gguf_config_of(GetParam(), true), 7, false);
  const PlanRequest request{.context = 100, .sequences = 2, .memory = 1ULL << 30, .memory_bandwidth = 1e9};
  EXPECT_EQ(make_plan(*model, config_formats(*model), request).weight_bytes, model->weight_bytes());
  save_model(
      *model,
      [values = std::vector<float>(), &model](ParameterId id) mutable {
        values = small_values(*model, id, 7);
        return std::span<const float>(values);
      },
      folder.path / "plain");
  for (const Format format : {Format::q8_0, Format::mxfp4, Format::bf16}) {
    const auto path = folder.path / "x.gguf";
    convert_model(folder.path / "plain", path, {.to_gguf = true, .type = format});
    const auto source = open_weights(path);
    const Model shape(source->config(), false);
    source->bind(shape);
    const auto formats = [&](ParameterId id, int piece) { return source->format(id, piece); };
    EXPECT_EQ(make_plan(shape, formats, request).weight_bytes, load_model(path, false)->weight_bytes());
  }
}

TEST_P(PlanOf, StateIsWhatAPoolAllocates) {
  const Model model(small_config(GetParam()), false);
  const StateLayout layout(model.config());
  for (const std::int64_t context : {1, 64, 65, 199}) {
    state::Pool pool(layout);
    std::vector<state::SequenceState> sequences;
    for (int i = 0; i < 3; ++i) sequences.emplace_back(pool).extend(context);
    const PlanRequest request{.context = context, .sequences = 3};
    EXPECT_EQ(make_plan(model, config_formats(model), request).state_bytes, pool.allocated_bytes());
  }
}

TEST_P(PlanOf, WorkMemoryIsWhatAPassTakes) {
  const auto model = make_small_model(small_config(GetParam()), 7, false);
  // Enough rows that the arena's chunks of 4 MB are small beside the pass: 12 sequences of 190 tokens.
  const auto tokens = random_tokens(190, 3);
  Runner runner(*model);
  std::vector<PlainState> states(12, PlainState(runner.layout));
  std::vector<Feed> feeds;
  for (PlainState& state : states) feeds.push_back({&state, tokens});
  runner.run(feeds);
  const auto planned = static_cast<double>(workspace_bytes(*model, 12 * 190, 190));
  const auto taken = static_cast<double>(runner.workspace.reserved_bytes());
  EXPECT_LT(planned, taken * 1.1);
  EXPECT_GT(planned + 2 * (4 << 20), taken * 0.9);
}

TEST_P(PlanOf, AStepMovesWhatItReads) {
  const Model model(small_config(GetParam()), false);
  const Config& c = model.config();
  const auto moved = [&](std::int64_t context, std::int64_t sequences) {
    return make_plan(model, config_formats(model), {.context = context, .sequences = sequences});
  };
  const Plan one = moved(100, 1), two = moved(100, 2), longer = moved(200, 1);
  EXPECT_EQ(sum(one.moved), one.moved_bytes);
  EXPECT_EQ(sum(one.persists), one.weight_bytes + one.state_bytes);
  EXPECT_EQ(line(two.moved, "latents"), 2 * line(one.moved, "latents"));
  EXPECT_EQ(line(two.moved, "KDA"), line(one.moved, "KDA"));
  const bool sparse = c.index.heads != 0;
  EXPECT_EQ(line(longer.moved, "latents"), (sparse ? 1 : 2) * line(one.moved, "latents"));
  EXPECT_EQ(line(longer.moved, "index keys"), 2 * line(one.moved, "index keys"));
  // Two of six experts a token: two tokens touch 6 (1 - (4/6)^2) = 10/3 of them.
  const double routed = static_cast<double>(line(one.persists, "routed experts"));
  EXPECT_NEAR(static_cast<double>(line(one.moved, "routed experts")), routed / 3, 2);
  EXPECT_NEAR(static_cast<double>(line(two.moved, "routed experts")), routed * 5 / 9, 2);
}

TEST_P(PlanOf, SpeedFollowsFromTheBytes) {
  const Model model(small_config(GetParam()), false);
  PlanRequest request{.context = 100, .sequences = 2, .memory = 1ULL << 30, .memory_bandwidth = 1e9};
  const auto plan = [&] { return make_plan(model, config_formats(model), request); };
  const Plan fits = plan();
  EXPECT_TRUE(fits.fits);
  EXPECT_EQ(fits.streamed_bytes, 0U);
  EXPECT_DOUBLE_EQ(fits.tokens_per_second, 2 * 1e9 / static_cast<double>(fits.moved_bytes));
  request.memory = fits.weight_bytes + fits.state_bytes + fits.workspace_bytes;
  EXPECT_TRUE(plan().fits);
  --request.memory;  // the embedding is what a step reads least of
  const Plan short_of_a_byte = plan();
  EXPECT_FALSE(short_of_a_byte.fits);
  request.memory = fits.workspace_bytes + 1;
  const Plan nothing = plan();
  EXPECT_EQ(nothing.tokens_per_second, 0);  // no NVMe to stream from
  request.nvme = 1e6;
  const Plan streamed = plan();
  const auto logits = line(fits.moved, "logits");
  EXPECT_NEAR(static_cast<double>(streamed.streamed_bytes), static_cast<double>(fits.moved_bytes - logits), 20);
  EXPECT_DOUBLE_EQ(streamed.step_seconds, static_cast<double>(streamed.streamed_bytes) / 1e6);
  request.memory = 1;
  EXPECT_EQ(plan().tokens_per_second, 0);
}

TEST(PlanK3, ThePublishedConfigNeedsWhatIsPublished) {
  const auto path = std::filesystem::path(TIDELOCK_SOURCE_DIR) / "tests/model/fixtures/k3_config.json";
  const Model model(parse_config(read_file(path), path.string()), false);
  EXPECT_EQ(model.config().layer_count(), 93);
  const Plan plan =
      make_plan(model, config_formats(model),
                {.context = 1 << 20, .sequences = 8, .memory = 64ULL << 30, .memory_bandwidth = 34e9, .nvme = 7e9});
  // spec/model.md 3.1: 2.8 T parameters, 108.8 GB of trunk beside embedding and head, 1.42 TiB in all. Here routers are
  // float32.
  EXPECT_NEAR(static_cast<double>(model.parameter_count()), 2.8e12, 0.03e12);
  const double ends = static_cast<double>(line(plan.persists, "embedding") + line(plan.persists, "head"));
  const double routed = static_cast<double>(line(plan.persists, "routed experts"));
  const double router = static_cast<double>(line(plan.persists, "router"));
  const double trunk = static_cast<double>(plan.weight_bytes) - ends - routed - router / 2;
  EXPECT_NEAR(trunk / 108.8e9, 1, 0.02);
  EXPECT_NEAR(static_cast<double>(plan.weight_bytes) / (1.42 * std::pow(2.0, 40)), 1, 0.01);
  EXPECT_FALSE(plan.fits);
  EXPECT_EQ(plan.resident_bytes + plan.workspace_bytes, 64ULL << 30);
  EXPECT_GT(plan.tokens_per_second, 0);
}

}  // namespace plan_test
}  // namespace tidelock::model

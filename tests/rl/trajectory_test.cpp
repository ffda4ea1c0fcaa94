#include "rl/trajectory.hpp"

#include <gtest/gtest.h>

#include <limits>

#include "base/error.hpp"

namespace tidelock::rl {
namespace trajectory_test {

Trajectory example() {
  Trajectory t;
  t.task_id = "calc-1";
  t.append_prompt(std::vector<std::int32_t>{1, 2, 3});
  t.append_sampled(std::vector<std::int32_t>{4, 5}, std::vector<float>{-0.5F, -1.0F}, 7);
  t.append_sampled(std::vector<std::int32_t>{6}, std::vector<float>{-0.25F}, 7);
  t.append_sampled(std::vector<std::int32_t>{7}, std::vector<float>{-0.125F}, 8);
  t.append_tool(std::vector<std::int32_t>{8, 9});
  return t;
}

TEST(Trajectory, SpansFollowOriginAndVersion) {
  const Trajectory t = example();
  t.check();
  EXPECT_EQ(
      t.spans,
      (std::vector<Span>{
          {0, 3, Source::prompt, 0}, {3, 6, Source::sampled, 7}, {6, 7, Source::sampled, 8}, {7, 9, Source::tool, 0}}));
  EXPECT_EQ(t.mask, (std::vector<std::uint8_t>{0, 0, 0, 1, 1, 1, 1, 0, 0}));
  EXPECT_EQ(t.sampled_positions(), (std::vector<std::int64_t>{3, 4, 5, 6}));
}

TEST(Trajectory, ASampledTokenWithoutLogprobIsRefused) {
  Trajectory t = example();
  EXPECT_THROW(t.append_sampled(std::vector<std::int32_t>{1, 2}, std::vector<float>{-1.0F}, 8), Error);
}

TEST(Trajectory, CheckFindsEveryBrokenRule) {
  const auto broken = [](auto&& breaking) {
    Trajectory t = example();
    breaking(t);
    EXPECT_THROW(t.check(), Error);
  };
  broken([](Trajectory& t) { t.mask[0] = 1; });
  broken([](Trajectory& t) { t.mask.pop_back(); });
  broken([](Trajectory& t) { t.logprobs.pop_back(); });
  broken([](Trajectory& t) { t.logprobs[1] = 0.5F; });
  broken([](Trajectory& t) { t.logprobs[1] = -std::numeric_limits<float>::infinity(); });
  broken([](Trajectory& t) { t.spans[1].begin = 4; });
  broken([](Trajectory& t) { t.spans.pop_back(); });
  broken([](Trajectory& t) { t.spans[0].weight_version = 3; });
  broken([](Trajectory& t) { t.reward = 1.5; });
}

TEST(Trajectory, NamesGoBothWays) {
  for (const auto status : {Status::completed, Status::truncated, Status::aborted, Status::failed, Status::malformed})
    EXPECT_EQ(parse_status(name_of(status)), status);
  for (const auto source : {Source::prompt, Source::sampled, Source::tool})
    EXPECT_EQ(parse_source(name_of(source)), source);
  EXPECT_THROW(parse_status("done"), Error);
}

TEST(Gradings, AllFailedIsAnErrorAndOneSuccessIsNot) {
  const auto with = [](std::initializer_list<Status> statuses) {
    std::vector<Trajectory> batch;
    for (const Status status : statuses) {
      batch.emplace_back();
      batch.back().task_id = fmt::format("task-{}", batch.size());
      batch.back().status = status;
      batch.back().failure = "no verifier";
    }
    return batch;
  };
  for (const auto& batch : {with({Status::failed, Status::failed}), with({Status::malformed, Status::failed})}) {
    try {
      check_gradings(batch, "step 3");
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::io);
      const std::string text = error.what();
      EXPECT_NE(text.find("step 3"), std::string::npos) << text;
      EXPECT_NE(text.find("no verifier"), std::string::npos) << text;
    }
  }
  for (const auto& batch : {with({}), with({Status::failed, Status::completed}), with({Status::truncated}),
                            with({Status::malformed, Status::malformed})})
    EXPECT_NO_THROW(check_gradings(batch, "step 3"));
}

}  // namespace trajectory_test
}  // namespace tidelock::rl

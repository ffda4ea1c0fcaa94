// The engine's thread: what goes in comes out as from the engine alone, cancelled work is freed, limits hold. And keys.
#include "serve/engine_loop.hpp"

#include <gtest/gtest.h>

#include <future>
#include <set>

#include "model/expect_refused.hpp"
#include "serve/api_error.hpp"
#include "serve/keys.hpp"
#include "serve/support.hpp"

namespace tidelock::serve {
namespace engine_loop_test {

using model::testing::expect_refused;
using testing::nano_model;

// A request whose tokens are waited for.
struct Client {
  std::mutex mutex;
  std::condition_variable rung;
  int rings = 0;
  std::vector<SampledToken> tokens;
  std::shared_ptr<Generation> generation;

  Client(std::size_t choices, std::int64_t max_tokens, std::uint64_t seed = 1) {
    std::vector<engine::SamplingParams> params(choices);
    for (auto& p : params) {
      p.max_tokens = max_tokens;
      p.seed = seed++;
    }
    generation = std::make_shared<Generation>(Wanted{{5, 6, 7}, params}, [this] {
      const std::lock_guard lock(mutex);
      ++rings;
      rung.notify_one();
    });
  }
  // False after a minute without enough.
  bool wait_for(std::size_t count) {
    while (tokens.size() < count && generation->failure().empty()) {
      std::unique_lock lock(mutex);
      if (!rung.wait_for(lock, std::chrono::minutes(1), [this] { return rings > 0; })) return false;
      rings = 0;
      lock.unlock();
      for (auto& token : generation->take()) tokens.push_back(std::move(token));
    }
    return true;
  }
  std::vector<std::int32_t> ids(std::size_t choice) const {
    std::vector<std::int32_t> out;
    for (const auto& token : tokens)
      if (token.choice == choice) out.push_back(token.token);
    return out;
  }
};

std::vector<std::int32_t> alone(std::int64_t max_tokens, std::uint64_t seed) {
  engine::Engine engine(nano_model(), solo_team());
  engine::SamplingParams params;
  params.max_tokens = max_tokens;
  params.seed = seed;
  const std::vector<std::int32_t> prompt{5, 6, 7};
  engine.add(prompt, std::span(&params, 1));
  std::vector<std::int32_t> out;
  while (engine.has_work())
    for (const auto& event : engine.step()) out.push_back(event.token);
  return out;
}

bool eventually(const std::function<bool()>& condition) {
  for (int i = 0; i < 6000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

TEST(EngineLoop, ManyRequestsSayWhatEachSaysAlone) {
  EngineLoop loop(nano_model(), solo_team(), {.running = 3, .waiting = 10});
  std::vector<std::unique_ptr<Client>> clients;
  for (std::uint64_t i = 0; i < 5; ++i) {
    clients.push_back(std::make_unique<Client>(2, 12, 10 * i));
    loop.submit(clients.back()->generation);
  }
  for (std::uint64_t i = 0; i < 5; ++i) {
    ASSERT_TRUE(clients[i]->wait_for(24));
    EXPECT_EQ(clients[i]->ids(0), alone(12, 10 * i));
    EXPECT_EQ(clients[i]->ids(1), alone(12, 10 * i + 1));
  }
  EXPECT_TRUE(eventually([&] { return loop.counters().running == 0; }));
  EXPECT_EQ(loop.counters().sampled_tokens, 120);
  EXPECT_EQ(loop.counters().prompt_tokens, 15);
  EXPECT_EQ(loop.counters().cancelled, 0);
}

TEST(EngineLoop, CancelledWorkIsFreed) {
  EngineLoop loop(nano_model(), solo_team(), {.running = 2, .waiting = 10});
  Client endless(2, 4000), waits(1, 5);
  loop.submit(endless.generation);
  ASSERT_TRUE(endless.wait_for(2));
  loop.submit(waits.generation);
  Client never(1, 5);
  loop.submit(never.generation);
  loop.cancel(never.generation);  // while it waits
  loop.cancel(endless.generation, 0);
  ASSERT_TRUE(waits.wait_for(5));  // one place was enough
  const std::int64_t steps = loop.counters().steps;
  loop.cancel(endless.generation);
  EXPECT_TRUE(eventually([&] { return loop.counters().running == 0; }));
  EXPECT_EQ(loop.counters().cancelled, 2);
  EXPECT_GT(steps, 0);
  EXPECT_TRUE(never.generation->take().empty());
  // Nothing runs any more: the engine takes no step.
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const std::int64_t rested = loop.counters().steps;
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(loop.counters().steps, rested);
  loop.cancel(endless.generation);  // once more is nothing
}

TEST(EngineLoop, AFullQueueTurnsAway) {
  EngineLoop loop(nano_model(), solo_team(), {.running = 1, .waiting = 1});
  Client runs(1, 4000), waits(1, 4000), late(1, 5);
  loop.submit(runs.generation);
  ASSERT_TRUE(runs.wait_for(1));
  loop.submit(waits.generation);
  expect_refused(ErrorCode::exhausted, "1 requests wait", [&] { loop.submit(late.generation); });
}

TEST(EngineLoop, ABadRequestFailsAlone) {
  EngineLoop loop(nano_model(), solo_team(), {});
  Client good(1, 8, 3);
  std::promise<void> told;
  const auto bad = std::make_shared<Generation>(Wanted{{1 << 20}, std::vector<engine::SamplingParams>(1)},
                                                [&] { told.set_value(); });
  loop.submit(bad);
  loop.submit(good.generation);
  ASSERT_TRUE(good.wait_for(8));
  told.get_future().wait();
  EXPECT_NE(bad->failure().find("outside the vocabulary"), std::string::npos);
  EXPECT_EQ(good.ids(0), alone(8, 3));
}

// ---- keys ----------------------------------------------------------------------------------------------------------

int status_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const ApiError& error) {
    return error.status();
  }
  return 200;
}

TEST(Keys, OnlyTheRightKeyGetsInAndOnlySoOften) {
  Keys keys =
      Keys::parse(fmt::format("# people\n{} ann\n\n{} bob 2\n", sha256_hex("ann's"), sha256_hex("bob's")), "keys");
  EXPECT_TRUE(keys.required());
  EXPECT_EQ(status_of([&] { keys.check("Bearer ann's"); }), 200);
  for (const char* wrong : {"", "Bearer ", "ann's", "Bearer bann's", "bearer ann's", "Basic ann's"})
    EXPECT_EQ(status_of([&] { keys.check(wrong); }), 401) << wrong;
  {
    const auto first = keys.enter("Bearer bob's"), second = keys.enter("Bearer bob's");
    EXPECT_EQ(status_of([&] { keys.enter("Bearer bob's"); }), 429);
    EXPECT_EQ(status_of([&] { keys.enter("Bearer ann's"); }), 200);
  }
  EXPECT_EQ(status_of([&] { keys.enter("Bearer bob's"); }), 200);
  Keys open;
  EXPECT_EQ(status_of([&] { open.check(""); }), 200);
  EXPECT_FALSE(open.required());
}

TEST(Keys, ABadFileIsRefusedWithoutShowingIt) {
  const std::string hash = sha256_hex("x");
  for (const std::string& text :
       {std::string("secret ann"), hash, hash + " ann 0", hash + " ann x", hash + " ann 1 more",
        hash.substr(1) + " ann", fmt::format("G{} ann", hash.substr(1))}) {
    try {
      Keys::parse(fmt::format("# one\n{}\n", text), "keys");
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::corrupt_data);
      EXPECT_NE(std::string(error.what()).find("line 2"), std::string::npos) << error.what();
      EXPECT_EQ(std::string(error.what()).find("secret"), std::string::npos) << error.what();
    }
  }
  expect_refused(ErrorCode::corrupt_data, "stands twice", [&] { Keys::parse(hash + " a\n" + hash + " b\n", "keys"); });
  expect_refused(ErrorCode::corrupt_data, "no key", [] { Keys::parse("# none\n", "keys"); });
}

TEST(EngineLoop, APauseHoldsStopsOrGivesUp) {
  for (const Pause mode : {Pause::keep, Pause::wait, Pause::abort}) {
    EngineLoop loop(nano_model(), solo_team(), {});
    Client running(1, 400, 3), late(1, 8, 5);
    loop.submit(running.generation);
    ASSERT_TRUE(running.wait_for(3));
    loop.pause(mode);
    loop.submit(late.generation);
    EXPECT_TRUE(loop.counters().paused);
    if (mode == Pause::wait) {
      ASSERT_TRUE(running.wait_for(400)) << "what runs is run to its end";
    }
    if (mode == Pause::abort) {
      EXPECT_FALSE(running.wait_for(400) && running.generation->failure().empty());
      EXPECT_NE(running.generation->failure().find("paused"), std::string::npos);
    }
    loop.forget();  // it works all the same
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    EXPECT_TRUE(late.generation->take().empty()) << "it ran while the loop was paused";
    loop.resume();
    ASSERT_TRUE(late.wait_for(8));
    EXPECT_EQ(late.ids(0), alone(8, 5));
    if (mode == Pause::keep) {
      ASSERT_TRUE(running.wait_for(400));
      EXPECT_EQ(running.ids(0), alone(400, 3)) << "the pause changed an answer";
    }
  }
}

TEST(Admission, IsByPriorityThenByArrivalAndSmallOnesMayPass) {
  using engine::PromptClass;
  std::vector<WaitingRequest> waiting{{PromptClass::large}, {PromptClass::brief}, {PromptClass::brief, -1}};
  std::set<std::size_t> fitting{0, 1, 2}, capped;
  const auto fits = [&](std::size_t i) {
    return capped.contains(i) ? Room::capped : fitting.contains(i) ? Room::enough : Room::none;
  };
  EXPECT_EQ(next_to_admit(waiting, fits), 2U);
  waiting.pop_back();
  EXPECT_EQ(next_to_admit(waiting, fits), 0U);
  fitting = {1};
  EXPECT_EQ(next_to_admit(waiting, fits), 1U) << "it is smaller, and fits";
  waiting[0].passed = kMostPasses;
  EXPECT_EQ(next_to_admit(waiting, fits), std::nullopt) << "the first one would wait for ever";
  waiting[0] = {PromptClass::brief};
  EXPECT_EQ(next_to_admit(waiting, fits), std::nullopt) << "it is no smaller";
  EXPECT_EQ(next_to_admit({}, fits), std::nullopt);
  waiting[0] = {PromptClass::huge, 0, kMostPasses};
  capped = {0};
  EXPECT_EQ(next_to_admit(waiting, fits), 1U) << "its cap holds it back, not the others";
  fitting = {};
  EXPECT_EQ(next_to_admit(waiting, fits), std::nullopt);
}

}  // namespace engine_loop_test
}  // namespace tidelock::serve

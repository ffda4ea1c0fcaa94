// A file of the scheduler's decisions, each with everything that it was made from: why a request waited, and the proof
// that the same input gives the same decision (event_replay.hpp). Private to serve/.
//
// One JSON object a line: {"time": seconds since 1970, "event": NAME, ...}; the names and their fields stand in
// docs/serve.md. Steps and waiting that repeat the last one of their kind are left out: while nothing comes or
// goes, nothing is written. Past `limit` bytes the file becomes FILE.1, in place of an older one, and a new
// one begins. Not told of: evictions of kept states.
#pragma once

#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "engine/observer.hpp"
#include "serve/admission.hpp"

namespace tidelock::serve {

struct ExpectedFirstToken {
  std::int64_t tokens = 0;
  std::array<std::int64_t, engine::kPromptClasses> ahead{};
  double tokens_per_second = 0, expected = 0, limit = 0;  // refused when expected > limit
};

// Of one thread. A file that cannot be written any more is given up with a warning; what it told stays.
class EventLog final : public engine::Observer {
 public:
  static constexpr std::uint64_t kLimit = 64U << 20;
  // Appends. Throws Error{io}.
  explicit EventLog(std::filesystem::path file, std::uint64_t limit = kLimit);

  void planned(const engine::StepPlanner::Memory& before, std::span<const engine::PlanInput> sequences,
               std::int64_t budget, std::span<const engine::StepPlanItem> items) override;
  void budgeted(const engine::StepBudget::Memory& before, std::int64_t tokens, double seconds,
                std::int64_t after) override;
  void started(engine::SequenceId sequence, std::int64_t tokens, std::int64_t known, bool from_disk) override;
  void set_back(std::span<const engine::Holding> held, engine::SequenceId but, engine::SequenceId sequence,
                const std::optional<state::WriteChoice>& weighed) override;
  // `rooms`: of those that were asked about.
  void admitted(std::span<const WaitingRequest> waiting, const std::map<std::size_t, Room>& rooms,
                std::optional<std::size_t> chosen);
  void expected(const ExpectedFirstToken& decision);

 private:
  void write(const char* event, std::string fields);  // JSON without its first brace
  bool open();
  void turn_over();
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::filesystem::path path_;
  std::uint64_t limit_, size_ = 0;
  std::unique_ptr<std::FILE, Close> file_;  // null: given up
  std::string last_plan_, last_admission_;
};

}  // namespace tidelock::serve

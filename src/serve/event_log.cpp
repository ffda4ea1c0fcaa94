#include "serve/event_log.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/base.hpp"
#include "model/json.hpp"

namespace tidelock::serve {
namespace fs = std::filesystem;
namespace {

using model::Json;

std::string fields_of(const Json& object) {
  return object.dump().substr(1);  // with its closing brace
}

}  // namespace

EventLog::EventLog(fs::path file, std::uint64_t limit) : path_(std::move(file)), limit_(limit) {
  if (!open()) fail_errno("cannot open", path_.string());
}

bool EventLog::open() {
  file_.reset(std::fopen(path_.c_str(), "ae"));
  std::error_code none;
  size_ = fs::file_size(path_, none);
  return file_ != nullptr;
}

void EventLog::turn_over() {
  file_.reset();
  std::error_code error;
  fs::rename(path_, path_.string() + ".1", error);
  if (error || !open()) spdlog::warn("{}: no more events are written: it cannot be begun anew", path_.string());
}

void EventLog::write(const char* event, std::string fields) {
  if (file_ == nullptr) return;
  const auto now = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  const std::string line = fmt::format("{{\"time\":{:.6f},\"event\":\"{}\",{}\n", now, event, fields);
  if (std::fwrite(line.data(), 1, line.size(), file_.get()) != line.size() || std::fflush(file_.get()) != 0) {
    spdlog::warn("{}: no more events are written: {}", path_.string(), std::strerror(errno));
    file_.reset();
    return;
  }
  size_ += line.size();
  if (size_ > limit_) turn_over();
}

void EventLog::planned(const engine::StepPlanner::Memory& before, std::span<const engine::PlanInput> sequences,
                       std::int64_t budget, std::span<const engine::StepPlanItem> items) {
  if (sequences.empty()) return;
  Json in = Json::array(), out = Json::array();
  for (const auto& s : sequences) in.push_back({s.sequence, s.pending, static_cast<int>(s.prompt), s.priority});
  for (const auto& item : items) out.push_back({item.sequence, item.tokens});
  std::string fields = fields_of({{"owed", before.owed},
                                  {"turn", before.turn},
                                  {"begun", before.begun},
                                  {"budget", budget},
                                  {"sequences", std::move(in)},
                                  {"items", std::move(out)}});
  if (fields == last_plan_) return;
  last_plan_ = fields;
  write("plan", std::move(fields));
}

void EventLog::budgeted(const engine::StepBudget::Memory& before, std::int64_t tokens, double seconds,
                        std::int64_t after) {
  write("budget", fields_of({{"target", before.target},
                             {"most", before.most},
                             {"before", before.tokens},
                             {"best", before.best},
                             {"tokens", tokens},
                             {"seconds", seconds},
                             {"after", after}}));
}

void EventLog::started(engine::SequenceId sequence, std::int64_t tokens, std::int64_t known, bool from_disk) {
  write("start",
        fields_of(
            {{"sequence", sequence}, {"tokens", tokens}, {"known", known}, {"from", from_disk ? "disk" : "memory"}}));
}

void EventLog::set_back(std::span<const engine::Holding> held, engine::SequenceId but, engine::SequenceId sequence,
                        const std::optional<state::WriteChoice>& weighed) {
  Json in = Json::array();
  for (const auto& one : held) in.push_back({one.sequence, one.holds});
  Json event{{"held", std::move(in)}, {"but", but}, {"sequence", sequence}};
  if (weighed)
    event["weighed"] = {{"bytes", weighed->bytes},
                        {"tokens", weighed->tokens},
                        {"write_bytes_per_second", weighed->ledger.write_bytes_per_second},
                        {"read_bytes_per_second", weighed->ledger.read_bytes_per_second},
                        {"tokens_per_second", weighed->ledger.tokens_per_second},
                        {"write", weighed->write}};
  write("set_back", fields_of(event));
}

void EventLog::admitted(std::span<const WaitingRequest> waiting, const std::map<std::size_t, Room>& rooms,
                        std::optional<std::size_t> chosen) {
  Json in = Json::array(), asked = Json::array();
  for (const auto& one : waiting) in.push_back({static_cast<int>(one.prompt), one.priority, one.passed, one.tokens});
  for (const auto& [index, room] : rooms) asked.push_back({index, static_cast<int>(room)});
  std::string fields = fields_of(
      {{"waiting", std::move(in)}, {"rooms", std::move(asked)}, {"chosen", chosen ? Json(*chosen) : Json(nullptr)}});
  if (!chosen && fields == last_admission_) return;
  last_admission_ = fields;
  write("admit", std::move(fields));
}

void EventLog::expected(const ExpectedFirstToken& decision) {
  write("first_token", fields_of({{"tokens", decision.tokens},
                                  {"ahead", decision.ahead},
                                  {"tokens_per_second", decision.tokens_per_second},
                                  {"expected", decision.expected},
                                  {"limit", decision.limit},
                                  {"refused", decision.expected > decision.limit}}));
}

}  // namespace tidelock::serve

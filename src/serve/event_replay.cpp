#include "serve/event_replay.hpp"

#include <fstream>
#include <functional>

#include "base/base.hpp"
#include "model/json.hpp"
#include "serve/admission.hpp"
#include "state/kept_states.hpp"

namespace tidelock::serve {
namespace {

using model::Json;

engine::PromptClass class_from(const Json& number) {
  const auto value = number.get<std::size_t>();
  if (value >= engine::kPromptClasses) fail(ErrorCode::corrupt_data, "there is no class {} of prompts", value);
  return static_cast<engine::PromptClass>(value);
}

// Each: what is decided now from what the event says was known then, as the event writes it.
Json plan(const Json& event) {
  engine::StepPlanner::Memory memory;
  event.at("owed").get_to(memory.owed);
  event.at("turn").get_to(memory.turn);
  event.at("begun").get_to(memory.begun);
  if (memory.turn >= engine::kPromptClasses) fail(ErrorCode::corrupt_data, "there is no turn {}", memory.turn);
  std::vector<engine::PlanInput> sequences;
  for (const Json& s : event.at("sequences")) sequences.push_back({s.at(0), s.at(1), class_from(s.at(2)), s.at(3)});
  Json out = Json::array();
  for (const auto& item : engine::StepPlanner(memory).plan(sequences, event.at("budget")))
    out.push_back({item.sequence, item.tokens});
  return {{"items", out}};
}

Json budget(const Json& event) {
  engine::StepBudget::Memory memory;
  event.at("target").get_to(memory.target);
  event.at("most").get_to(memory.most);
  event.at("before").get_to(memory.tokens);
  event.at("best").get_to(memory.best);
  engine::StepBudget budget(memory);
  budget.ran(event.at("tokens"), event.at("seconds"));
  return {{"after", budget.tokens()}};
}

Json set_back(const Json& event) {
  std::vector<engine::Holding> held;
  for (const Json& one : event.at("held")) held.push_back({one.at(0), one.at(1)});
  const auto chosen = engine::choose_to_set_back(held, event.at("but"));
  Json out{{"sequence", chosen ? Json(*chosen) : Json(nullptr)}};
  if (!event.contains("weighed")) return out;
  Json weighed = event.at("weighed");
  const state::Ledger ledger{weighed.at("write_bytes_per_second"), weighed.at("read_bytes_per_second"),
                             weighed.at("tokens_per_second")};
  weighed["write"] = state::cheaper_to_write(weighed.at("bytes"), weighed.at("tokens"), ledger);
  out["weighed"] = weighed;
  return out;
}

Json admit(const Json& event) {
  std::vector<WaitingRequest> waiting;
  for (const Json& one : event.at("waiting"))
    waiting.push_back({class_from(one.at(0)), one.at(1), one.at(2), one.at(3)});
  Json asked = Json::array();
  std::map<std::size_t, Room> rooms, known;
  for (const Json& one : event.at("rooms")) known[one.at(0)] = static_cast<Room>(one.at(1).get<std::uint8_t>());
  const auto chosen = next_to_admit(waiting, [&](std::size_t i) {
    const auto found = known.find(i);
    return rooms[i] = found != known.end() ? found->second : Room::none;
  });
  for (const auto& [index, room] : rooms) asked.push_back({index, static_cast<int>(room)});
  return {{"chosen", chosen ? Json(*chosen) : Json(nullptr)}, {"rooms", asked}};
}

Json first_token(const Json& event) {
  const double expected = expected_first_token(
      event.at("tokens"), event.at("ahead").get<std::array<std::int64_t, engine::kPromptClasses>>(),
      event.at("tokens_per_second"));
  return {{"expected", expected}, {"refused", expected > event.at("limit").get<double>()}};
}

const std::map<std::string, std::function<Json(const Json&)>>& deciders() {
  static const std::map<std::string, std::function<Json(const Json&)>> all{
      {"plan", plan},   {"budget", budget},           {"set_back", set_back},
      {"admit", admit}, {"first_token", first_token}, {"start", [](const Json&) { return Json::object(); }}};
  return all;
}

void replay(const Json& event, std::int64_t line, EventReplay& out) {
  const std::string& name = event.at("event").get_ref<const std::string&>();
  const auto decide = deciders().find(name);
  if (decide == deciders().end()) fail(ErrorCode::corrupt_data, "there is no event '{}'", name);
  ++out.events[name];
  const Json now = decide->second(event);
  for (const auto& [field, value] : now.items()) {
    if (event.at(field) == value) continue;
    ++out.differences;
    if (out.different.size() < 100)
      out.different.push_back(
          fmt::format("line {}: {}: {} was {}, is {}", line, name, field, event.at(field).dump(), value.dump()));
    return;
  }
  if (!now.empty()) ++out.decided;
}

}  // namespace

EventReplay replay_events(const std::filesystem::path& file) {
  std::ifstream stream(file);
  if (!stream) fail_errno("cannot open", file.string());
  EventReplay out;
  std::string line;
  for (std::int64_t number = 1; std::getline(stream, line); ++number) {
    if (stream.eof()) break;  // torn: it has no end of line
    try {
      replay(model::parse_json(line, "the event"), number, out);
    } catch (const Error& error) {
      fail(ErrorCode::corrupt_data, "{}: line {}: {}", file.string(), number, error.what());
    } catch (const Json::exception& error) {
      fail(ErrorCode::corrupt_data, "{}: line {}: {}", file.string(), number, error.what());
    }
  }
  if (stream.bad()) fail(ErrorCode::io, "cannot read {}", file.string());
  return out;
}

}  // namespace tidelock::serve

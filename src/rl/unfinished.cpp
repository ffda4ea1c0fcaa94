#include "rl/unfinished.hpp"

#include <map>
#include <set>

#include "base/base.hpp"
#include "model/json.hpp"

namespace tidelock::rl {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int kUnfinishedFormat = 1;

fs::path policy_folder(const fs::path& folder, std::uint64_t version) {
  return folder / fmt::format("policy_{}", version);
}

// The group that was drawn then, if its trajectories are of it. `drawn`: by step, as far as they were needed.
std::shared_ptr<const RolloutGroup> drawn_again(const json& j, const DrawGroups& draw,
                                                std::map<std::int64_t, std::vector<RolloutGroup>>& drawn,
                                                std::span<const UnfinishedMember> members, const fs::path& path) {
  const auto step = j.at("step").get<std::int64_t>();
  const auto number = j.at("group").get<std::size_t>();
  if (!drawn.contains(step)) drawn[step] = draw(step);
  const std::vector<RolloutGroup>& groups = drawn[step];
  const bool same = number < groups.size() && members.size() == groups[number].seeds.size() &&
                    std::all_of(members.begin(), members.end(), [&](const UnfinishedMember& m) {
                      const RolloutGroup& group = groups[number];
                      const auto i = static_cast<std::size_t>(m.trajectory.member);
                      return i < group.seeds.size() && m.trajectory.task_id == group.episode.id &&
                             m.trajectory.seed == group.seeds[i];
                    });
  if (!same)
    fail(ErrorCode::mismatch, "{}: group {} of step {} is another one today; have the tasks changed?", path.string(),
         number, step);
  return std::make_shared<const RolloutGroup>(groups[number]);
}

Unfinished read_unfinished(const fs::path& folder, const fs::path& path, const model::Model& model,
                           const DrawGroups& draw) {
  const json j = model::read_json(path);
  if (j.at("format") != kUnfinishedFormat)
    fail(ErrorCode::corrupt_data, "{}: not of format {}", path.string(), kUnfinishedFormat);
  std::vector<Trajectory> trajectories = read_atif(folder / "unfinished.jsonl");
  Unfinished out;
  std::map<std::int64_t, std::vector<RolloutGroup>> drawn;
  std::size_t next = 0;
  for (const json& group : j.at("groups")) {
    std::vector<UnfinishedMember> members;
    for (const json& member : group.at("members")) {
      if (next == trajectories.size())
        fail(ErrorCode::corrupt_data, "{}: more members than unfinished.jsonl has lines", path.string());
      members.push_back({std::move(trajectories[next++]), member.at("finished"), member.at("agent_s")});
    }
    auto group_then = drawn_again(group, draw, drawn, members, path);
    out.groups.push_back({std::move(group_then), std::move(members)});
  }
  if (next != trajectories.size())
    fail(ErrorCode::corrupt_data, "{}: fewer members than unfinished.jsonl has lines", path.string());
  for (const json& version : j.at("policies")) {
    const auto v = version.get<std::uint64_t>();
    out.policies[v] = model::make_adapter(model, model::load_adapter(model, policy_folder(folder, v)));
  }
  return out;
}

}  // namespace

void forget_unused(Policies& policies, const std::vector<UnfinishedGroup>& groups) {
  std::set<std::uint64_t> used;
  for (const UnfinishedGroup& group : groups)
    for (const UnfinishedMember& member : group.members) used.merge(versions_of(member.trajectory));
  const std::uint64_t newest = policies.rbegin()->first;
  std::erase_if(policies, [&](const auto& policy) { return policy.first != newest && !used.contains(policy.first); });
}

void save_unfinished(const fs::path& folder, const Unfinished& unfinished, const model::Model& model,
                     const AtifContext& context) {
  if (unfinished.groups.empty()) return;
  json j = {{"format", kUnfinishedFormat}, {"groups", json::array()}, {"policies", json::array()}};
  std::vector<std::string> lines;
  for (const UnfinishedGroup& group : unfinished.groups) {
    json members = json::array();
    for (const UnfinishedMember& member : group.members) {
      members.push_back({{"finished", member.finished}, {"agent_s", member.agent_s}});
      lines.push_back(atif_line(context, group.group->episode.messages, member.trajectory));
    }
    j["groups"].push_back({{"step", group.group->step}, {"group", group.group->group}, {"members", members}});
  }
  for (const auto& [version, adapter] : unfinished.policies) {
    j["policies"].push_back(version);
    model::save_adapter(model, adapter->values(), policy_folder(folder, version), context.model);
  }
  write_atif(folder / "unfinished.jsonl", lines);
  write_file_atomic(folder / "unfinished.json", j.dump(1) + "\n");
}

Unfinished load_unfinished(const fs::path& folder, const model::Model& model, const DrawGroups& draw) {
  const fs::path path = folder / "unfinished.json";
  if (!fs::exists(path)) return {};
  try {
    return read_unfinished(folder, path, model, draw);
  } catch (const json::exception& error) {
    fail(ErrorCode::corrupt_data, "{}: {}", path.string(), error.what());
  }
}

}  // namespace tidelock::rl

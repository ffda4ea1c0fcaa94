#include "serve/e2b/watchers.hpp"

#include <algorithm>

#include "base/base.hpp"
#include "serve/e2b/text.hpp"

namespace tidelock::serve::e2b {
namespace {

constexpr long kMaxWatchers = 64;           // of a sandbox
constexpr std::size_t kMaxEvents = 10'000;  // told at once

bool switch_of(const Json& message, const char* name) {
  const auto found = message.find(name);
  if (found == message.end() || found->is_null()) return false;
  if (!found->is_boolean()) throw RpcError("invalid_argument", fmt::format("{}: expected a boolean", name));
  return found->get<bool>();
}

std::string string_of(const Json& message, const char* name) {
  const auto found = message.find(name);
  if (found == message.end() || !found->is_string())
    throw RpcError("invalid_argument", fmt::format("{}: expected a string", name));
  return found->get<std::string>();
}

}  // namespace

sandbox::WatchRequest parse_watch(const Json& message, bool root) {
  switch_of(message, "allowNetworkMounts");  // there are none
  return {.path = guest_path(string_of(message, "path")),
          .recursive = switch_of(message, "recursive"),
          .entries = switch_of(message, "includeEntry"),
          .root = root};
}

Json change_json(const sandbox::FileChange& change) {
  constexpr const char* kTypes[] = {"EVENT_TYPE_CREATE", "EVENT_TYPE_WRITE", "EVENT_TYPE_REMOVE", "EVENT_TYPE_RENAME",
                                    "EVENT_TYPE_CHMOD"};
  Json out{{"name", change.name}, {"type", kTypes[static_cast<int>(change.kind)]}};
  if (change.entry) out["entry"] = entry_json(*change.entry);
  return out;
}

std::string Watchers::create(sandbox::Sandbox& box, const Json& message, bool root) {
  const auto watcher = std::make_shared<Watcher>();
  watcher->sandbox = box.id();
  watcher->watch = box.watch(parse_watch(message, root));
  std::string id = "w" + random_hex(12);
  const std::lock_guard lock(mutex_);
  std::erase_if(all_, [](const auto& one) { return one.second->watch->over(); });
  const auto mine = [&](const auto& one) { return one.second->sandbox == box.id(); };
  if (std::count_if(all_.begin(), all_.end(), mine) >= kMaxWatchers)
    throw RpcError("resource_exhausted", fmt::format("this sandbox has {} watchers already", kMaxWatchers));
  all_[id] = watcher;
  return id;
}

std::shared_ptr<Watchers::Watcher> Watchers::find(const std::string& sandbox, const std::string& id) {
  const std::lock_guard lock(mutex_);
  const auto found = all_.find(id);
  if (found == all_.end() || found->second->sandbox != sandbox)
    throw RpcError("not_found", "there is no such watcher; a pause, and too many changes at once, end them");
  return found->second;
}

void Watchers::forget(const std::string& id) {
  const std::lock_guard lock(mutex_);
  all_.erase(id);
}

Json Watchers::events(const std::string& sandbox, const std::string& id) {
  const std::shared_ptr<Watcher> watcher = find(sandbox, id);
  const std::lock_guard busy(watcher->busy);
  Json out = Json::array();
  try {
    while (out.size() < kMaxEvents) {
      const std::optional<sandbox::FileChange> change = watcher->watch->take();
      if (!change) break;
      out.push_back(change_json(*change));
    }
  } catch (const Error&) {
    if (out.empty()) {  // what was told before is handed over first
      forget(id);
      throw;
    }
  }
  return out;
}

std::optional<Reply> Watchers::answer(sandbox::Sandbox& box, const std::string& method, const Request& request) {
  Json out = Json::object();
  if (method == "CreateWatcher") {
    out["watcherId"] = create(box, parse_message(request.body), is_root_of(request.authorization));
  } else if (method == "GetWatcherEvents") {
    out["events"] = events(box.id(), string_of(parse_message(request.body), "watcherId"));
  } else if (method == "RemoveWatcher") {
    const std::string id = string_of(parse_message(request.body), "watcherId");
    find(box.id(), id);
    forget(id);
  } else {
    return std::nullopt;
  }
  return json_reply(200, out);
}

}  // namespace tidelock::serve::e2b

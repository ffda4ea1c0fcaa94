// Folders that are watched for clients that ask from time to time: CreateWatcher, GetWatcherEvents, RemoveWatcher.
// Private to serve/e2b.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "serve/e2b/envd.hpp"

namespace tidelock::serve::e2b {

// What WatchDir and CreateWatcher ask for. Throws RpcError{invalid_argument}.
sandbox::WatchRequest parse_watch(const Json& message, bool root);
Json change_json(const sandbox::FileChange& change);

// Thread-safe. What nobody asks for waits in the guest, so the memory here is small. Those that a pause or the end of
// their sandbox has ended are forgotten when they are asked for, or when the next one is made.
class Watchers {
 public:
  // Nothing for other methods. Throws RpcError, Error.
  std::optional<Reply> answer(sandbox::Sandbox& box, const std::string& method, const Request& request);

 private:
  struct Watcher {
    std::string sandbox;
    std::mutex busy;
    std::unique_ptr<sandbox::FileWatch> watch;
  };
  std::string create(sandbox::Sandbox& box, const Json& message, bool root);
  std::shared_ptr<Watcher> find(const std::string& sandbox, const std::string& id);
  Json events(const std::string& sandbox, const std::string& id);
  void forget(const std::string& id);
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Watcher>> all_;
};

}  // namespace tidelock::serve::e2b

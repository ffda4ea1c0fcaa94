// Adapters that clients choose by name, loaded and unloaded while the server runs. Private to serve/.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "model/model.hpp"

namespace tidelock::serve {

// What a request runs with.
struct Weights {
  std::shared_ptr<const model::Adapter> adapter;  // null: the model alone
  std::int64_t version = 0;                       // how many times the name was loaded; 0: the model itself
  std::string sha256;                             // of the adapter's values; empty: none
};

// Thread-safe. The model must outlive it.
class Adapters {
 public:
  // `base`: the name of the model itself, and what it runs with. `folder`: where adapters may be loaded from; empty:
  // nowhere.
  Adapters(const model::Model& model, std::string base, std::shared_ptr<const model::Adapter> adapter,
           std::filesystem::path folder);

  // Nothing: there is no such name.
  std::optional<Weights> find(const std::string& name) const;
  std::vector<std::string> names() const;  // the model's first
  const std::string& base() const { return base_; }

  // Reads DIR/path (a PEFT folder) under `name`; one of that name is replaced: requests under way keep what they began
  // with. Throws ApiError for a name or path that may not be, or an adapter that cannot be read.
  Weights load(const std::string& name, const std::string& path);
  // Throws ApiError{404}.
  void unload(const std::string& name);

 private:
  const model::Model& model_;
  const std::string base_;
  const std::filesystem::path folder_;
  mutable std::mutex mutex_;
  std::map<std::string, Weights> by_name_;
  std::map<std::string, std::int64_t> versions_;  // of names that were unloaded, too: a version never comes back
};

}  // namespace tidelock::serve

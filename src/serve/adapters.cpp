#include "serve/adapters.hpp"

#include "base/base.hpp"
#include "serve/api_error.hpp"

namespace tidelock::serve {
namespace {

constexpr std::size_t kMostAdapters = 64;

bool good_name(const std::string& name) {
  const auto good = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_' ||
           c == '.';
  };
  return !name.empty() && name.size() <= 128 && std::all_of(name.begin(), name.end(), good);
}

}  // namespace

Adapters::Adapters(const model::Model& model, std::string base, std::shared_ptr<const model::Adapter> adapter,
                   std::filesystem::path folder)
    : model_(model), base_(std::move(base)), folder_(std::move(folder)) {
  std::string sha256 = adapter ? adapter->sha256() : "";
  by_name_.emplace(base_, Weights{std::move(adapter), 0, std::move(sha256)});
}

std::optional<Weights> Adapters::find(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? std::nullopt : std::optional(found->second);
}

std::vector<std::string> Adapters::names() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> names{base_};
  for (const auto& [name, weights] : by_name_)
    if (name != base_) names.push_back(name);
  return names;
}

Weights Adapters::load(const std::string& name, const std::string& path) {
  if (folder_.empty())
    throw ApiError(403, "adapters_off", "this server loads no adapters: it was started without --adapters DIR");
  if (!good_name(name))
    throw ApiError(400, "invalid_value", "lora_name: expected up to 128 letters, digits, '-', '_' and '.'",
                   "lora_name");
  if (name == base_) throw ApiError(400, "invalid_value", "lora_name: this is the model's own name", "lora_name");
  std::error_code error;
  const auto root = std::filesystem::canonical(folder_, error);
  const auto wanted = error ? root : std::filesystem::canonical(root / path, error);
  if (error || std::mismatch(root.begin(), root.end(), wanted.begin(), wanted.end()).first != root.end())
    throw ApiError(404, "adapter_not_found", "lora_path: there is no such folder among this server's adapters",
                   "lora_path");
  Weights weights;
  try {
    weights.adapter = model::make_adapter(model_, model::load_adapter(model_, wanted));
    weights.sha256 = weights.adapter->sha256();  // here, not on the engine's thread
  } catch (const Error& fault) {
    spdlog::warn("adapter {}: {}", name, fault.what());
    throw ApiError(400, "invalid_adapter",
                   "the adapter cannot be read, or does not fit the model; the server's log says why", "lora_path");
  }
  const std::lock_guard lock(mutex_);
  if (!by_name_.contains(name) && by_name_.size() > kMostAdapters)
    throw ApiError(400, "too_many_adapters", fmt::format("{} adapters are loaded; unload one", kMostAdapters));
  weights.version = ++versions_[name];
  by_name_[name] = weights;
  spdlog::info("adapter {} version {}: {}", name, weights.version, weights.sha256);
  return weights;
}

void Adapters::unload(const std::string& name) {
  const std::lock_guard lock(mutex_);
  if (name == base_ || by_name_.erase(name) == 0)
    throw ApiError(404, "adapter_not_found", "no adapter of this name is loaded", "lora_name");
}

}  // namespace tidelock::serve

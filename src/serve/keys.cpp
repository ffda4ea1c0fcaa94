#include "serve/keys.hpp"

#include <charconv>
#include <sstream>

#include "base/base.hpp"
#include "serve/api_error.hpp"

namespace tidelock::serve {

Keys Keys::load(const std::filesystem::path& path) {
  return parse(read_file(path, 1 << 20), path.string());
}

Keys Keys::parse(std::string_view text, const std::string& name) {
  Keys keys;
  keys.entries_ = std::make_unique<Entries>();
  std::istringstream lines{std::string(text)};
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    std::istringstream words(line);
    std::string hash, label, limit, rest;
    words >> hash >> label >> limit >> rest;
    if (hash.empty() || hash.front() == '#') continue;
    Entry entry{label, std::nullopt};
    bool good = hash.size() == 64 && hash.find_first_not_of("0123456789abcdef") == std::string::npos &&
                !label.empty() && rest.empty();
    if (good && !limit.empty()) {
      int value = 0;
      const auto [end, error] = std::from_chars(limit.data(), limit.data() + limit.size(), value);
      good = error == std::errc() && end == limit.data() + limit.size() && value > 0;
      entry.limit = value;
    }
    // The line itself is not shown: somebody may have written the key instead of its hash.
    if (!good)
      throw Error(ErrorCode::corrupt_data, fmt::format("{}: line {}: expected SHA256 NAME [LIMIT]", name, number),
                  "make a hash with: printf %s KEY | sha256sum");
    if (!keys.entries_->by_hash.emplace(hash, entry).second)
      fail(ErrorCode::corrupt_data, "{}: line {}: the key of {} stands twice", name, number, label);
  }
  if (keys.entries_->by_hash.empty()) fail(ErrorCode::corrupt_data, "{}: no key in it: nobody could get in", name);
  return keys;
}

// Looked up by hash: how long that takes says nothing about the key.
std::string Keys::find(std::string_view authorization) const {
  constexpr std::string_view scheme = "Bearer ";
  if (!authorization.starts_with(scheme))
    throw ApiError(401, "missing_api_key", "this server asks for a key: Authorization: Bearer KEY");
  std::string hash = sha256_hex(authorization.substr(scheme.size()));
  if (!entries_->by_hash.contains(hash)) throw ApiError(401, "invalid_api_key", "the key is not one of this server's");
  return hash;
}

void Keys::check(std::string_view authorization) const {
  if (required()) find(authorization);
}

Keys::Ticket Keys::enter(std::string_view authorization) {
  Ticket ticket;
  if (!required()) return ticket;
  const std::string hash = find(authorization);
  const std::lock_guard lock(entries_->mutex);
  Entry& entry = entries_->by_hash.find(hash)->second;
  if (entry.limit && entry.running >= *entry.limit)
    throw ApiError(429, "key_limit",
                   fmt::format("{} requests of this key are under way, which is its limit", entry.running));
  ++entry.running;
  ticket.entries_ = entries_.get();
  ticket.hash_ = hash;
  ticket.tenant_ = entry.name;
  return ticket;
}

Keys::Ticket::~Ticket() {
  if (entries_ == nullptr) return;
  const std::lock_guard lock(entries_->mutex);
  --entries_->by_hash.find(hash_)->second.running;
}

}  // namespace tidelock::serve

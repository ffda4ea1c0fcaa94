// API keys, of which the server knows only hashes. Private to serve/.
//
// The file: one key a line, "SHA256 NAME [LIMIT]": the key's SHA-256 in lower-case hexadecimal, a name for logs, and
// how many requests may be under way at once with it (no limit when absent). Empty lines and lines that begin with #
// are skipped.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace tidelock::serve {

class Keys {
 public:
  // Without a file everybody is let in.
  Keys() = default;
  // Throws Error{not_found, io, corrupt_data} naming the line.
  static Keys load(const std::filesystem::path& path);
  static Keys parse(std::string_view text, const std::string& name);

  bool required() const { return entries_ != nullptr; }

 private:
  struct Entry {
    std::string name;
    std::optional<int> limit;
    int running = 0;
  };
  struct Entries {
    std::mutex mutex;
    std::map<std::string, Entry, std::less<>> by_hash;
  };

 public:
  // A place of a key's limit, held while the request runs.
  class Ticket {
   public:
    Ticket() = default;
    Ticket(Ticket&& other) noexcept
        : entries_(std::exchange(other.entries_, nullptr)),
          hash_(std::move(other.hash_)),
          tenant_(std::move(other.tenant_)) {}
    Ticket& operator=(Ticket&&) = delete;
    ~Ticket();
    // The name of the key; empty where none is required.
    const std::string& tenant() const { return tenant_; }

   private:
    friend class Keys;
    Entries* entries_ = nullptr;
    std::string hash_, tenant_;
  };

  // `authorization`: the header's value, "Bearer KEY". Throws ApiError{401} for none or an unknown one.
  void check(std::string_view authorization) const;
  // As check(), and counts the request. Throws ApiError{429} beyond the key's limit. Thread-safe.
  Ticket enter(std::string_view authorization);

 private:
  std::string find(std::string_view authorization) const;
  std::unique_ptr<Entries> entries_;
};

}  // namespace tidelock::serve

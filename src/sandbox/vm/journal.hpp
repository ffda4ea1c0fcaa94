// The journal of a state directory: what sandboxes, layers, snapshots and templates there are, and what was under way.
//
// A file of lines. The first names the format; each other is one transaction: crc32c of the rest as eight hexadecimal
// digits, a space, and JSON {"n": number, "put": {key: record}, "drop": [keys]}. A transaction is appended and synced:
// that is the one commit point of an operation. A torn last line never happened. A damaged line elsewhere is set
// aside with a copy of the file (quarantine) and the rest is used; from then on nothing is deleted, only moved aside.
#pragma once

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "sandbox/wire.hpp"

namespace tidelock::sandbox::vm {

// Not thread-safe: its owner holds the directory's lock and a mutex.
class Journal {
 public:
  using Json = nlohmann::json;
  using Records = std::map<std::string, Json>;
  struct Change {
    std::string key;
    std::optional<Json> record;  // nothing: the key is dropped
  };
  // Reads or begins `path`. Throws Error{corrupt_data} for a file of another kind or a newer version, Error{io}.
  Journal(std::filesystem::path path, std::filesystem::path quarantine);
  const Records& records() const { return records_; }
  const Json* find(const std::string& key) const;
  // All changes or none. Throws Error{exhausted} when the disk is full and Error{io}; the file is then as before.
  void commit(const std::vector<Change>& changes);
  bool damaged() const { return damaged_; }

 private:
  void load();
  void compact();
  void set_aside(const std::string& content);
  std::filesystem::path path_, quarantine_;
  FileDescriptor file_;
  Records records_;
  std::uint64_t number_ = 0, size_ = 0, live_ = 0;
  bool damaged_ = false;
};

}  // namespace tidelock::sandbox::vm

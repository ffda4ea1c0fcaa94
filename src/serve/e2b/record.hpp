// What the API knows of a sandbox beyond what its runtime keeps, and the decisions made from it. Private to serve/e2b.
//
// On disk: DIR/e2b/sandboxes/ID.json and DIR/e2b/snapshots/NAME.json, one record a file: a line "tidelock-e2b 1 CRC"
// with the CRC-32C of the rest as eight hexadecimal digits, then JSON. Written whole or not at all; what cannot be read
// is moved to DIR/e2b/quarantine, never deleted.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace tidelock::serve::e2b {

using Json = nlohmann::json;

enum class State { running, paused };

struct SandboxRecord {
  std::string id, template_id;
  std::string token;  // of envd; empty: open to everybody
  std::map<std::string, std::string> metadata, environment;
  std::int64_t started = 0, ends = 0;  // milliseconds since 1970; a paused one does not end
  std::int64_t timeout = 300;          // seconds, for a resume that was not asked for by name
  bool auto_pause = false, auto_resume = false;
  int memory_mib = 0, disk_mib = 0;
};

struct SnapshotRecord {
  std::string name, sandbox_id, template_id;
  std::int64_t created = 0;
  int memory_mib = 0, disk_mib = 0;
  std::string build_id = {};  // of a template; empty: a snapshot of a sandbox
};

Json to_json(const SandboxRecord& record);
Json to_json(const SnapshotRecord& record);
// Nothing for a record that cannot be one.
std::optional<SandboxRecord> parse_sandbox(const Json& json);
std::optional<SnapshotRecord> parse_snapshot(const Json& json);

// One folder of records. Not thread-safe.
class RecordFolder {
 public:
  RecordFolder(std::filesystem::path folder, std::filesystem::path quarantine);
  std::vector<Json> load();  // sets aside what cannot be read
  void save(const std::string& name, const Json& record);
  void remove(const std::string& name);

 private:
  void set_aside(const std::string& file);
  std::filesystem::path folder_, quarantine_;
};

// What a time-out does.
enum class Expiry { none, kill, pause };
Expiry expiry_of(const SandboxRecord& record, State state, std::int64_t now);

// GET /v2/sandboxes?...
struct ListQuery {
  std::map<std::string, std::string> metadata;  // all must be equal
  bool running = true, paused = true;
  std::optional<std::int64_t> started_after;
  std::string template_id;  // empty: all
  bool ascending = false;
  std::size_t limit = 100;
  std::string after;  // nextToken: goes on behind this one
};
// From decoded query parameters. Throws ApiError{400} naming the parameter.
ListQuery parse_list_query(const std::map<std::string, std::string>& query);

struct ListItem {
  SandboxRecord record;
  State state{};
};
struct Page {
  std::vector<ListItem> items;
  std::string next;  // empty: the last page
};
// Ordered by start, newest first unless ascending; ids order equal starts. A token stays good when sandboxes come or
// go.
Page list_page(std::vector<ListItem> all, const ListQuery& query);

}  // namespace tidelock::serve::e2b

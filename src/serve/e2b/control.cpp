#include "serve/e2b/control.hpp"

#include <algorithm>

#include "base/base.hpp"
#include "serve/e2b/log_query.hpp"
#include "serve/e2b/text.hpp"
#include "serve/fields.hpp"

namespace tidelock::serve::e2b {
namespace {

constexpr std::int64_t kLongest = 30LL * 24 * 3600;  // seconds of a time-out
constexpr const char* kEnvdVersion = "0.6.4";        // what clients may ask of files and processes
constexpr std::size_t kMaxPairs = 1000;              // of metadata and of variables

Json parse_body(const std::string& body) {
  return body.empty() ? Json::object() : parse_object(body, std::size_t{1} << 20);
}

std::map<std::string, std::string> pairs_of(Fields& fields, const char* name) {
  std::map<std::string, std::string> out;
  const Json* found = fields.find(name);
  if (found == nullptr) return out;
  if (!found->is_object() || found->size() > kMaxPairs) fields.refuse(name, "an object of up to 1000 strings", *found);
  for (const auto& [key, value] : found->items()) {
    if (!value.is_string()) fields.refuse(name, "strings", value);
    out[key] = value.get<std::string>();
  }
  return out;
}

void refuse_unless_empty(Fields& fields, const char* name, const char* why) {
  const Json* found = fields.find(name);
  if (found != nullptr && !found->empty())
    throw ApiError(400, "unsupported_parameter", fmt::format("{}: {}", name, why), name);
}

std::int64_t timeout_of(Fields& fields, std::int64_t otherwise, const char* name = "timeout") {
  return fields.integer(name, 0, kLongest).value_or(otherwise);
}

Json created_json(const SandboxRecord& record) {
  Json out{{"templateID", record.template_id},
           {"sandboxID", record.id},
           {"clientID", "tidelock"},
           {"envdVersion", kEnvdVersion}};
  if (!record.token.empty()) out["envdAccessToken"] = record.token;
  return out;
}

Json listed_json(const ListItem& item) {
  const SandboxRecord& record = item.record;
  return {{"templateID", record.template_id}, {"sandboxID", record.id},
          {"clientID", "tidelock"},           {"startedAt", rfc3339(record.started)},
          {"endAt", rfc3339(record.ends)},    {"cpuCount", 1},
          {"memoryMB", record.memory_mib},    {"diskSizeMB", record.disk_mib},
          {"metadata", record.metadata},      {"state", item.state == State::running ? "running" : "paused"},
          {"envdVersion", kEnvdVersion}};
}

Reply nothing() {
  return {204, ""};
}

Reply create(Sandboxes& sandboxes, const Request& request, bool second_version) {
  return json_reply(201, created_json(sandboxes.create(parse_new_sandbox(request.body, second_version))));
}

// `second_version`: what the list of /v2 answers; the first one has running sandboxes alone and no pages.
Reply list(Sandboxes& sandboxes, const Request& request, bool second_version) {
  ListQuery query = parse_list_query(request.query);
  if (!second_version) query.paused = false;
  const Page page = list_page(sandboxes.all(), query);
  Json out = Json::array();
  for (const ListItem& item : page.items) out.push_back(listed_json(item));
  Reply reply = json_reply(200, out);
  if (!page.next.empty()) reply.headers.emplace_back("x-next-token", page.next);
  return reply;
}

Reply detail(Sandboxes& sandboxes, const std::string& id) {
  const ListItem item = sandboxes.get(id);
  Json out = listed_json(item);
  if (!item.record.token.empty()) out["envdAccessToken"] = item.record.token;
  out["allowInternetAccess"] = false;
  out["lifecycle"] = {{"autoResume", item.record.auto_resume},
                      {"onTimeout", item.record.auto_pause ? "pause" : "kill"}};
  return json_reply(200, out);
}

Reply pause(Sandboxes& sandboxes, const std::string& id, const std::string& body) {
  const Json json = parse_body(body);
  Fields fields(json, "");
  fields.only("memory", true, "a pause keeps memory");
  fields.only("requireHealthyGuest", false, "the guest is not asked before a pause");
  fields.finish();
  sandboxes.pause(id);
  return nothing();
}

Reply connect(Sandboxes& sandboxes, const std::string& id, const std::string& body, bool only_paused) {
  const Json json = parse_body(body);
  Fields fields(json, "");
  const std::int64_t timeout = timeout_of(fields, 300);
  fields.only("memory", true, "a resume goes on with the memory");
  if (only_paused) fields.only("autoPause", false, "what a time-out does is set when a sandbox is made");
  fields.finish();
  if (only_paused && sandboxes.get(id).state == State::running)
    throw ApiError(409, "", fmt::format("sandbox {} is running", id));
  const Sandboxes::Resumed resumed = sandboxes.connect(id, timeout);
  return json_reply(resumed.woken || only_paused ? 201 : 200, created_json(resumed.record));
}

Reply change_timeout(Sandboxes& sandboxes, const std::string& id, const std::string& body, bool refresh) {
  const Json json = parse_body(body);
  Fields fields(json, "");
  const std::int64_t seconds = timeout_of(fields, 300, refresh ? "duration" : "timeout");
  fields.finish();
  sandboxes.set_timeout(id, seconds, refresh);
  return nothing();
}

Reply fork(Sandboxes& sandboxes, const std::string& id, const std::string& body) {
  const Json json = parse_body(body);
  Fields fields(json, "");
  const auto count = static_cast<int>(fields.integer("count", 1, 100).value_or(1));
  const std::int64_t timeout = timeout_of(fields, 15);
  fields.finish();
  Json out = Json::array();
  for (const SandboxRecord& record : sandboxes.fork(id, count, timeout))
    out.push_back({{"sandbox", created_json(record)}});
  return json_reply(201, out);
}

Json snapshot_json(const SnapshotRecord& record) {
  return {{"snapshotID", record.name}, {"names", Json::array({record.name})}};
}

Reply snapshot(Sandboxes& sandboxes, const std::string& id, const std::string& body) {
  const Json json = parse_body(body);
  Fields fields(json, "");
  const std::string name = fields.text("name").value_or("");
  fields.only("memory", true, "a snapshot holds the memory");
  fields.finish();
  return json_reply(201, snapshot_json(sandboxes.snapshot(id, name)));
}

Reply list_snapshots(Sandboxes& sandboxes, const Request& request) {
  std::map<std::string, std::string> query = request.query;
  const std::string sandbox = query["sandboxID"], name = query["name"], after = query["nextToken"];
  ListQuery paging = parse_list_query({{"limit", query["limit"].empty() ? "100" : query["limit"]}});
  Json out = Json::array();
  Reply reply;
  for (const SnapshotRecord& record : sandboxes.snapshots()) {  // by name
    if ((!sandbox.empty() && record.sandbox_id != sandbox) || (!name.empty() && record.name != name) ||
        record.name <= after)
      continue;
    if (out.size() == paging.limit) {
      reply.headers.emplace_back("x-next-token", out.back()["snapshotID"].get<std::string>());
      break;
    }
    out.push_back(snapshot_json(record));
  }
  reply.body = out.dump();
  return reply;
}

// One sample: what it is now. A paused sandbox uses nothing and has none.
Reply metrics(Sandboxes& sandboxes, const std::string& id) {
  Json out = Json::array();
  if (sandboxes.get(id).state == State::running) {
    Usage usage;
    sandboxes.use(id, [&](sandbox::Sandbox& box, const SandboxRecord&) { usage = measure(box); });
    const auto now =
        std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch())
            .count();
    out.push_back({{"timestamp", rfc3339(now)},
                   {"timestampUnix", now / 1000},
                   {"cpuCount", 1},
                   {"cpuUsedPct", usage.cpu_percent},
                   {"memUsed", usage.memory_used},
                   {"memTotal", usage.memory_total},
                   {"memCache", usage.memory_cache},
                   {"diskUsed", usage.disk_used},
                   {"diskTotal", usage.disk_total}});
  }
  return json_reply(200, out);
}

Json entry_json(const sandbox::LogEntry& entry) {
  return {{"timestamp", rfc3339(entry.time)},
          {"message", entry.message},
          {"level", sandbox::log_level_name(entry.level)},
          {"fields", entry.fields}};
}

Reply logs(Sandboxes& sandboxes, const Request& request, const std::string& id, bool second_version) {
  const LogQuery query = parse_log_query(request.query, second_version);
  Json lines = Json::array(), entries = Json::array();
  for (const sandbox::LogEntry& entry : select_entries(sandboxes.log(id), query)) {
    entries.push_back(entry_json(entry));
    std::string line = entry.message;
    for (const auto& [name, text] : entry.fields) line += fmt::format(" {}={}", name, text);
    lines.push_back({{"timestamp", rfc3339(entry.time)}, {"line", line}});
  }
  if (second_version) return json_reply(200, {{"logs", entries}});
  return json_reply(200, {{"logs", lines}, {"logEntries", entries}});
}

[[noreturn]] void refuse_path(const Request& request) {
  throw ApiError(
      501, "",
      fmt::format("{} {} is not built here; docs/e2b.md lists what is", request.method, request.path.substr(0, 100)));
}

// What stands behind /sandboxes/ID.
Reply answer_sandbox(Sandboxes& sandboxes, const Request& request, const std::string& id, const std::string& what,
                     bool second_version) {
  if (what.empty() && request.method == "GET") return detail(sandboxes, id);
  if (what.empty() && request.method == "DELETE") return sandboxes.kill(id), nothing();
  if (what == "metrics" && request.method == "GET") return metrics(sandboxes, id);
  if (what == "logs" && request.method == "GET") return logs(sandboxes, request, id, second_version);
  if (request.method != "POST") refuse_path(request);
  if (what == "pause") return pause(sandboxes, id, request.body);
  if (what == "connect" || what == "resume") return connect(sandboxes, id, request.body, what == "resume");
  if (what == "timeout" || what == "refreshes") return change_timeout(sandboxes, id, request.body, what == "refreshes");
  if (what == "fork") return fork(sandboxes, id, request.body);
  if (what == "snapshots") return snapshot(sandboxes, id, request.body);
  refuse_path(request);
}

}  // namespace

NewSandbox parse_new_sandbox(const std::string& body, bool second_version) {
  const Json json = parse_body(body);
  Fields fields(json, "");
  NewSandbox out;
  out.template_id = fields.require_text("templateID");
  out.timeout = timeout_of(fields, second_version ? 300 : 15);
  out.metadata = pairs_of(fields, "metadata");
  out.environment = pairs_of(fields, "envVars");
  out.auto_pause = fields.flag("autoPause").value_or(false);
  fields.only("autoPauseMemory", true, "a pause keeps memory");
  if (const Json* resume = fields.find("autoResume")) {
    Fields inner(*resume, "autoResume");
    out.auto_resume = inner.flag("enabled").value_or(false);
    inner.finish();
  }
  if (out.auto_resume && !out.auto_pause) throw ApiError(400, "", "autoResume is for sandboxes with autoPause");
  out.secure = second_version || fields.flag("secure").value_or(false);
  if (second_version) fields.only("secure", true, "every sandbox of /v2 has a token");
  fields.only("allow_internet_access", false, "sandboxes have no network here");
  for (const char* name : {"network", "iam", "mcp", "volumeMounts"})
    refuse_unless_empty(fields, name, "sandboxes have no network and no volumes here");
  fields.finish();
  return out;
}

Reply answer_control(Sandboxes& sandboxes, const Request& request) {
  std::string path = request.path;
  if (path == "/health") return nothing();
  const bool second_version = path.starts_with("/v2/");
  if (second_version) path.erase(0, 3);
  if (path == "/sandboxes" && request.method == "POST") return create(sandboxes, request, second_version);
  if (path == "/sandboxes" && request.method == "GET") return list(sandboxes, request, second_version);
  if (path == "/snapshots" && request.method == "GET") return list_snapshots(sandboxes, request);
  const std::string sandbox_prefix = "/sandboxes/";
  if (path.starts_with(sandbox_prefix)) {
    const std::string rest = path.substr(sandbox_prefix.size());
    const std::size_t slash = std::min(rest.find('/'), rest.size());
    return answer_sandbox(sandboxes, request, rest.substr(0, slash), rest.substr(std::min(slash + 1, rest.size())),
                          second_version);
  }
  refuse_path(request);
}

}  // namespace tidelock::serve::e2b

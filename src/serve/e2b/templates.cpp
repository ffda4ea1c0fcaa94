#include "serve/e2b/templates.hpp"

#include <algorithm>

#include "base/base.hpp"
#include "sandbox/build/builder.hpp"
#include "serve/e2b/text.hpp"
#include "serve/fields.hpp"

namespace tidelock::serve::e2b {
namespace fs = std::filesystem;
namespace {

constexpr std::size_t kMaxLines = 5000;  // of one build's log
constexpr std::size_t kMaxBuilds = 200;  // records that stay
constexpr std::size_t kLinesAtOnce = 100;
constexpr std::size_t kMaxWaiting = 100;  // builds; more get 503
constexpr auto kFilesStay = std::chrono::hours(7 * 24);

ApiError unknown_build(const std::string& id) {
  return {404, "", fmt::format("build {} was not found", id.substr(0, 100))};
}

std::string tag_of(const std::string& name) {
  const std::size_t colon = name.find(':');
  return colon == std::string::npos ? "default" : name.substr(colon + 1);
}

std::string without_tag(const std::string& name) {
  return name.substr(0, name.find(':'));
}

std::size_t number_of(const Request& request, const char* name, std::size_t otherwise, std::size_t most) {
  const auto found = request.query.find(name);
  if (found == request.query.end()) return otherwise;
  const std::string& text = found->second;
  if (text.empty() || text.size() > 9 || text.find_first_not_of("0123456789") != std::string::npos)
    throw ApiError(400, "", fmt::format("{}: expected a number, found '{}'", name, text.substr(0, 40)));
  return std::min<std::size_t>(std::stoul(text), most);
}

}  // namespace

Templates::Templates(Sandboxes& sandboxes, SandboxesOptions options)
    : sandboxes_(sandboxes),
      options_(std::move(options)),
      records_(options_.directory / "e2b/builds", options_.directory / "e2b/quarantine") {
  for (const Json& json : records_.load()) {
    std::optional<BuildRecord> record = parse_build(json);
    if (!record) continue;
    if (record->status == "building" || record->status == "waiting") {
      record->status = "error";
      record->reason = "the server ended before the build was done; build it again";
      records_.save(record->id, to_json(*record));
    }
    builds_[record->id] = *record;
  }
  const fs::path files = options_.directory / "e2b/files";
  make_folder(files);
  for (const fs::directory_entry& entry : fs::directory_iterator(files))
    if (entry.path().extension() == ".tmp" || fs::file_time_type::clock::now() - entry.last_write_time() > kFilesStay)
      fs::remove(entry.path());
  worker_ = std::thread([this] { work(); });
}

Templates::~Templates() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    changed_.notify_all();
  }
  worker_.join();
}

bool Templates::answers(const std::string& path) {
  return path == "/templates" || path == "/v2/templates" || path == "/v3/templates" ||
         path.starts_with("/templates/") || path.starts_with("/v2/templates/") || is_upload(path);
}

fs::path Templates::file_of(const std::string& hash) const {
  return options_.directory / "e2b/files" / hash;
}

BuildRecord Templates::find(const std::string& build) {
  const std::lock_guard lock(mutex_);
  const auto found = builds_.find(build);
  if (found == builds_.end()) throw unknown_build(build);
  return found->second;
}

void Templates::change(const std::string& build, bool save, const std::function<void(BuildRecord&)>& act) {
  const std::lock_guard lock(mutex_);
  const auto found = builds_.find(build);
  if (found == builds_.end()) return;
  act(found->second);
  found->second.changed = options_.now();
  if (save) records_.save(build, to_json(found->second));
}

void Templates::add_line(const std::string& build, int step, const std::string& level, const std::string& text) {
  change(build, false, [&](BuildRecord& record) {
    if (record.lines.size() == kMaxLines)
      record.lines.push_back({options_.now(), 0, "warn", "what follows is not kept: the log is full"});
    if (record.lines.size() < kMaxLines) record.lines.push_back({options_.now(), step, level, text});
  });
}

Reply Templates::request_build(const std::string& body) {
  const NewTemplate wanted = parse_new_template(body);
  BuildRecord record;
  record.id = random_hex(16);
  record.id = fmt::format("{}-{}-{}-{}-{}", record.id.substr(0, 8), record.id.substr(8, 4), record.id.substr(12, 4),
                          record.id.substr(16, 4), record.id.substr(20));  // clients read it as a UUID
  record.template_id = wanted.name;
  record.status = "waiting";
  record.names = wanted.names, record.tags = wanted.tags;
  record.memory_mib = wanted.memory_mib, record.disk_mib = std::max(wanted.disk_mib, options_.disk_mib);
  record.created = record.changed = options_.now();
  if (wanted.processors > 1)
    record.lines.push_back({record.created, 0, "warn",
                            fmt::format("{} processors were asked for; a sandbox has one here", wanted.processors)});
  const std::lock_guard lock(mutex_);
  for (const std::string& name : wanted.names)
    if (options_.templates.contains(name))
      throw ApiError(409, "", fmt::format("template '{}' is one of the server's own", name));
  while (builds_.size() >= kMaxBuilds) {
    const auto oldest = std::min_element(builds_.begin(), builds_.end(), [](const auto& a, const auto& b) {
      return a.second.created < b.second.created;
    });
    records_.remove(oldest->first);
    builds_.erase(oldest);
  }
  records_.save(record.id, to_json(record));
  builds_[record.id] = record;
  return json_reply(202, {{"templateID", record.template_id},
                          {"buildID", record.id},
                          {"public", false},
                          {"names", Json::array({record.template_id})},
                          {"aliases", Json::array({record.template_id})},
                          {"tags", record.tags}});
}

Reply Templates::start_build(const std::string& build, const std::string& body) {
  BuildStart start = parse_build_start(body);
  if (!start.recipe.image.empty()) {
    const auto known = options_.images.find(start.recipe.image);
    if (known == options_.images.end()) {
      std::string names;
      for (const auto& [name, path] : options_.images) names += (names.empty() ? "" : ", ") + name;
      throw ApiError(
          400, "",
          fmt::format("image '{}' is not on this server, which has no network to fetch it: save it as an OCI "
                      "archive and start the server with --image {}=FILE. It has: {}",
                      start.recipe.image.substr(0, 200), start.recipe.image.substr(0, 200),
                      names.empty() ? "none" : names));
    }
    start.recipe.image = known->second;
  } else if (const auto own = options_.templates.find(template_name(start.recipe.snapshot));
             own != options_.templates.end()) {
    start.recipe.image = own->second;
    start.recipe.snapshot.clear();
  } else {
    start.recipe.snapshot = template_name(start.recipe.snapshot);
    if (!sandboxes_.has_snapshot(start.recipe.snapshot))
      throw ApiError(404, "", fmt::format("there is no template '{}'", start.recipe.snapshot));
  }
  for (const std::string& hash : start.files)
    if (!hash.empty() && !fs::exists(file_of(hash)))
      throw ApiError(400, "", fmt::format("the files {} of a COPY were not sent", hash));
  const std::lock_guard lock(mutex_);
  const auto found = builds_.find(build);
  if (found == builds_.end()) throw unknown_build(build);
  if (found->second.status != "waiting" ||
      std::any_of(queue_.begin(), queue_.end(), [&](const Job& job) { return job.build == build; }))
    throw ApiError(409, "", fmt::format("build {} was started already", build));
  if (queue_.size() >= kMaxWaiting) throw ApiError(503, "", "too many builds are waiting");
  queue_.push_back({build, std::move(start)});
  changed_.notify_all();
  return {202, ""};
}

void Templates::work() {
  while (true) {
    Job job;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return stop_ || !queue_.empty(); });
      if (stop_) return;
      job = std::move(queue_.front());
      queue_.pop_front();
    }
    try {
      run(job);
    } catch (const std::exception& error) {  // a full disk: the record says "building" until the next start
      spdlog::warn("build {}: {}", job.build, error.what());
    }
  }
}

void Templates::run(const Job& job) {
  change(job.build, true, [](BuildRecord& record) { record.status = "building"; });
  const auto failed = [&](const std::string& why, const std::string& step) {
    add_line(job.build, 0, "error", why);
    change(job.build, true, [&](BuildRecord& record) {
      record.status = "error";
      record.reason = why, record.step = step;
    });
  };
  try {
    perform(job);
  } catch (const sandbox::BuildError& error) {
    return failed(error.what(), error.number() > 0 ? std::to_string(error.number()) : "finalize");
  } catch (const std::exception& error) {
    return failed(error.what(), "");
  }
  change(job.build, true, [](BuildRecord& record) { record.status = "ready"; });
}

void Templates::perform(const Job& job) {
  const BuildRecord record = find(job.build);
  sandbox::BuildOptions options;
  options.name = record.names.at(0);
  const int memory = record.memory_mib > 0 ? record.memory_mib : options_.memory_mib;
  options.limits.memory_bytes = static_cast<std::uint64_t>(memory) << 20;
  options.limits.disk_bytes = static_cast<std::uint64_t>(record.disk_mib) << 20;
  options.limits.processes = options_.processes;
  options.stop = &stop_;
  options.log = [&](int step, const std::string& line) { add_line(job.build, step, "info", line); };
  // Steps are asked for in their order, of COPY alone.
  std::size_t next = 0;
  options.files = [&](const sandbox::BuildStep&) {
    while (next < job.start.files.size() && job.start.files[next].empty()) ++next;
    return read_file(file_of(job.start.files.at(next++)), 1ULL << 30);
  };
  sandbox::Runtime& runtime = sandboxes_.runtime();
  const sandbox::BuildResult result = sandbox::build_template(runtime, job.start.recipe, options);
  SnapshotRecord made{"", "", record.template_id, options_.now(), memory, record.disk_mib};
  if (!job.start.recipe.snapshot.empty()) {
    const std::optional<SnapshotRecord> base = sandboxes_.find_snapshot(job.start.recipe.snapshot);
    if (base) made.memory_mib = base->memory_mib, made.disk_mib = base->disk_mib;
  }
  made.build_id = job.build;
  for (const std::string& name : record.names) {
    made.name = name;
    sandboxes_.name_template(options.name, made);
  }
  add_line(job.build, 0, "info", fmt::format("{} steps done, {} were done before", result.done, result.cached));
}

Reply Templates::status(const std::string& build, const Request& request) {
  const std::size_t offset = number_of(request, "logsOffset", 0, kMaxLines * 2);
  return json_reply(200, status_json(find(build), offset, number_of(request, "limit", kLinesAtOnce, kLinesAtOnce)));
}

Reply Templates::upload_place(const std::string& hash, const std::string& host) {
  need_hash(hash);
  const std::string token = random_hex(20);
  const std::lock_guard lock(mutex_);
  if (uploads_.size() >= 1000) uploads_.clear();  // whoever waits with an old one asks again
  uploads_[token] = hash;
  return json_reply(201,
                    {{"present", fs::exists(file_of(hash))}, {"url", fmt::format("http://{}/upload/{}", host, token)}});
}

Reply Templates::take_upload(const std::string& token, const std::string& body) {
  const std::lock_guard lock(mutex_);
  const auto found = uploads_.find(token);
  if (found == uploads_.end()) throw ApiError(403, "", "this place to upload to is not known, or was used");
  write_file_atomic(file_of(found->second), body);
  uploads_.erase(found);
  return {200, ""};
}

Reply Templates::alias(const std::string& name) {
  const std::string full = template_name(name);
  if (!options_.templates.contains(full) && !sandboxes_.has_snapshot(full))
    throw ApiError(404, "", fmt::format("template '{}' was not found", full));
  return json_reply(200, {{"templateID", full}, {"public", false}});
}

Reply Templates::list() {
  Json out = Json::array();
  const auto add = [&](const std::string& name, const std::string& build, int memory, int disk, std::int64_t time) {
    out.push_back({{"templateID", name},
                   {"buildID", build},
                   {"cpuCount", 1},
                   {"memoryMB", memory},
                   {"diskSizeMB", disk},
                   {"public", false},
                   {"aliases", Json::array({name})},
                   {"names", Json::array({name})},
                   {"createdAt", rfc3339(time)},
                   {"updatedAt", rfc3339(time)},
                   {"createdBy", nullptr},
                   {"lastSpawnedAt", nullptr},
                   {"spawnCount", 0},
                   {"buildCount", 1},
                   {"envdVersion", "0.6.4"},
                   {"buildStatus", "ready"}});
  };
  for (const auto& [name, image] : options_.templates) add(name, "", options_.memory_mib, options_.disk_mib, 0);
  for (const SnapshotRecord& record : sandboxes_.templates())
    add(record.name, record.build_id, record.memory_mib, record.disk_mib, record.created);
  return json_reply(200, out);
}

Reply Templates::tags(const std::string& name) {
  Json out = Json::array();
  const std::string bare = without_tag(template_name(name));
  for (const SnapshotRecord& record : sandboxes_.templates())
    if (without_tag(record.name) == bare)
      out.push_back(
          {{"tag", tag_of(record.name)}, {"buildID", record.build_id}, {"createdAt", rfc3339(record.created)}});
  if (out.empty()) throw ApiError(404, "", fmt::format("template '{}' was not found", bare));
  return json_reply(200, out);
}

Reply Templates::assign_tags(const std::string& body) {
  const Json json = serve::parse_body(body);
  Fields fields(json, "");
  const std::string target = template_name(fields.require_text("target"));
  const Json& wanted = fields.require("tags");
  fields.finish();
  std::optional<SnapshotRecord> record = sandboxes_.find_snapshot(target);
  if (!record || record->build_id.empty()) throw ApiError(404, "", fmt::format("template '{}' was not found", target));
  if (!wanted.is_array() || wanted.empty() || wanted.size() > 100)
    fields.refuse("tags", "a list of 1 to 100 strings", wanted);
  std::vector<std::string> names;
  for (const Json& tag : wanted) {
    if (!tag.is_string()) fields.refuse("tags", "strings", tag);
    names.push_back(template_name(without_tag(target) + ":" + tag.get<std::string>()));
  }
  for (const std::string& name : names) {
    record->name = name;
    sandboxes_.name_template(target, *record);
  }
  return json_reply(201, {{"buildID", record->build_id}, {"tags", wanted}});
}

Reply Templates::remove_tags(const std::string& body) {
  const Json json = serve::parse_body(body);
  Fields fields(json, "");
  const std::string bare = without_tag(template_name(fields.require_text("name")));
  const Json& unwanted = fields.require("tags");
  fields.finish();
  if (!unwanted.is_array()) fields.refuse("tags", "a list of strings", unwanted);
  for (const Json& tag : unwanted) {
    if (!tag.is_string()) fields.refuse("tags", "strings", tag);
    sandboxes_.remove_snapshot(template_name(bare + ":" + tag.get<std::string>()));
  }
  return {204, ""};
}

// /templates/ID/REST
Reply Templates::answer_below(const Request& request, const std::string& id, const std::string& rest) {
  const std::string files = "files/", builds = "builds/";
  if (request.method == "GET" && rest.starts_with(files)) return upload_place(rest.substr(files.size()), request.host);
  if (rest.starts_with(builds)) {
    const std::string build = rest.substr(builds.size(), rest.find('/', builds.size()) - builds.size());
    if (find(build).template_id != id) throw unknown_build(build);
    const std::string what = rest.substr(builds.size() + build.size());
    if (request.method == "GET" && what == "/status") return status(build, request);
    if (request.method == "POST" && what.empty()) return start_build(build, request.body);
  }
  if (request.method == "GET" && rest == "tags") return tags(id);
  if (request.method == "DELETE" && rest.empty()) return sandboxes_.remove_snapshot(id), Reply{204, ""};
  throw ApiError(
      501, "",
      fmt::format("{} {} is not built here; docs/e2b.md lists what is", request.method, request.path.substr(0, 100)));
}

Reply Templates::answer(const Request& request) {
  std::string path = request.path;
  if (is_upload(path)) {
    if (request.method != "PUT") throw ApiError(405, "", "/upload takes PUT");
    return take_upload(path.substr(std::string("/upload/").size()), request.body);
  }
  if (path.starts_with("/v2/") || path.starts_with("/v3/")) path.erase(0, 3);
  if (path == "/templates" && request.method == "GET") return list();
  if (path == "/templates" && request.method == "POST") {
    if (!request.path.starts_with("/v3/"))
      throw ApiError(501, "", "templates are built by POST /v3/templates; what came before it is not built here");
    return request_build(request.body);
  }
  if (path == "/templates/tags" && request.method == "POST") return assign_tags(request.body);
  if (path == "/templates/tags" && request.method == "DELETE") return remove_tags(request.body);
  const std::string below = "/templates/", aliases = "/templates/aliases/";
  if (path.starts_with(aliases) && request.method == "GET")
    return alias(percent_decode(path.substr(aliases.size()), false).value_or(""));
  const std::string rest = path.substr(std::min(below.size(), path.size()));
  const std::size_t slash = std::min(rest.find('/'), rest.size());
  return answer_below(request, percent_decode(rest.substr(0, slash), false).value_or(""),
                      rest.substr(std::min(slash + 1, rest.size())));
}

}  // namespace tidelock::serve::e2b

#include "serve/e2b/record.hpp"

#include <algorithm>
#include <charconv>

#include "base/base.hpp"
#include "serve/api_error.hpp"
#include "serve/e2b/text.hpp"

namespace tidelock::serve::e2b {
namespace fs = std::filesystem;
namespace {

constexpr std::string_view kMagic = "tidelock-e2b 1 ";
constexpr std::size_t kMaxRecord = 4U << 20;

std::string with_header(const Json& record) {
  const std::string body = record.dump();
  return fmt::format("{}{:08x}\n{}\n", kMagic, crc32c(body), body);
}

std::optional<Json> read_record(const std::string& text) {
  const std::size_t line = text.find('\n');
  if (!text.starts_with(kMagic) || line == std::string::npos || text.back() != '\n') return std::nullopt;
  const std::string body = text.substr(line + 1, text.size() - line - 2);
  if (text.substr(kMagic.size(), line - kMagic.size()) != fmt::format("{:08x}", crc32c(body))) return std::nullopt;
  Json json = Json::parse(body, nullptr, false);
  return json.is_object() ? std::optional(json) : std::nullopt;
}

ApiError wrong(const char* name, const std::string& expected, const std::string& found) {
  return {400, "", fmt::format("{}: expected {}, found '{}'", name, expected, found.substr(0, 100))};
}

// The filter was encoded once more than a query is: names and values each on their own, then as a form.
std::map<std::string, std::string> parse_metadata_filter(const std::string& text) {
  std::map<std::string, std::string> out;
  const auto pairs = parse_form(text);
  if (!pairs) throw wrong("metadata", "an encoded form", text);
  for (const auto& [name, value] : *pairs) {
    const auto plain_name = percent_decode(name, false), plain_value = percent_decode(value, false);
    if (!plain_name || !plain_value) throw wrong("metadata", "encoded names and values", text);
    out[*plain_name] = *plain_value;
  }
  return out;
}

bool matches(const ListItem& item, const ListQuery& query) {
  const SandboxRecord& record = item.record;
  if (item.state == State::running ? !query.running : !query.paused) return false;
  if (query.started_after && record.started < *query.started_after) return false;
  if (!query.template_id.empty() && record.template_id != query.template_id) return false;
  return std::all_of(query.metadata.begin(), query.metadata.end(), [&](const auto& wanted) {
    const auto found = record.metadata.find(wanted.first);
    return found != record.metadata.end() && found->second == wanted.second;
  });
}

std::string token_of(const SandboxRecord& record) {
  return fmt::format("{}-{}", record.started, record.id);
}

}  // namespace

Json to_json(const SandboxRecord& r) {
  return {{"id", r.id},
          {"template", r.template_id},
          {"token", r.token},
          {"metadata", r.metadata},
          {"environment", r.environment},
          {"started", r.started},
          {"ends", r.ends},
          {"timeout", r.timeout},
          {"auto_pause", r.auto_pause},
          {"auto_resume", r.auto_resume},
          {"memory_mib", r.memory_mib},
          {"disk_mib", r.disk_mib}};
}

Json to_json(const SnapshotRecord& r) {
  return {{"name", r.name},       {"sandbox", r.sandbox_id},    {"template", r.template_id},
          {"created", r.created}, {"memory_mib", r.memory_mib}, {"disk_mib", r.disk_mib},
          {"build", r.build_id}};
}

std::optional<SandboxRecord> parse_sandbox(const Json& json) {
  try {
    SandboxRecord out;
    json.at("id").get_to(out.id), json.at("template").get_to(out.template_id), json.at("token").get_to(out.token);
    json.at("metadata").get_to(out.metadata), json.at("environment").get_to(out.environment);
    json.at("started").get_to(out.started), json.at("ends").get_to(out.ends), json.at("timeout").get_to(out.timeout);
    json.at("auto_pause").get_to(out.auto_pause), json.at("auto_resume").get_to(out.auto_resume);
    json.at("memory_mib").get_to(out.memory_mib), json.at("disk_mib").get_to(out.disk_mib);
    return out;
  } catch (const Json::exception&) {
    return std::nullopt;
  }
}

std::optional<SnapshotRecord> parse_snapshot(const Json& json) {
  try {
    SnapshotRecord out;
    json.at("name").get_to(out.name), json.at("sandbox").get_to(out.sandbox_id);
    json.at("template").get_to(out.template_id), json.at("created").get_to(out.created);
    json.at("memory_mib").get_to(out.memory_mib), json.at("disk_mib").get_to(out.disk_mib);
    out.build_id = json.value("build", "");
    return out;
  } catch (const Json::exception&) {
    return std::nullopt;
  }
}

RecordFolder::RecordFolder(fs::path folder, fs::path quarantine)
    : folder_(std::move(folder)), quarantine_(std::move(quarantine)) {
  make_folder(folder_);
}

std::vector<Json> RecordFolder::load() {
  std::vector<Json> out;
  std::vector<std::string> names;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder_)) names.push_back(entry.path().filename());
  for (const std::string& name : names) {
    if (name.ends_with(".tmp")) {  // never became a record
      fs::remove(folder_ / name);
    } else if (std::optional<Json> record = read_record(read_file(folder_ / name, kMaxRecord))) {
      out.push_back(std::move(*record));
    } else {
      set_aside(name);
    }
  }
  return out;
}

void RecordFolder::save(const std::string& name, const Json& record) {
  write_file_atomic(folder_ / (name + ".json"), with_header(record));
}

void RecordFolder::remove(const std::string& name) {
  std::error_code error;
  fs::remove(folder_ / (name + ".json"), error);
  if (error) spdlog::warn("cannot remove the record {} in {}: {}", name, folder_.string(), error.message());
}

void RecordFolder::set_aside(const std::string& name) {
  make_folder(quarantine_);
  fs::rename(folder_ / name, quarantine_ / fmt::format("{}-{}", folder_.filename().string(), name));
  spdlog::warn("{}: cannot be read; it was moved to {}", (folder_ / name).string(), quarantine_.string());
}

Expiry expiry_of(const SandboxRecord& record, State state, std::int64_t now) {
  if (state != State::running || now < record.ends) return Expiry::none;
  return record.auto_pause ? Expiry::pause : Expiry::kill;
}

ListQuery parse_list_query(const std::map<std::string, std::string>& query) {
  ListQuery out;
  for (const auto& [name, value] : query) {
    if (name == "metadata") {
      out.metadata = parse_metadata_filter(value);
    } else if (name == "state") {
      out.running = out.paused = false;
      for (std::size_t at = 0; at <= value.size(); at = std::min(value.find(',', at), value.size()) + 1) {
        const std::string one = value.substr(at, std::min(value.find(',', at), value.size()) - at);
        if (one != "running" && one != "paused") throw wrong("state", "running or paused", value);
        (one == "running" ? out.running : out.paused) = true;
      }
    } else if (name == "limit") {
      const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), out.limit);
      if (error != std::errc() || end != value.data() + value.size() || out.limit < 1 || out.limit > 100)
        throw wrong("limit", "1 to 100", value);
    } else if (name == "nextToken") {
      out.after = value;
    } else if (name == "startedAfter") {
      out.started_after = parse_rfc3339(value);
      if (!out.started_after) throw wrong("startedAfter", "a time as RFC 3339", value);
    } else if (name == "template") {
      out.template_id = value;
    } else if (name == "order") {
      if (value != "asc" && value != "desc") throw wrong("order", "asc or desc", value);
      out.ascending = value == "asc";
    } else {
      throw ApiError(400, "", fmt::format("there is no parameter '{}' here", name.substr(0, 100)));
    }
  }
  return out;
}

Page list_page(std::vector<ListItem> all, const ListQuery& query) {
  std::erase_if(all, [&](const ListItem& item) { return !matches(item, query); });
  const auto before = [&](std::int64_t started_a, const std::string& a, std::int64_t started_b, const std::string& b) {
    const bool less = started_a != started_b ? started_a < started_b : a < b;
    return query.ascending ? less : (started_a != started_b || a != b) && !less;
  };
  std::sort(all.begin(), all.end(), [&](const ListItem& a, const ListItem& b) {
    return before(a.record.started, a.record.id, b.record.started, b.record.id);
  });
  auto first = all.begin();
  if (!query.after.empty()) {
    std::int64_t started = 0;
    const std::size_t dash = query.after.find('-');
    const char* end = query.after.data() + std::min(dash, query.after.size());
    if (dash == std::string::npos || std::from_chars(query.after.data(), end, started).ptr != end)
      throw wrong("nextToken", "a token of an earlier page", query.after);
    const std::string id = query.after.substr(dash + 1);
    first = std::find_if(all.begin(), all.end(), [&](const ListItem& item) {
      return before(started, id, item.record.started, item.record.id);
    });
  }
  Page out;
  const auto count = std::min<std::ptrdiff_t>(all.end() - first, static_cast<std::ptrdiff_t>(query.limit));
  out.items.assign(first, first + count);
  if (first + count != all.end()) out.next = token_of(out.items.back().record);
  return out;
}

}  // namespace tidelock::serve::e2b

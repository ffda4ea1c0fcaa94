#include "serve/e2b/template_request.hpp"

#include <algorithm>

#include "base/base.hpp"
#include "serve/e2b/connect.hpp"
#include "serve/e2b/text.hpp"
#include "serve/fields.hpp"

namespace tidelock::serve::e2b {
namespace {

using sandbox::BuildStep;

constexpr std::size_t kMostBytes = 4 << 20;  // of a body

bool is_plain(const std::string& text) {
  return !text.empty() && text.size() <= 40 && text[0] != '.' &&
         std::all_of(text.begin(), text.end(),
                     [](unsigned char c) { return std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.'; });
}

std::vector<std::string> texts_of(Fields& fields, const char* name) {
  std::vector<std::string> out;
  const Json* found = fields.find(name);
  if (found == nullptr) return out;
  if (!found->is_array() || found->size() > 1000) fields.refuse(name, "a list of up to 1000 strings", *found);
  for (const Json& one : *found) {
    if (!one.is_string()) fields.refuse(name, "strings", one);
    out.push_back(one.get<std::string>());
  }
  return out;
}

BuildStep::Kind kind_of(const std::string& type, const std::string& where) {
  using Kind = BuildStep::Kind;
  const std::map<std::string, Kind> kinds{
      {"RUN", Kind::run}, {"COPY", Kind::copy}, {"ENV", Kind::env}, {"WORKDIR", Kind::workdir}, {"USER", Kind::user}};
  const auto found = kinds.find(type);
  if (found == kinds.end())
    throw ApiError(
        400, "",
        fmt::format("{}.type: expected RUN, COPY, ENV, WORKDIR or USER, found '{}'", where, type.substr(0, 40)));
  return found->second;
}

void add_step(BuildStart& out, const Json& json, const std::string& where) {
  Fields fields(json, where);
  BuildStep step;
  step.kind = kind_of(fields.require_text("type"), where);
  step.arguments = texts_of(fields, "args");
  step.force = fields.flag("force").value_or(false);
  fields.flag("forceUpload");  // what the client made of it: files were sent again
  const std::string files = fields.text("filesHash").value_or("");
  fields.finish();
  try {
    check_step(step);
  } catch (const Error& error) {
    throw ApiError(400, "", fmt::format("{}: {}", where, error.what()));
  }
  if (step.kind == BuildStep::Kind::copy) need_hash(files);
  out.recipe.steps.push_back(std::move(step));
  out.files.push_back(files);
}

}  // namespace

std::string template_name(const std::string& text) {
  const std::size_t colon = text.find(':');
  const std::string name = text.substr(0, colon), tag = colon == std::string::npos ? "" : text.substr(colon + 1);
  if (!is_plain(name) || (colon != std::string::npos && !is_plain(tag)) || name.starts_with("step-"))
    throw ApiError(400, "",
                   fmt::format("name '{}': expected NAME or NAME:TAG, each of up to 40 letters, digits, '-', '_' and "
                               "'.', not beginning with '.' or 'step-'",
                               text.substr(0, 100)));
  return tag.empty() || tag == "default" ? name : name + ":" + tag;
}

NewTemplate parse_new_template(const std::string& body) {
  const Json json = parse_object(body, kMostBytes);
  Fields fields(json, "");
  NewTemplate out;
  const std::string alias = fields.text("alias").value_or("");
  const std::string named = fields.text("name").value_or(alias);
  if (named.empty()) throw ApiError(400, "", "name: expected one");
  const std::string first = template_name(named);
  out.name = first.substr(0, first.find(':'));
  out.tags = texts_of(fields, "tags");
  if (named.find(':') != std::string::npos) out.tags.insert(out.tags.begin(), named.substr(named.find(':') + 1));
  if (out.tags.empty()) out.tags.emplace_back("default");
  for (const std::string& tag : out.tags) {
    const std::string full = template_name(out.name + ":" + tag);
    if (std::find(out.names.begin(), out.names.end(), full) == out.names.end()) out.names.push_back(full);
  }
  fields.text("teamID");  // there is one
  out.processors = static_cast<int>(fields.integer("cpuCount", 1, 1024).value_or(0));
  out.memory_mib = static_cast<int>(fields.integer("memoryMB", 96, 65536).value_or(0));
  out.disk_mib = static_cast<int>(fields.integer("minFreeDiskMb", 0, 1 << 20).value_or(0));
  fields.finish();
  return out;
}

BuildStart parse_build_start(const std::string& body) {
  const Json json = parse_object(body, kMostBytes);
  Fields fields(json, "");
  BuildStart out;
  out.recipe.image = fields.text("fromImage").value_or("");
  out.recipe.snapshot = fields.text("fromTemplate").value_or("");
  if (fields.find("fromImageRegistry") != nullptr)
    throw ApiError(501, "", "fromImageRegistry: this server has no network and fetches nothing from registries");
  if (out.recipe.image.empty() == out.recipe.snapshot.empty())
    throw ApiError(400, "", "expected one of fromImage and fromTemplate");
  out.recipe.force = fields.flag("force").value_or(false);
  out.recipe.start = fields.text("startCmd").value_or("");
  out.recipe.ready = fields.text("readyCmd").value_or("");
  if (const Json* steps = fields.find("steps")) {
    if (!steps->is_array() || steps->size() > 1000) fields.refuse("steps", "a list of up to 1000 steps", *steps);
    for (std::size_t i = 0; i < steps->size(); ++i) add_step(out, (*steps)[i], fmt::format("steps[{}]", i));
  }
  fields.finish();
  return out;
}

void need_hash(const std::string& hash) {
  if (hash.size() < 16 || hash.size() > 128 || hash.find_first_not_of("0123456789abcdef") != std::string::npos)
    throw ApiError(400, "",
                   fmt::format("files '{}': expected a hash of 16 to 128 hexadecimal digits", hash.substr(0, 150)));
}

Json to_json(const BuildRecord& r) {
  Json lines = Json::array();
  for (const BuildLine& line : r.lines) lines.push_back({line.time, line.step, line.level, line.text});
  return {{"id", r.id},           {"template", r.template_id},  {"status", r.status},     {"names", r.names},
          {"tags", r.tags},       {"memory_mib", r.memory_mib}, {"disk_mib", r.disk_mib}, {"created", r.created},
          {"changed", r.changed}, {"reason", r.reason},         {"step", r.step},         {"lines", lines}};
}

std::optional<BuildRecord> parse_build(const Json& json) {
  try {
    BuildRecord out;
    json.at("id").get_to(out.id), json.at("template").get_to(out.template_id), json.at("status").get_to(out.status);
    json.at("names").get_to(out.names), json.at("tags").get_to(out.tags);
    json.at("memory_mib").get_to(out.memory_mib), json.at("disk_mib").get_to(out.disk_mib);
    json.at("created").get_to(out.created), json.at("changed").get_to(out.changed);
    json.at("reason").get_to(out.reason), json.at("step").get_to(out.step);
    for (const Json& line : json.at("lines")) out.lines.push_back({line.at(0), line.at(1), line.at(2), line.at(3)});
    return out;
  } catch (const Json::exception&) {
    return std::nullopt;
  }
}

Json status_json(const BuildRecord& record, std::size_t offset, std::size_t limit) {
  Json entries = Json::array();
  for (std::size_t i = offset; i < record.lines.size() && entries.size() < limit; ++i) {
    const BuildLine& line = record.lines[i];
    Json entry{{"timestamp", rfc3339(line.time)}, {"level", line.level}, {"message", line.text}};
    if (line.step > 0) entry["step"] = std::to_string(line.step);
    entries.push_back(std::move(entry));
  }
  Json out{{"templateID", record.template_id},
           {"buildID", record.id},
           {"status", record.status},
           {"logs", Json::array()},
           {"logEntries", entries}};
  if (record.status == "error") {
    out["reason"] = {{"message", record.reason}, {"logEntries", Json::array()}};
    if (!record.step.empty()) out["reason"]["step"] = record.step;
  }
  return out;
}

}  // namespace tidelock::serve::e2b

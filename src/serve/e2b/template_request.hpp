// What clients send to build templates, read and checked. Pure. Private to serve/e2b.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "sandbox/build/recipe.hpp"
#include "serve/e2b/record.hpp"

namespace tidelock::serve::e2b {

// "name" or "name:tag"; the tag "default" is the name alone. Throws ApiError{400}.
std::string template_name(const std::string& text);

// POST /v3/templates.
struct NewTemplate {
  std::string name;                // without a tag
  std::vector<std::string> names;  // what the build is called when it is done: NAME, NAME:TAG
  std::vector<std::string> tags;
  int memory_mib = 0;  // 0: not said
  int processors = 0;  // as asked for
  int disk_mib = 0;    // at least this much free
};
NewTemplate parse_new_template(const std::string& body);

// POST /v2/templates/ID/builds/BUILD. Of each COPY, `files` has the hash of its files.
struct BuildStart {
  sandbox::BuildRecipe recipe;     // image: as the client calls it
  std::vector<std::string> files;  // [i]: of step i; empty for all but COPY
};
BuildStart parse_build_start(const std::string& body);

// The name of uploaded files: letters and digits of a hash. Throws ApiError{400}.
void need_hash(const std::string& hash);

// One build of a template.
struct BuildLine {
  std::int64_t time = 0;  // milliseconds since 1970
  int step = 0;           // 0: about the whole
  std::string level, text;
};
struct BuildRecord {
  std::string id, template_id, status;  // waiting, building, ready, error
  std::vector<std::string> names, tags;
  int memory_mib = 0, disk_mib = 0;
  std::int64_t created = 0, changed = 0;
  std::string reason, step;  // of an error
  std::vector<BuildLine> lines;
};
Json to_json(const BuildRecord& record);
std::optional<BuildRecord> parse_build(const Json& json);

// GET .../status: at most 100 lines from `offset` on.
Json status_json(const BuildRecord& record, std::size_t offset, std::size_t limit);

}  // namespace tidelock::serve::e2b

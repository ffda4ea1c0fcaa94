// Reading TOML against a schema: toml++ is known here only.
#include <fmt/format.h>
#include <toml++/toml.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <map>
#include <sstream>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/settings.hpp"

namespace tidelock {
namespace {

constexpr std::uint64_t kRecipeLimit = 4ULL << 20;

std::string describe_node(const toml::node& node) {
  std::ostringstream text;
  if (node.is_table()) return "a table";
  if (node.is_array())
    text << *node.as_array();
  else
    node.visit([&](const auto& v) {
      if constexpr (toml::is_value<decltype(v)>) text << v;
    });
  const std::string shown = text.str();
  return shown.size() > 60 ? shown.substr(0, 60) + "..." : shown;
}

template <typename T>
std::optional<T> element_of(const toml::node& node) {
  if constexpr (std::is_same_v<T, double>) {
    if (const auto* v = node.as_integer()) return static_cast<double>(v->get());
    if (const auto* v = node.as_floating_point()) return v->get();
  } else {
    if (const auto* v = node.as<T>()) return v->get();
  }
  return std::nullopt;
}

template <typename T>
std::optional<SettingValue> list_of(const toml::node& node) {
  const toml::array* array = node.as_array();
  if (array == nullptr) return std::nullopt;
  std::vector<T> values;
  for (const auto& item : *array) {
    auto value = element_of<T>(item);
    if (!value) return std::nullopt;
    values.push_back(std::move(*value));
  }
  return values;
}

template <typename T>
std::optional<SettingValue> scalar_of(const toml::node& node) {
  if (auto value = element_of<T>(node)) return SettingValue(std::move(*value));
  return std::nullopt;
}

// The value of a node as a key's type, or nothing when the node is of another type.
std::optional<SettingValue> value_of(SettingType type, const toml::node& node) {
  switch (type) {
    case SettingType::integer:
      return scalar_of<std::int64_t>(node);
    case SettingType::number:
      return scalar_of<double>(node);
    case SettingType::flag:
      return scalar_of<bool>(node);
    case SettingType::text:
      return scalar_of<std::string>(node);
    case SettingType::integers:
      return list_of<std::int64_t>(node);
    case SettingType::numbers:
      return list_of<double>(node);
    case SettingType::texts:
      return list_of<std::string>(node);
    case SettingType::table_array:
      return std::nullopt;
  }
  return std::nullopt;
}

struct Step {  // one part of a path: "tasks[0]"
  std::string name;
  std::optional<std::size_t> index;
};

std::vector<Step> split_path(const std::string& path, const std::string& override_text) {
  const auto refuse = [&](const char* why) {
    fail(ErrorCode::invalid_argument, "--set {}: {}; expected KEY=VALUE such as rl.steps=5", override_text, why);
  };
  std::vector<Step> steps;
  std::istringstream parts(path);
  std::string part;
  while (std::getline(parts, part, '.')) {
    Step step;
    const std::size_t bracket = part.find('[');
    step.name = part.substr(0, bracket);
    if (bracket != std::string::npos) {
      std::size_t index = 0;
      const char* first = part.data() + bracket + 1;
      const char* last = part.data() + part.size();
      const auto [end, error] = std::from_chars(first, last, index);
      if (error != std::errc() || end + 1 != last || *end != ']' || index > 1000)
        refuse("the index is not a number in [ ]");
      step.index = index;
    }
    const auto plain = [](unsigned char c) { return std::isalnum(c) != 0 || c == '_' || c == '-'; };
    if (step.name.empty() || !std::all_of(step.name.begin(), step.name.end(), plain)) refuse("the key is not a key");
    steps.push_back(std::move(step));
  }
  if (steps.empty() || path.ends_with('.')) refuse("the key is not a key");
  return steps;
}

const SettingKey* find_key(const Schema& schema, const std::vector<Step>& steps) {
  const Schema* current = &schema;
  std::string path;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    path += (path.empty() ? "" : ".") + steps[i].name;
    if (!steps[i].index) continue;
    const SettingKey* key = current->find(path);
    if (key == nullptr || key->type != SettingType::table_array) return nullptr;
    current = key->element.get();
    path.clear();
  }
  return current->find(path);
}

}  // namespace

class SettingsReader {
 public:
  SettingsReader(const Schema& schema, std::string name) : schema_(schema), name_(std::move(name)) {}

  Settings read(std::string_view text, const std::vector<std::string>& overrides) {
    toml::table root = parse(text);
    for (const std::string& one : overrides) apply(root, one);
    return table(root, schema_, "");
  }

 private:
  toml::table parse(std::string_view text) const {
    try {
      return toml::parse(text, name_);
    } catch (const toml::parse_error& error) {
      fail(ErrorCode::invalid_argument, "{}:{}: not valid TOML: {}", name_, error.source().begin.line,
           error.description());
    }
  }

  // The value behind `KEY=`: raw text for a text key that is not quoted, TOML for everything else.
  toml::table override_value(const SettingKey* key, const std::string& one, const std::string& text) const {
    const bool bare =
        key != nullptr && key->type == SettingType::text && !text.starts_with('"') && !text.starts_with('\'');
    if (bare) return toml::table{{"v", text}};
    try {
      toml::table holder = toml::parse("v = " + text);
      if (holder.size() == 1 && holder.contains("v")) return holder;
    } catch (const toml::parse_error&) {
      // Told below, in the words of the key.
    }
    if (key == nullptr) return toml::table{{"v", text}};  // unknown keys are refused when the whole is read
    fail(ErrorCode::invalid_argument, "--set {}: found {}, expected {}", one, text, expectation(*key));
  }

  void apply(toml::table& root, const std::string& one) {
    const std::size_t equals = one.find('=');
    const std::string path = one.substr(0, equals);
    const std::vector<Step> steps = split_path(path, one);
    if (equals == std::string::npos)
      fail(ErrorCode::invalid_argument, "--set {}: no value; expected KEY=VALUE such as rl.steps=5", one);
    toml::table holder = override_value(find_key(schema_, steps), one, one.substr(equals + 1));
    const auto in_the_way = [&](const std::string& what) {
      fail(ErrorCode::invalid_argument, "--set {}: {} is not a table", one, what);
    };
    toml::table* at = &root;
    for (std::size_t i = 0; i + 1 < steps.size() || steps[i].index; ++i) {
      if (!steps[i].index) {
        at->insert(steps[i].name, toml::table{});  // keeps what is there
        at = at->get_as<toml::table>(steps[i].name);
      } else {
        at->insert(steps[i].name, toml::array{});
        toml::array* array = at->get_as<toml::array>(steps[i].name);
        if (array == nullptr || *steps[i].index > array->size())
          fail(ErrorCode::invalid_argument, "--set {}: {} has {} tables", one, steps[i].name,
               array == nullptr ? 0 : array->size());
        if (*steps[i].index == array->size()) array->push_back(toml::table{});  // one past the end adds a table
        at = array->get_as<toml::table>(*steps[i].index);
      }
      if (at == nullptr) in_the_way(steps[i].name);
      if (i + 1 == steps.size()) in_the_way(path);
    }
    at->insert_or_assign(steps.back().name, std::move(*holder.get("v")));
    origins_[path] = "--set " + one;
  }

  std::string where(const toml::node& node, const std::string& path) const {
    const auto origin = origins_.find(path);
    return origin != origins_.end() ? origin->second : fmt::format("{}:{}", name_, node.source().begin.line);
  }

  // `prefix` leads from the root to this table, "" or "tasks[0].".
  Settings table(const toml::table& root, const Schema& schema, const std::string& prefix) const {
    refuse_unknown(root, schema, prefix, "");
    Settings settings;
    for (const auto& key : schema.keys()) {
      Settings::Entry entry{*key, std::int64_t{0}, {}, false};
      if (key->value && !complaint(*key, *key->value).empty())
        fail(ErrorCode::internal, "the default of the setting {} is not {}", key->path, expectation(*key));
      const toml::node* node = root.at_path(key->path).node();
      entry.given = node != nullptr;
      if (key->type == SettingType::table_array) {
        if (node != nullptr) entry.tables = tables(*node, *key, prefix);
      } else if (node != nullptr) {
        entry.value = checked(*key, *node, prefix);
      } else if (key->value) {
        entry.value = *key->value;
      } else {
        const std::string place = prefix.empty() ? name_ : fmt::format("{}:{}", name_, root.source().begin.line);
        fail(ErrorCode::invalid_argument, "{}: {}{} is missing; expected {}: {}", place, prefix, key->path,
             expectation(*key), key->doc);
      }
      settings.entries_.push_back(std::move(entry));
    }
    return settings;
  }

  SettingValue checked(const SettingKey& key, const toml::node& node, const std::string& prefix) const {
    const std::string path = prefix + key.path;
    const auto value = value_of(key.type, node);
    if (!value)
      fail(ErrorCode::invalid_argument, "{}: {} is {}, expected {}", where(node, path), path, describe_node(node),
           expectation(key));
    if (const std::string found = complaint(key, *value); !found.empty())
      fail(ErrorCode::invalid_argument, "{}: {} is {}, expected {}", where(node, path), path, found, expectation(key));
    return *value;
  }

  std::vector<Settings> tables(const toml::node& node, const SettingKey& key, const std::string& prefix) const {
    const std::string path = prefix + key.path;
    const toml::array* array = node.as_array();
    const bool right =
        array != nullptr && std::all_of(array->begin(), array->end(), [](const auto& item) { return item.is_table(); });
    if (!right)
      fail(ErrorCode::invalid_argument, "{}: {} is {}, expected tables: [[{}]]", where(node, path), path,
           describe_node(node), path);
    std::vector<Settings> result;
    for (std::size_t i = 0; i < array->size(); ++i)
      result.push_back(table(*array->get_as<toml::table>(i), *key.element, fmt::format("{}[{}].", path, i)));
    return result;
  }

  void refuse_unknown(const toml::table& at, const Schema& schema, const std::string& prefix,
                      const std::string& inner) const {
    for (const auto& [name, node] : at) {
      const std::string path = inner + std::string(name.str());
      if (schema.find(path) != nullptr) continue;
      const auto below = [&](const auto& key) { return key->path.starts_with(path + "."); };
      const bool section = std::any_of(schema.keys().begin(), schema.keys().end(), below);
      if (section && node.is_table()) {
        refuse_unknown(*node.as_table(), schema, prefix, path + ".");
        continue;
      }
      if (section)
        fail(ErrorCode::invalid_argument, "{}: {}{} is {}, expected a table", where(node, prefix + path), prefix, path,
             describe_node(node));
      const std::string near = schema.nearest(path);
      const std::string hint = near.empty() ? "" : fmt::format("; did you mean {}{}?", prefix, near);
      fail(ErrorCode::invalid_argument, "{}: unknown key {}{}{}", where(node, prefix + path), prefix, path, hint);
    }
  }

  const Schema& schema_;
  std::string name_;
  std::map<std::string, std::string> origins_;  // path -> the override it came from
};

Settings Settings::load(const std::filesystem::path& path, const Schema& schema,
                        const std::vector<std::string>& overrides) {
  return parse(read_file(path, kRecipeLimit), path.string(), schema, overrides);
}

Settings Settings::parse(std::string_view toml, const std::string& name, const Schema& schema,
                         const std::vector<std::string>& overrides) {
  return SettingsReader(schema, name).read(toml, overrides);
}

}  // namespace tidelock

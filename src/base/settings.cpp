#include "base/settings.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.hpp"

namespace tidelock {
namespace {

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

std::string_view last_component(std::string_view path) {
  const std::size_t dot = path.rfind('.');
  return dot == std::string_view::npos ? path : path.substr(dot + 1);
}

std::string toml_text(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\')
      out += {'\\', c};
    else if (c == '\n')
      out += "\\n";
    else if (c == '\t')
      out += "\\t";
    else if (byte < 0x20 || byte == 0x7F)
      out += fmt::format("\\u{:04X}", byte);
    else
      out += c;
  }
  return out + '"';
}

std::string toml_number(double value) {
  std::string text = fmt::format("{}", value);  // the shortest that reads back to the same bits
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

template <typename T, typename Write>
std::string toml_list(const std::vector<T>& values, Write&& write) {
  std::string out = "[";
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (i > 0) out += ", ";
    out += write(values[i]);
  }
  return out + "]";
}

std::string toml_value(const SettingValue& value) {
  const auto integer = [](std::int64_t v) { return fmt::format("{}", v); };
  switch (value.index()) {
    case 0:
      return integer(std::get<std::int64_t>(value));
    case 1:
      return toml_number(std::get<double>(value));
    case 2:
      return std::get<bool>(value) ? "true" : "false";
    case 3:
      return toml_text(std::get<std::string>(value));
    case 4:
      return toml_list(std::get<std::vector<std::int64_t>>(value), integer);
    case 5:
      return toml_list(std::get<std::vector<double>>(value), toml_number);
    default:
      return toml_list(std::get<std::vector<std::string>>(value), toml_text);
  }
}

std::string escaped_cell(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '|') out += '\\';
    out += c;
  }
  return out;
}

struct Row {
  std::string key, type, fallback, doc;
};

void collect_rows(const Schema& schema, const std::string& prefix, std::vector<Row>& rows) {
  for (const auto& key : schema.keys()) {
    if (key->type == SettingType::table_array) {
      rows.push_back({prefix + key->path, "tables", "none", key->doc});
      collect_rows(*key->element, prefix + key->path + "[].", rows);
    } else {
      rows.push_back(
          {prefix + key->path, expectation(*key), key->value ? toml_value(*key->value) : "required", key->doc});
    }
  }
}

}  // namespace

std::string_view name_of(SettingType type) {
  switch (type) {
    case SettingType::integer:
      return "integer";
    case SettingType::number:
      return "number";
    case SettingType::flag:
      return "true or false";
    case SettingType::text:
      return "text";
    case SettingType::integers:
      return "list of integers";
    case SettingType::numbers:
      return "list of numbers";
    case SettingType::texts:
      return "list of texts";
    case SettingType::table_array:
      return "array of tables";
  }
  fail(ErrorCode::internal, "a setting type without name");
}

std::string expectation(const SettingKey& key) {
  if (!key.allowed.empty()) {
    const bool list = key.type == SettingType::texts;
    return fmt::format("{}{}", list ? "list of: " : "", fmt::join(key.allowed, " | "));
  }
  std::string text(name_of(key.type));
  if (key.low && key.high)
    text += fmt::format(" in {}..{}", *key.low, *key.high);
  else if (key.low)
    text += fmt::format(" >= {}", *key.low);
  return text;
}

std::string complaint(const SettingKey& key, const SettingValue& value) {
  const auto number = [&](double v) -> std::string {
    const bool fits = std::isfinite(v) && (!key.low || v >= *key.low) && (!key.high || v <= *key.high);
    return fits ? "" : fmt::format("{}", v);
  };
  const auto word = [&](const std::string& v) -> std::string {
    const bool fits = key.allowed.empty() || std::find(key.allowed.begin(), key.allowed.end(), v) != key.allowed.end();
    return fits ? "" : toml_text(v);
  };
  const auto each = [](const auto& list, const auto& test) {
    std::string found;
    for (const auto& v : list)
      if (found.empty()) found = test(v);
    return found;
  };
  switch (value.index()) {
    case 0:
      return number(static_cast<double>(std::get<std::int64_t>(value)));
    case 1:
      return number(std::get<double>(value));
    case 3:
      return word(std::get<std::string>(value));
    case 4:
      return each(std::get<std::vector<std::int64_t>>(value),
                  [&](std::int64_t v) { return number(static_cast<double>(v)); });
    case 5:
      return each(std::get<std::vector<double>>(value), number);
    case 6:
      return each(std::get<std::vector<std::string>>(value), word);
    default:
      return "";
  }
}

SettingKey& SettingKey::fallback(SettingValue v) {
  // 1 is a number as well as an integer.
  if (type == SettingType::number && std::holds_alternative<std::int64_t>(v))
    v = static_cast<double>(std::get<std::int64_t>(v));
  if (v.index() != static_cast<std::size_t>(type))
    fail(ErrorCode::internal, "the default of the setting {} is no {}", path, name_of(type));
  value = std::move(v);
  return *this;
}

SettingKey& SettingKey::range(double low_included, double high_included) {
  low = low_included;
  high = high_included;
  return *this;
}

SettingKey& SettingKey::at_least(double low_included) {
  low = low_included;
  return *this;
}

SettingKey& SettingKey::choices(std::vector<std::string> names) {
  allowed = std::move(names);
  return *this;
}

SettingKey& Schema::add(std::string path, SettingType type, std::string doc) {
  for (const auto& key : keys_) {
    const auto above = [](const std::string& a, const std::string& b) { return b.starts_with(a + "."); };
    if (key->path == path || above(key->path, path) || above(path, key->path))
      fail(ErrorCode::internal, "the settings {} and {} cannot both exist", key->path, path);
  }
  auto key = std::make_unique<SettingKey>();
  key->path = std::move(path);
  key->type = type;
  key->doc = std::move(doc);
  keys_.push_back(std::move(key));
  return *keys_.back();
}

SettingKey& Schema::integer(std::string path, std::string doc) {
  return add(std::move(path), SettingType::integer, std::move(doc));
}
SettingKey& Schema::number(std::string path, std::string doc) {
  return add(std::move(path), SettingType::number, std::move(doc));
}
SettingKey& Schema::flag(std::string path, std::string doc) {
  return add(std::move(path), SettingType::flag, std::move(doc));
}
SettingKey& Schema::text(std::string path, std::string doc) {
  return add(std::move(path), SettingType::text, std::move(doc));
}
SettingKey& Schema::integers(std::string path, std::string doc) {
  return add(std::move(path), SettingType::integers, std::move(doc));
}
SettingKey& Schema::numbers(std::string path, std::string doc) {
  return add(std::move(path), SettingType::numbers, std::move(doc));
}
SettingKey& Schema::texts(std::string path, std::string doc) {
  return add(std::move(path), SettingType::texts, std::move(doc));
}
Schema& Schema::table_array(std::string path, std::string doc) {
  SettingKey& key = add(std::move(path), SettingType::table_array, std::move(doc));
  key.element = std::make_shared<Schema>();
  return *key.element;
}

const SettingKey* Schema::find(std::string_view path) const {
  for (const auto& key : keys_)
    if (key->path == path) return key.get();
  return nullptr;
}

std::string Schema::nearest(std::string_view path) const {
  std::string best;
  std::size_t distance = std::max<std::size_t>(2, path.size() / 3) + 1;
  for (const auto& key : keys_) {
    std::size_t d = edit_distance(path, key->path);
    // The right word in the wrong table is a near miss too.
    if (last_component(path) == last_component(key->path)) d = std::min<std::size_t>(d, 2);
    if (d < distance) {
      distance = d;
      best = key->path;
    }
  }
  return best;
}

std::string Schema::describe(bool markdown) const {
  std::vector<Row> rows;
  collect_rows(*this, "", rows);
  std::string out;
  if (markdown) {
    out = "| key | type | default | meaning |\n|---|---|---|---|\n";
    for (const Row& row : rows)
      out += fmt::format("| `{}` | {} | {} | {} |\n", row.key, escaped_cell(row.type), escaped_cell(row.fallback),
                         escaped_cell(row.doc));
    return out;
  }
  std::size_t key_width = 0, type_width = 0, fallback_width = 0;
  for (const Row& row : rows) {
    key_width = std::max(key_width, row.key.size());
    type_width = std::max(type_width, std::min<std::size_t>(row.type.size(), 32));
    fallback_width = std::max(fallback_width, std::min<std::size_t>(row.fallback.size(), 24));
  }
  for (const Row& row : rows)
    out += fmt::format("{:<{}}  {:<{}}  {:<{}}  {}\n", row.key, key_width, row.type, type_width, row.fallback,
                       fallback_width, row.doc);
  return out;
}

const Settings::Entry& Settings::entry(std::string_view path, SettingType type) const {
  for (const Entry& e : entries_) {
    if (e.key.path != path) continue;
    if (e.key.type != type)
      fail(ErrorCode::internal, "the setting {} is read as {}, but it is {}", path, name_of(type), name_of(e.key.type));
    return e;
  }
  fail(ErrorCode::internal, "the setting {} is not in the schema", path);
}

std::int64_t Settings::integer(std::string_view path) const {
  return std::get<std::int64_t>(entry(path, SettingType::integer).value);
}
double Settings::number(std::string_view path) const {
  return std::get<double>(entry(path, SettingType::number).value);
}
bool Settings::flag(std::string_view path) const {
  return std::get<bool>(entry(path, SettingType::flag).value);
}
const std::string& Settings::text(std::string_view path) const {
  return std::get<std::string>(entry(path, SettingType::text).value);
}
const std::vector<std::int64_t>& Settings::integers(std::string_view path) const {
  return std::get<std::vector<std::int64_t>>(entry(path, SettingType::integers).value);
}
const std::vector<double>& Settings::numbers(std::string_view path) const {
  return std::get<std::vector<double>>(entry(path, SettingType::numbers).value);
}
const std::vector<std::string>& Settings::texts(std::string_view path) const {
  return std::get<std::vector<std::string>>(entry(path, SettingType::texts).value);
}
const std::vector<Settings>& Settings::tables(std::string_view path) const {
  return entry(path, SettingType::table_array).tables;
}

bool Settings::given(std::string_view path) const {
  for (const Entry& e : entries_)
    if (e.key.path == path) return e.given;
  fail(ErrorCode::internal, "the setting {} is not in the schema", path);
}

std::string Settings::flat_toml() const {
  std::string out;
  for (const Entry& e : entries_)
    if (e.key.type != SettingType::table_array) out += fmt::format("{} = {}\n", e.key.path, toml_value(e.value));
  return out;
}

std::string Settings::resolved_toml() const {
  // Keys by table, tables in order of their first key; those without a table must come first in TOML.
  std::vector<std::string> tables{""};
  const auto table_of = [](const std::string& path) {
    const std::size_t dot = path.rfind('.');
    return dot == std::string::npos ? std::string() : path.substr(0, dot);
  };
  for (const Entry& e : entries_)
    if (e.key.type != SettingType::table_array &&
        std::find(tables.begin(), tables.end(), table_of(e.key.path)) == tables.end())
      tables.push_back(table_of(e.key.path));
  std::string out;
  for (const std::string& table : tables) {
    if (!table.empty()) out += fmt::format("{}[{}]\n", out.empty() ? "" : "\n", table);
    for (const Entry& e : entries_)
      if (e.key.type != SettingType::table_array && table_of(e.key.path) == table)
        out += fmt::format("{} = {}\n", last_component(e.key.path), toml_value(e.value));
  }
  for (const Entry& e : entries_)
    for (const Settings& element : e.tables)
      out += fmt::format("{}[[{}]]\n{}", out.empty() ? "" : "\n", e.key.path, element.flat_toml());
  return out;
}

}  // namespace tidelock

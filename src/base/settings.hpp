// Recipes: TOML files read against a schema.
//
// A schema lists every key with its type, default, range and meaning. What it does not list is refused with the nearest
// key that it does; what has the wrong type or range is refused naming file, line, key, what was found and what was
// expected. One list thus serves the reader, `--help` and the documentation.
//
//   Schema schema;
//   schema.integer("rl.steps", "optimizer steps").range(1, 1e6).fallback(60);
//   schema.text("rl.loss", "policy-gradient loss").choices({"grpo", "dr_grpo", "dapo"}).fallback("dr_grpo");
//   schema.texts("model.adapters", "...");                             // no fallback: required
//   Schema& task = schema.table_array("tasks", "the mixture of tasks");  // [[tasks]], keys relative to one table
//   task.text("family", "...");
//   const Settings settings = Settings::load("recipe.toml", schema, {"rl.steps=5", "rl.loss=grpo"});
//   settings.integer("rl.steps"); for (const Settings& t : settings.tables("tasks")) t.text("family");
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace tidelock {

// In the order of SettingValue's alternatives.
enum class SettingType { integer, number, flag, text, integers, numbers, texts, table_array };
std::string_view name_of(SettingType type);  // "integer", "list of numbers", ...

using SettingValue = std::variant<std::int64_t, double, bool, std::string, std::vector<std::int64_t>,
                                  std::vector<double>, std::vector<std::string>>;

class Schema;

// One key. The setters return *this so that a declaration is one line.
struct SettingKey {
  std::string path;  // "rl.steps"
  SettingType type = SettingType::text;
  std::string doc;                    // one line: meaning and unit
  std::optional<SettingValue> value;  // default; none: required
  std::optional<double> low, high;    // for numbers and for each element of a list, both included
  std::vector<std::string> allowed;   // for texts
  std::shared_ptr<Schema> element;    // of a table_array

  SettingKey& fallback(SettingValue v);  // Error{internal} when it is of another type; 1 is a number too
  SettingKey& fallback(bool v) { return fallback(SettingValue(v)); }
  SettingKey& fallback(double v) { return fallback(SettingValue(v)); }
  SettingKey& fallback(int v) { return fallback(SettingValue(std::int64_t{v})); }
  SettingKey& fallback(const char* v) { return fallback(SettingValue(std::string(v))); }
  SettingKey& range(double low_included, double high_included);
  SettingKey& at_least(double low_included);
  SettingKey& choices(std::vector<std::string> names);
};

// What a key accepts, for people: "integer in 1..100", "grpo | dapo".
std::string expectation(const SettingKey& key);
// The part of `value` that is outside the key's range or choices, as text; empty when all fits.
std::string complaint(const SettingKey& key, const SettingValue& value);

class Schema {
 public:
  // Each adds a key. Error{internal} when the path is taken, or when a default does not fit its own key (at load or
  // describe).
  SettingKey& integer(std::string path, std::string doc);
  SettingKey& number(std::string path, std::string doc);
  SettingKey& flag(std::string path, std::string doc);
  SettingKey& text(std::string path, std::string doc);
  SettingKey& integers(std::string path, std::string doc);
  SettingKey& numbers(std::string path, std::string doc);
  SettingKey& texts(std::string path, std::string doc);
  Schema& table_array(std::string path,
                      std::string doc);  // keys relative to one table; may be absent; no arrays of tables within

  const SettingKey* find(std::string_view path) const;
  const std::vector<std::unique_ptr<SettingKey>>& keys() const { return keys_; }  // in order of declaration
  // The known key with the smallest edit distance to `path`, or empty when none is near.
  std::string nearest(std::string_view path) const;
  // A table for people: key, type, default, meaning. `markdown`: as a Markdown table for the documentation.
  std::string describe(bool markdown = false) const;

 private:
  SettingKey& add(std::string path, SettingType type, std::string doc);
  std::vector<std::unique_ptr<SettingKey>> keys_;
};

class Settings {
 public:
  // overrides: "a.b=VALUE" where VALUE is TOML, or a bare word for a text; they are applied in order, after the file.
  // "tasks[0].weight=2" reaches into an array of tables. Throws Error{not_found, io, invalid_argument}.
  static Settings load(const std::filesystem::path& path, const Schema& schema,
                       const std::vector<std::string>& overrides = {});
  // `name` stands for the file in messages.
  static Settings parse(std::string_view toml, const std::string& name, const Schema& schema,
                        const std::vector<std::string>& overrides = {});

  // Values by key. A key that is not in the schema, or of another type, is Error{internal}.
  std::int64_t integer(std::string_view path) const;
  double number(std::string_view path) const;
  bool flag(std::string_view path) const;
  const std::string& text(std::string_view path) const;
  const std::vector<std::int64_t>& integers(std::string_view path) const;
  const std::vector<double>& numbers(std::string_view path) const;
  const std::vector<std::string>& texts(std::string_view path) const;
  const std::vector<Settings>& tables(std::string_view path) const;
  // Whether the recipe or an override gave the key (else the default stands).
  bool given(std::string_view path) const;

  // The recipe as run: every key with its value, in order of declaration. Reading it back gives the same settings and
  // the same text.
  std::string resolved_toml() const;

 private:
  friend class SettingsReader;
  struct Entry {
    SettingKey key;
    SettingValue value;
    std::vector<Settings> tables;
    bool given = false;
  };
  std::string flat_toml() const;  // of one table of an array: dotted keys
  const Entry& entry(std::string_view path, SettingType type) const;
  std::vector<Entry> entries_;  // in order of declaration
};

}  // namespace tidelock

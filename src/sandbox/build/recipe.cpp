#include "sandbox/build/recipe.hpp"

#include <algorithm>
#include <cctype>

#include "base/error.hpp"

namespace tidelock::sandbox {
namespace {

using Kind = BuildStep::Kind;
constexpr std::size_t kMaxRecipe = 1U << 20;

bool is_space(char c) {
  return c == ' ' || c == '\t';
}

std::string trimmed(std::string_view text) {
  while (!text.empty() && is_space(text.front())) {
    text.remove_prefix(1);
  }
  while (!text.empty() && (is_space(text.back()) || text.back() == '\r')) {
    text.remove_suffix(1);
  }
  return std::string(text);
}

// Words, split at blanks; quotes keep blanks together, a backslash takes the next character as it is.
std::vector<std::string> words_of(std::string_view text, const std::string& where) {
  std::vector<std::string> out;
  std::string word;
  char quote = 0;
  bool open = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quote == 0 && is_space(c)) {
      if (open) {
        out.push_back(word);
      }
      word.clear(), open = false;
      continue;
    }
    open = true;
    if (c == '\\' && quote != '\'' && i + 1 < text.size()) {
      word += text[++i];
    } else if (quote == 0 && (c == '"' || c == '\'')) {
      quote = c;
    } else if (c == quote) {
      quote = 0;
    } else {
      word += c;
    }
  }
  if (quote != 0) {
    fail(ErrorCode::invalid_argument, "{}: a quote that is not closed", where);
  }
  if (open) {
    out.push_back(word);
  }
  return out;
}

BuildStep env_step(const std::string& rest, const std::string& where) {
  BuildStep out{Kind::env, {}};
  for (const std::string& word : words_of(rest, where)) {
    const std::size_t equals = word.find('=');
    if (equals == std::string::npos) {
      fail(ErrorCode::invalid_argument, "{}: ENV: expected NAME=VALUE, found '{}'", where, word);
    }
    out.arguments.push_back(word.substr(0, equals));
    out.arguments.push_back(word.substr(equals + 1));
  }
  return out;
}

// Several sources are as many steps: each is cached for itself.
void add_copies(BuildRecipe& recipe, const std::string& rest, const std::string& where) {
  const std::vector<std::string> words = words_of(rest, where);
  if (words.size() < 2) {
    fail(ErrorCode::invalid_argument, "{}: COPY: expected at least one source and a destination", where);
  }
  if (words.front().starts_with("--")) {
    fail(ErrorCode::invalid_argument, "{}: COPY {}: options are not known here; use USER before it", where,
         words.front());
  }
  std::string to = words.back();
  if (words.size() > 2 && !to.ends_with('/')) {
    to += '/';
  }
  for (std::size_t i = 0; i + 1 < words.size(); ++i) {
    recipe.steps.push_back({Kind::copy, {words[i], to}});
  }
}

void add_line(BuildRecipe& recipe, const std::string& line, const std::string& where) {
  const std::size_t blank = std::min(line.find_first_of(" \t"), line.size());
  std::string word = line.substr(0, blank);
  const std::string rest = trimmed(std::string_view(line).substr(blank));
  std::transform(word.begin(), word.end(), word.begin(), [](unsigned char c) { return std::toupper(c); });
  if (rest.empty()) {
    fail(ErrorCode::invalid_argument, "{}: {} of what? nothing follows it", where, word);
  }
  const bool has_from = !recipe.image.empty() || !recipe.snapshot.empty();
  if (word == "FROM") {
    if (has_from) {
      fail(ErrorCode::invalid_argument, "{}: a second FROM; one image is built at a time", where);
    }
    const std::string named = "template:";
    (rest.starts_with(named) ? recipe.snapshot : recipe.image) =
        rest.starts_with(named) ? rest.substr(named.size()) : rest;
    return;
  }
  if (!has_from) {
    fail(ErrorCode::invalid_argument, "{}: expected FROM first, found {}", where, word);
  }
  if (word == "START" || word == "READY") {
    std::string& command = word == "START" ? recipe.start : recipe.ready;
    if (!command.empty()) {
      fail(ErrorCode::invalid_argument, "{}: a second {}", where, word);
    }
    command = rest;
    return;
  }
  if (word == "COPY") {
    return add_copies(recipe, rest, where);
  }
  if (word == "ENV") {
    recipe.steps.push_back(env_step(rest, where));
  } else if (word == "RUN" || word == "WORKDIR" || word == "USER") {
    recipe.steps.push_back({word == "RUN" ? Kind::run : word == "USER" ? Kind::user : Kind::workdir, {rest}});
  } else {
    fail(ErrorCode::invalid_argument,
         "{}: '{}' is not known; expected FROM, ENV, WORKDIR, USER, COPY, RUN, START or READY", where,
         word.substr(0, 40));
  }
}

}  // namespace

BuildRecipe parse_recipe(std::string_view text, const std::string& name) {
  if (text.size() > kMaxRecipe || text.find('\0') != std::string_view::npos) {
    fail(ErrorCode::invalid_argument, "{}: a recipe of up to {} bytes without zero bytes was expected", name,
         kMaxRecipe);
  }
  BuildRecipe out;
  std::string line;
  int number = 0, first = 0;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string part = trimmed(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
    ++number;
    if (part.starts_with('#') || (line.empty() && part.empty())) {
      continue;
    }
    first = line.empty() ? number : first;
    line += part;
    if (line.ends_with('\\') && !text.empty()) {
      line.back() = ' ';
      continue;
    }
    const std::string where = fmt::format("{}: line {}", name, first);
    const std::size_t before = out.steps.size();
    add_line(out, trimmed(line), where);
    for (std::size_t i = before; i < out.steps.size(); ++i) {
      try {
        check_step(out.steps[i]);
      } catch (const Error& error) {
        fail(ErrorCode::invalid_argument, "{}: {}", where, error.what());
      }
    }
    line.clear();
  }
  if (out.image.empty() && out.snapshot.empty()) {
    fail(ErrorCode::invalid_argument, "{}: no FROM in it", name);
  }
  if (!out.ready.empty() && out.start.empty()) {
    fail(ErrorCode::invalid_argument, "{}: READY without START", name);
  }
  return out;
}

namespace {

void need_user(const std::string& name) {
  if (name != "root" && name != "user") {
    fail(ErrorCode::invalid_argument, "user '{}': commands run as root or as user (uid 1000)", name.substr(0, 100));
  }
}

void need_source(const std::string& source) {
  const bool out = source.starts_with('/') || source == ".." || source.starts_with("../") || source.ends_with("/..") ||
                   source.find("/../") != std::string::npos;
  if (source.empty() || out || source.starts_with('-')) {
    fail(ErrorCode::invalid_argument, "COPY '{}': expected a path below the folder of the recipe", source);
  }
}

}  // namespace

void check_step(const BuildStep& step) {
  const std::vector<std::string>& given = step.arguments;
  for (const std::string& text : given) {
    if (text.find('\0') != std::string::npos) {
      fail(ErrorCode::invalid_argument, "a step with a zero byte in it");
    }
  }
  const auto need = [&](bool fits, const char* expected) {
    if (!fits) {
      fail(ErrorCode::invalid_argument, "a step with {} arguments; expected {}", given.size(), expected);
    }
  };
  switch (step.kind) {
    case Kind::run:
      need(!given.empty() && given.size() <= 2 && !given[0].empty(), "RUN with a command, and a user or none");
      break;
    case Kind::copy:
      need(given.size() >= 2 && given.size() <= 4 && !given[1].empty(), "COPY with a source and a destination");
      need_source(given[0]);
      if (given.size() == 4 && !given[3].empty() &&
          (given[3].size() > 4 || given[3].find_first_not_of("01234567") != std::string::npos)) {
        fail(ErrorCode::invalid_argument, "COPY with the mode '{}'; expected octal digits", given[3].substr(0, 40));
      }
      break;
    case Kind::env:
      need(!given.empty() && given.size() % 2 == 0, "ENV with names and values");
      for (std::size_t i = 0; i < given.size(); i += 2) {
        if (given[i].empty() || given[i].find('=') != std::string::npos) {
          fail(ErrorCode::invalid_argument, "ENV: '{}' is not a name", given[i].substr(0, 100));
        }
      }
      break;
    case Kind::workdir:
      need(given.size() == 1 && !given[0].empty(), "WORKDIR with a path");
      break;
    case Kind::user:
      need(given.size() == 1, "USER with a name");
      need_user(given[0]);
      break;
  }
  const std::size_t user = step.kind == Kind::run ? 1 : 2;
  if ((step.kind == Kind::run || step.kind == Kind::copy) && given.size() > user && !given[user].empty()) {
    need_user(given[user]);
  }
}

std::string describe(const BuildStep& step) {
  static constexpr const char* kNames[] = {"RUN", "COPY", "ENV", "WORKDIR", "USER"};
  std::string out = kNames[static_cast<int>(step.kind)];
  for (const std::string& argument : step.arguments) {
    out += argument.empty() ? "" : " " + argument;
  }
  return out.size() > 300 ? out.substr(0, 300) + "..." : out;
}

std::string resolve_path(const std::string& directory, const std::string& path) {
  const std::string full = path.starts_with('/') ? path : directory + "/" + path;
  std::vector<std::string> parts;
  for (std::size_t at = 0; at < full.size();) {
    const std::size_t end = std::min(full.find('/', at), full.size());
    const std::string part = full.substr(at, end - at);
    at = end + 1;
    if (part == ".." && !parts.empty()) {
      parts.pop_back();
    } else if (!part.empty() && part != "." && part != "..") {
      parts.push_back(part);
    }
  }
  std::string out;
  for (const std::string& part : parts) {
    out += "/" + part;
  }
  return out.empty() ? "/" : out;
}

Defaults after_step(Defaults defaults, const BuildStep& step) {
  if (step.kind == Kind::env) {
    for (std::size_t i = 0; i + 1 < step.arguments.size(); i += 2) {
      defaults.environment[step.arguments[i]] = step.arguments[i + 1];
    }
  } else if (step.kind == Kind::workdir) {
    defaults.directory = resolve_path(defaults.working_directory(), step.arguments[0]);
  } else if (step.kind == Kind::user) {
    defaults.root = step.arguments[0] == "root";
  }
  return defaults;
}

}  // namespace tidelock::sandbox

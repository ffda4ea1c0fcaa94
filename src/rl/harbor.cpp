#include "rl/harbor.hpp"

#include <fmt/format.h>
#include <toml++/toml.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>
#include <sstream>

#include "base/error.hpp"
#include "base/files.hpp"
#include "rl/harbor_dockerfile.hpp"
#include "rl/tool.hpp"

namespace tidelock::rl {
namespace {

constexpr std::uint64_t kTextLimit = 1 << 20;

// One table of task.toml. Every key must be read or passed over by name; done() refuses the rest.
class Table {
 public:
  Table(const std::string& file, const std::string& name, const toml::table* table)
      : file_(file), name_(name), table_(table) {}

  std::string where(std::string_view key) const {
    return name_.empty() ? fmt::format("{}: {}", file_, key) : fmt::format("{}: {}.{}", file_, name_, key);
  }
  const toml::node* take(const char* key) {
    known_.insert(key);
    return table_ == nullptr ? nullptr : table_->get(key);
  }
  void ignore(std::initializer_list<const char*> keys) { known_.insert(keys.begin(), keys.end()); }

  Table table(const char* key) {
    const toml::node* node = take(key);
    if (node != nullptr && !node->is_table()) fail(ErrorCode::corrupt_data, "{}: expected a table", where(key));
    return {file_, name_.empty() ? key : fmt::format("{}.{}", name_, key),
            node == nullptr ? nullptr : node->as_table()};
  }
  std::optional<double> number(const char* key) {
    const toml::node* node = take(key);
    if (node == nullptr) return std::nullopt;
    const auto value = node->value<double>();
    if (!value || !std::isfinite(*value) || *value <= 0)
      fail(ErrorCode::corrupt_data, "{}: expected a number above 0", where(key));
    return value;
  }
  std::optional<std::string> text(const char* key) {
    const toml::node* node = take(key);
    if (node == nullptr) return std::nullopt;
    if (!node->is_string()) fail(ErrorCode::corrupt_data, "{}: expected text", where(key));
    return node->as_string()->get();
  }
  // A key that is only accepted with a value that changes nothing here.
  void only(const char* key, std::initializer_list<const char*> harmless, const char* why) {
    const toml::node* node = take(key);
    if (node == nullptr) return;
    std::ostringstream shown;
    node->visit([&](const auto& v) { shown << v; });
    std::string value = shown.str();
    std::erase_if(value, [](char c) { return c == '\'' || c == '"'; });
    if (std::find(harmless.begin(), harmless.end(), value) == harmless.end())
      fail(ErrorCode::not_supported, "{} = {}: {}", where(key), value, why);
  }
  std::map<std::string, std::string> texts(const char* key) {
    std::map<std::string, std::string> result;
    const Table inner = table(key);
    if (inner.table_ == nullptr) return result;
    for (const auto& [name, node] : *inner.table_) {
      if (!node.is_string()) fail(ErrorCode::corrupt_data, "{}: expected text", inner.where(name.str()));
      const std::string value = node.as_string()->get();
      if (value.find("${") != std::string::npos)
        fail(ErrorCode::not_supported, "{} = {}: variables of the host are not passed on", inner.where(name.str()),
             value);
      result[std::string(name.str())] = value;
    }
    return result;
  }
  void done() const {
    if (table_ == nullptr) return;
    for (const auto& [key, node] : *table_)
      if (known_.count(key.str()) == 0) fail(ErrorCode::not_supported, "{} is not supported", where(key.str()));
  }

 private:
  std::string file_, name_;
  const toml::table* table_;
  std::set<std::string, std::less<>> known_;
};

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(std::min(seconds, 1e6) * 1000));
}

// "512M", "2G" of the first schema.
std::optional<std::uint64_t> old_size(Table& table, const char* key) {
  const auto text = table.text(key);
  if (!text) return std::nullopt;
  std::uint64_t value = 0;
  const char* last = text->data() + text->size();
  const auto parsed = std::from_chars(text->data(), last, value);
  const std::string unit(parsed.ptr, last);
  const int shift = unit == "K" ? 10 : unit == "M" ? 20 : unit == "G" ? 30 : -1;
  if (parsed.ec != std::errc() || shift < 0 || value == 0 || value > (1ULL << 20))
    fail(ErrorCode::corrupt_data, "{} = {}: expected a size such as 512M or 2G", table.where(key), *text);
  return value << shift;
}

std::uint64_t megabytes(double value) {
  return static_cast<std::uint64_t>(std::min(value, 1e9) * 1048576.0);
}

void read_environment(Table table, Episode& episode, std::optional<std::string>& image) {
  table.ignore({"build_timeout_sec"});  // nothing is built
  image = table.text("docker_image");
  if (const auto cpus = table.number("cpus")) episode.limits.cpus = *cpus;
  if (const auto bytes = old_size(table, "memory")) episode.limits.memory_bytes = *bytes;
  if (const auto bytes = old_size(table, "storage")) episode.limits.disk_bytes = *bytes;
  if (const auto size = table.number("memory_mb")) episode.limits.memory_bytes = megabytes(*size);
  if (const auto size = table.number("storage_mb")) episode.limits.disk_bytes = megabytes(*size);
  table.only("allow_internet", {"false"}, "a sandbox has no network");
  table.only("network_mode", {"none", "no-network"}, "a sandbox has no network");
  table.only("gpus", {"0"}, "a sandbox has no GPU");
  table.only("os", {"linux"}, "a sandbox is Linux");
  for (const auto& [name, value] : table.texts("env")) episode.environment[name] = value;
  table.done();
}

void read_verifier(Table table, Episode& episode) {
  if (const auto timeout = table.number("timeout_sec")) episode.verifier.timeout = milliseconds(*timeout);
  episode.verifier.environment = table.texts("env");
  table.only("user", {}, "commands run as the sandbox's own user");
  table.only("environment_mode", {"shared"}, "the verifier runs in the agent's sandbox");
  table.done();
}

void read_agent(Table table, Episode& episode) {
  if (const auto timeout = table.number("timeout_sec")) {
    episode.agent_timeout = milliseconds(*timeout);
    episode.command_timeout = std::min(episode.agent_timeout, std::chrono::milliseconds(60'000));
  }
  table.only("user", {}, "commands run as the sandbox's own user");
  table.only("network_mode", {"none", "no-network"}, "a sandbox has no network");
  table.done();
}

void read_task_toml(const std::filesystem::path& path, Episode& episode, std::optional<std::string>& image) {
  toml::table root;
  try {
    root = toml::parse(read_file(path, kTextLimit), path.string());
  } catch (const toml::parse_error& error) {
    fail(ErrorCode::corrupt_data, "{}:{}: not valid TOML: {}", path.string(), error.source().begin.line,
         error.description());
  }
  Table top(path.string(), "", &root);
  for (const char* key : {"version", "schema_version"})
    if (const auto version = top.text(key); version && *version != "1.0" && *version != "1.1")
      fail(ErrorCode::not_supported, "{} is {}, expected 1.0 or 1.1", top.where(key), *version);
  top.ignore({"task", "metadata", "solution", "source"});  // what they say does not change the episode
  read_environment(top.table("environment"), episode, image);
  read_verifier(top.table("verifier"), episode);
  read_agent(top.table("agent"), episode);
  top.done();
}

void read_image(const std::filesystem::path& directory, const HarborOptions& options, std::string name,
                Episode& episode) {
  const auto context = directory / "environment";
  for (const char* file : {"docker-compose.yaml", "docker-compose.yml", "Dockerfile.dockerignore", ".dockerignore"})
    if (std::filesystem::exists(context / file))
      fail(ErrorCode::not_supported, "{} is not supported", (context / file).string());
  const auto path = context / "Dockerfile";
  const bool prebuilt = !name.empty();  // docker_image: the Dockerfile is how that image was built
  if (!prebuilt && std::filesystem::exists(path)) {
    Dockerfile dockerfile = read_dockerfile(path);
    name = dockerfile.image;
    episode.files = std::move(dockerfile.files);
    episode.directory = dockerfile.directory;
    for (const auto& [key, value] : episode.environment) dockerfile.environment[key] = value;
    episode.environment = std::move(dockerfile.environment);
  }
  if (name.empty() || name == "busybox" || name.starts_with("busybox:")) {
    if (const auto mapped = options.images.find(name); mapped != options.images.end()) episode.image = mapped->second;
    return;
  }
  const auto mapped = options.images.find(name);
  if (mapped == options.images.end())
    throw Error(ErrorCode::not_supported, fmt::format("{}: the image {} is not known here", directory.string(), name),
                fmt::format("Unpack it into a directory and map it: images = [\"{}=DIRECTORY\"].", name));
  episode.image = mapped->second;
}

void read_tests(const std::filesystem::path& directory, Episode& episode) {
  const auto script = directory / "tests" / "test.sh";
  if (!std::filesystem::is_regular_file(script))
    fail(ErrorCode::not_found, "{} is missing: a task needs its verifier", script.string());
  episode.verifier.files = read_tree(directory / "tests", "/tests");
  for (SandboxFile& file : episode.verifier.files) {
    if (file.path != "/tests/test.sh") continue;
    file.mode |= 0755;
    const std::string first = file.content.substr(0, file.content.find('\n'));
    const std::string interpreter = first.substr(first.find_last_of("/ ") + 1);
    const bool shell = !first.starts_with("#!") || interpreter == "sh" || interpreter == "ash";
    if (episode.image == "busybox" && !shell)
      fail(ErrorCode::not_supported, "{} asks for {}, which the built-in image does not have", script.string(), first);
  }
  episode.verifier.command = {"/tests/test.sh"};
  episode.verifier.directory = episode.directory;
  for (const auto& [key, value] : episode.environment) episode.verifier.environment.try_emplace(key, value);
}

class HarborFamily : public TaskFamily {
 public:
  HarborFamily(const std::filesystem::path& directory, const HarborOptions& options)
      : directory_(directory), episodes_(load_harbor_tasks(directory, options)) {}
  std::string name() const override { return "harbor"; }

  Episode make(std::uint64_t seed, double /*difficulty*/, Split split) const override {
    std::vector<const Episode*> side;
    for (const Episode& episode : episodes_)
      if (split_of(episode.key) == split) side.push_back(&episode);
    if (side.empty())
      throw Error(ErrorCode::not_found,
                  fmt::format("{}: none of its {} tasks is {}", directory_.string(), episodes_.size(),
                              split == Split::train ? "for training" : "held out"),
                  "A task is held out when sha256(\"harbor:NAME\") is 0 modulo 5; add tasks or rename one.");
    Random random(seed);
    return *side[random.below(static_cast<std::uint32_t>(side.size()))];
  }

  std::vector<DemoTurn> demonstrate(const Episode& episode, Random& /*random*/, const Skill& /*skill*/) const override {
    fail(ErrorCode::not_supported, "task {}: Harbor tasks have no demonstrations", episode.id);
  }

 private:
  std::filesystem::path directory_;
  std::vector<Episode> episodes_;
};

}  // namespace

Episode load_harbor_task(const std::filesystem::path& directory, const HarborOptions& options) {
  const auto file = [&](const char* name) { return directory / name; };
  if (std::filesystem::exists(file("task.yaml")))
    fail(ErrorCode::not_supported, "{}: a Terminal-Bench task (task.yaml); convert it to Harbor's task.toml",
         directory.string());
  if (std::filesystem::exists(file("steps")))
    fail(ErrorCode::not_supported, "{}: tasks of several steps are not supported", file("steps").string());
  Episode episode;
  episode.id = std::filesystem::absolute(directory).lexically_normal().filename().string();
  if (episode.id.empty())  // a trailing slash
    episode.id = std::filesystem::absolute(directory).lexically_normal().parent_path().filename().string();
  episode.family = "harbor";
  episode.key = fmt::format("harbor:{}", episode.id);
  std::optional<std::string> image;
  read_task_toml(file("task.toml"), episode, image);
  read_image(directory, options, image.value_or(""), episode);
  read_tests(directory, episode);
  model::Message message;
  message.role = "user";
  message.content = read_file(file("instruction.md"), kTextLimit);
  while (!message.content.empty() && message.content.back() == '\n') message.content.pop_back();
  if (message.content.empty()) fail(ErrorCode::corrupt_data, "{} is empty", file("instruction.md").string());
  episode.messages.push_back(std::move(message));
  episode.tools = {shell_tool()};
  return episode;
}

std::vector<Episode> load_harbor_tasks(const std::filesystem::path& directory, const HarborOptions& options) {
  if (!std::filesystem::is_directory(directory)) fail(ErrorCode::not_found, "{} is no folder", directory.string());
  std::vector<std::filesystem::path> folders;
  for (const auto& entry : std::filesystem::directory_iterator(directory))
    if (entry.is_directory() &&
        (std::filesystem::exists(entry.path() / "task.toml") || std::filesystem::exists(entry.path() / "task.yaml")))
      folders.push_back(entry.path());
  if (folders.empty()) fail(ErrorCode::not_found, "{}: no folder with a task.toml in it", directory.string());
  std::sort(folders.begin(), folders.end());
  std::vector<Episode> episodes;
  episodes.reserve(folders.size());
  for (const auto& folder : folders) episodes.push_back(load_harbor_task(folder, options));
  return episodes;
}

std::unique_ptr<TaskFamily> make_harbor_family(const std::filesystem::path& directory, const HarborOptions& options) {
  return std::make_unique<HarborFamily>(directory, options);
}

}  // namespace tidelock::rl

#include "rl/task.hpp"

#include <fmt/format.h>

#include "base/error.hpp"
#include "base/files.hpp"
#include "rl/tasks_builtin.hpp"

namespace tidelock::rl {

Split split_of(std::string_view key) {
  // The remainder of the 256-bit number, digit by digit.
  int remainder = 0;
  for (const char digit : sha256_hex(key))
    remainder = (remainder * 16 + (digit <= '9' ? digit - '0' : digit - 'a' + 10)) % 5;
  return remainder == 0 ? Split::held_out : Split::train;
}

Skill Skill::perfect() {
  return {.use_tool = 1, .wrong_command = 0, .wrong_copy = 0, .stop_early = 0, .separate_calls = 0.5, .tool_sum = 1};
}

std::vector<std::string> builtin_families() {
  return {"calc", "vault", "shell"};
}

std::unique_ptr<TaskFamily> make_family(std::string_view name) {
  if (name == "calc") return make_calc_family();
  if (name == "vault") return make_vault_family();
  if (name == "shell") return make_shell_family();
  fail(ErrorCode::invalid_argument, "task family \"{}\" is not known; known are {}", name,
       fmt::join(builtin_families(), ", "));
}

void TaskMixture::add(std::unique_ptr<TaskFamily> family, double difficulty, double weight) {
  if (!(weight > 0) || weight > 1e6)
    fail(ErrorCode::invalid_argument, "task family {}: the weight is {}, expected a number above 0", family->name(),
         weight);
  entries_.push_back({std::move(family), difficulty, weight});
}

Episode TaskMixture::make(std::uint64_t seed, Split split) const {
  if (entries_.empty()) fail(ErrorCode::invalid_argument, "a mixture of no task families");
  double total = 0;
  for (const Entry& entry : entries_) total += entry.weight;
  Random random(seed);
  double left = double{random.uniform()} * total;
  const Entry* chosen = &entries_.back();
  for (const Entry& entry : entries_) {
    if (left < entry.weight) {
      chosen = &entry;
      break;
    }
    left -= entry.weight;
  }
  return chosen->family->make(random.next_u64(), chosen->difficulty, split);
}

const TaskFamily& TaskMixture::family_of(const Episode& episode) const {
  for (const Entry& entry : entries_)
    if (entry.family->name() == episode.family) return *entry.family;
  fail(ErrorCode::internal, "no family {} in the mixture made episode {}", episode.family, episode.id);
}

namespace {

// Commands may not create directories everywhere; files that are written from outside bring theirs along.
void make_directory(sandbox::Sandbox& box, const std::string& directory) {
  const auto run = [&](const std::vector<std::string>& argv) {
    sandbox::ExecRequest request;
    request.argv = argv;
    request.directory = std::string("/");
    return box.exec(request).exit_code == 0;
  };
  if (run({"test", "-d", directory})) return;
  const std::string file = directory + "/.tidelock";
  box.write_file(file, "");
  if (!run({"rm", file})) fail(ErrorCode::io, "sandbox {}: cannot use the directory {}", box.id(), directory);
}

}  // namespace

std::unique_ptr<sandbox::Sandbox> open_sandbox(sandbox::Runtime& runtime, const Episode& episode) {
  for (const SandboxFile& file : episode.files)
    for (const char* closed : {"/tests", "/solution", "/logs"})
      if (file.path == closed || file.path.starts_with(std::string(closed) + "/"))
        fail(ErrorCode::internal, "episode {} would show the agent {}", episode.id, file.path);
  sandbox::Spec spec;
  spec.image = episode.image;
  spec.limits = episode.limits;
  auto box = runtime.create(spec);
  for (const SandboxFile& file : episode.files) box->write_file(file.path, file.content, file.mode);
  if (episode.directory != Episode().directory && episode.directory != "/") make_directory(*box, episode.directory);
  return box;
}

}  // namespace tidelock::rl

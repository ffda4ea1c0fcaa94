// shell: a hidden file of unknown name among others in /data. Looking (ls -A) and reading (cat) are two calls.
#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "base/error.hpp"
#include "rl/tasks_builtin.hpp"

namespace tidelock::rl {
namespace {

constexpr int kNameDigits = 3, kContentDigits = 2;

std::string draw_name(Random& random) {
  std::string name;
  for (int i = 0; i < kNameDigits; ++i) name += static_cast<char>('0' + random.between(0, 9));
  return name;
}

// The names in /data as `ls -A` prints them: sorted by bytes, so the hidden one comes first.
std::vector<std::string> listing(const Episode& episode) {
  std::vector<std::string> names;
  for (const SandboxFile& file : episode.files) names.push_back(file.path.substr(std::string_view("/data/").size()));
  std::sort(names.begin(), names.end());
  return names;
}

class ShellFamily : public TaskFamily {
 public:
  std::string name() const override { return "shell"; }

  Episode make(std::uint64_t seed, double difficulty, Split split) const override {
    check_difficulty("shell", difficulty, 6);
    return make_builtin("shell", seed, difficulty, split, [&](Random& random, Episode& episode) {
      const auto files = 1 + 2 * static_cast<std::size_t>(draw_level(random, difficulty));
      std::set<std::string> names;
      const std::string hidden = fmt::format(".{}", draw_name(random));
      while (names.size() + 1 < files) names.insert(draw_name(random));
      const std::int64_t content = draw_number(random, kContentDigits);
      episode.files.push_back({fmt::format("/data/{}", hidden), fmt::format("{}\n", content)});
      for (const std::string& name : names)
        episode.files.push_back(
            {fmt::format("/data/{}", name), fmt::format("{}\n", draw_number(random, kContentDigits))});
      episode.key = fmt::format("shell:{}={}", hidden, content);
      ask(episode, "hidden?");
      episode.reference_answer = fmt::format("{}", content);
    });
  }

  std::vector<DemoTurn> demonstrate(const Episode& episode, Random& random, const Skill& skill) const override {
    const std::string guess = with_wrong_digit(random, episode.reference_answer);
    if (!chance(random, skill.use_tool)) return {{guess, {}, {}}};
    const std::vector<std::string> names = listing(episode);
    std::vector<DemoTurn> turns{{{}, "ls -A /data", fmt::format("{}", fmt::join(names, "\n"))}};
    if (chance(random, skill.stop_early)) {
      turns.push_back({guess, {}, {}});
      return turns;
    }
    const bool wrong = chance(random, skill.wrong_command);
    const std::size_t which = wrong ? 1 + random.below(static_cast<std::uint32_t>(names.size() - 1)) : 0;
    const std::string path = fmt::format("/data/{}", names.at(which));
    const std::string content = shown_file(episode, path);
    turns.push_back({{}, fmt::format("cat {}", path), content});
    turns.push_back(final_answer(random, skill, content));
    return turns;
  }
};

}  // namespace

std::unique_ptr<TaskFamily> make_shell_family() {
  return std::make_unique<ShellFamily>();
}

}  // namespace tidelock::rl

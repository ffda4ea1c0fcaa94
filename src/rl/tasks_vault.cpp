// vault: two numbers that exist only in this episode's sandbox, and their sum. Without the tool the best guess is right
// in under one case of ten.
#include <fmt/format.h>

#include "base/error.hpp"
#include "rl/tasks_builtin.hpp"

namespace tidelock::rl {
namespace {

constexpr int kFiles = 6;  // a .. f

std::string path_of(char letter) {
  return fmt::format("/vault/{}", letter);
}

class VaultFamily : public TaskFamily {
 public:
  std::string name() const override { return "vault"; }

  Episode make(std::uint64_t seed, double difficulty, Split split) const override {
    check_difficulty("vault", difficulty, 4);
    return make_builtin("vault", seed, difficulty, split, [&](Random& random, Episode& episode) {
      const int level = draw_level(random, difficulty);
      std::array<std::int64_t, kFiles> values{};
      for (int i = 0; i < kFiles; ++i) {
        // One digit each would let "10" be right once in ten; up to 19 it is 19 of 361.
        auto& value = values.at(static_cast<std::size_t>(i));
        value = level == 1 ? random.between(1, 19) : draw_number(random, level);
        episode.files.push_back({path_of(static_cast<char>('a' + i)), fmt::format("{}\n", value)});
      }
      const int first = random.between(0, kFiles - 1);
      const int second = (first + random.between(1, kFiles - 1)) % kFiles;
      const auto value = [&](int i) { return values.at(static_cast<std::size_t>(i)); };
      const int low = std::min(first, second), high = std::max(first, second);
      episode.key = fmt::format("vault:{}={}+{}={}", static_cast<char>('a' + low), value(low),
                                static_cast<char>('a' + high), value(high));
      ask(episode, fmt::format("{}+{}?", static_cast<char>('a' + first), static_cast<char>('a' + second)));
      episode.reference_answer = fmt::format("{}", value(first) + value(second));
    });
  }

  std::vector<DemoTurn> demonstrate(const Episode& episode, Random& random, const Skill& skill) const override {
    const std::string& asked = question(episode);
    const std::string guess = with_wrong_digit(random, episode.reference_answer);
    if (!chance(random, skill.use_tool)) return {{guess, {}, {}}};
    std::array<char, 2> letters{asked.at(0), asked.at(2)};
    if (chance(random, skill.wrong_command)) {
      char& one = letters.at(random.below(2));
      one = static_cast<char>('a' + (one - 'a' + random.between(1, kFiles - 1)) % kFiles);
    }
    const std::string first = shown_file(episode, path_of(letters[0]));
    const std::string second = shown_file(episode, path_of(letters[1]));
    std::vector<DemoTurn> turns;
    if (chance(random, skill.separate_calls)) {
      turns.push_back({{}, fmt::format("cat {}", path_of(letters[0])), first});
      if (chance(random, skill.stop_early)) {
        turns.push_back({guess, {}, {}});
        return turns;
      }
      turns.push_back({{}, fmt::format("cat {}", path_of(letters[1])), second});
    } else {
      turns.push_back({{},
                       fmt::format("cat {} {}", path_of(letters[0]), path_of(letters[1])),
                       fmt::format("{}\n{}", first, second)});
    }
    const std::string sum = fmt::format("{}", std::stoll(first) + std::stoll(second));
    if (chance(random, skill.tool_sum)) turns.push_back({{}, fmt::format("echo $(({}+{}))", first, second), sum});
    turns.push_back(final_answer(random, skill, sum));
    return turns;
  }
};

}  // namespace

std::unique_ptr<TaskFamily> make_vault_family() {
  return std::make_unique<VaultFamily>();
}

}  // namespace tidelock::rl

// calc: a product that a small model cannot do in its head; the shell can.
#include <fmt/format.h>

#include <charconv>

#include "base/error.hpp"
#include "rl/tasks_builtin.hpp"

namespace tidelock::rl {
namespace {

std::int64_t parse_number(std::string_view text) {
  std::int64_t value = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value);
  if (parsed.ec != std::errc() || parsed.ptr != text.data() + text.size())
    fail(ErrorCode::internal, "calc: \"{}\" is no number", text);
  return value;
}

class CalcFamily : public TaskFamily {
 public:
  std::string name() const override { return "calc"; }

  Episode make(std::uint64_t seed, double difficulty, Split split) const override {
    check_difficulty("calc", difficulty, 6);
    return make_builtin("calc", seed, difficulty, split, [&](Random& random, Episode& episode) {
      const int digits = draw_level(random, difficulty);
      const std::int64_t a = draw_number(random, digits), b = draw_number(random, digits);
      episode.key = fmt::format("calc:{}*{}", std::min(a, b), std::max(a, b));
      ask(episode, fmt::format("{}*{}?", a, b));
      episode.reference_answer = fmt::format("{}", a * b);
    });
  }

  std::vector<DemoTurn> demonstrate(const Episode& episode, Random& random, const Skill& skill) const override {
    const std::string& asked = question(episode);
    const std::size_t star = asked.find('*');
    std::string a = asked.substr(0, star), b = asked.substr(star + 1, asked.size() - star - 2);
    if (!chance(random, skill.use_tool)) return {{with_wrong_digit(random, episode.reference_answer), {}, {}}};
    if (chance(random, skill.wrong_command)) {
      std::string& one = random.below(2) == 0 ? a : b;
      one = with_wrong_digit(random, one);
    }
    const std::string product = fmt::format("{}", parse_number(a) * parse_number(b));
    return {{{}, fmt::format("echo $(({}*{}))", a, b), product}, final_answer(random, skill, product)};
  }
};

}  // namespace

std::unique_ptr<TaskFamily> make_calc_family() {
  return std::make_unique<CalcFamily>();
}

}  // namespace tidelock::rl

#include "rl/tasks_builtin.hpp"

#include <algorithm>
#include <cmath>

#include "base/error.hpp"
#include "base/files.hpp"
#include "rl/tool.hpp"

namespace tidelock::rl {
namespace {

constexpr int kDraws = 2000;  // with one key in five held out, missing either side this often means that it is empty

// Shell built-ins only: grading costs one process. Lines are joined, so a right line among others is not an answer.
Verifier compare_answer(const std::string& expected) {
  const bool digits =
      !expected.empty() && std::all_of(expected.begin(), expected.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (!digits) fail(ErrorCode::internal, "the reference answer \"{}\" is not a number", expected);
  Verifier verifier;
  verifier.files = {{"/tests/test.sh", fmt::format("a=\n"
                                                   "while read -r l || [ -n \"$l\" ]; do a=\"$a $l\"; done"
                                                   " </logs/agent/answer.txt\n"
                                                   "[ \"$a\" = \" {}\" ] && r=1 || r=0\n"
                                                   "echo $r >/logs/verifier/reward.txt\n",
                                                   expected)}};
  verifier.command = {"sh", "/tests/test.sh"};
  return verifier;
}

}  // namespace

Episode make_builtin(std::string_view family, std::uint64_t seed, double difficulty, Split split,
                     const DrawContent& draw) {
  for (int i = 0; i < kDraws; ++i) {
    Random random(seed, static_cast<std::uint64_t>(i));
    Episode episode;
    draw(random, episode);
    if (split_of(episode.key) != split) continue;
    episode.id = fmt::format("{}-{}-{:016x}", family, difficulty, seed);
    episode.family = family;
    episode.tools = {shell_tool()};
    episode.verifier = compare_answer(episode.reference_answer);
    return episode;
  }
  fail(ErrorCode::not_found, "task family {} has no {} episode at difficulty {}", family,
       split == Split::train ? "training" : "held-out", difficulty);
}

void check_difficulty(std::string_view family, double difficulty, int most) {
  if (!(difficulty >= 1 && difficulty <= most))
    fail(ErrorCode::invalid_argument, "task family {}: the difficulty is {}, expected 1..{}", family, difficulty, most);
}

int draw_level(Random& random, double difficulty) {
  const double floor = std::floor(difficulty);
  return static_cast<int>(floor) + (chance(random, difficulty - floor) ? 1 : 0);
}

std::int64_t draw_number(Random& random, int digits) {
  std::int64_t low = 1;
  for (int i = 1; i < digits; ++i) low *= 10;
  return low + random.below(static_cast<std::uint32_t>(9 * low));
}

bool chance(Random& random, double probability) {
  return double{random.uniform()} < probability;
}

std::string with_wrong_digit(Random& random, const std::string& number) {
  std::string wrong = number;
  char& digit = wrong[random.below(static_cast<std::uint32_t>(wrong.size()))];
  // A first digit stays away from 0, so that the length stays.
  const bool first = &digit == wrong.data() && wrong.size() > 1;
  char other = digit;
  while (other == digit) other = static_cast<char>('0' + random.between(first ? 1 : 0, 9));
  digit = other;
  return wrong;
}

void ask(Episode& episode, std::string text) {
  model::Message message;
  message.role = "user";
  message.content = std::move(text);
  episode.messages.push_back(std::move(message));
}

const std::string& question(const Episode& episode) {
  if (episode.messages.empty() || episode.messages.back().role != "user")
    fail(ErrorCode::internal, "episode {} asks nothing", episode.id);
  return episode.messages.back().content;
}

std::string shown_file(const Episode& episode, std::string_view path) {
  for (const SandboxFile& file : episode.files)
    if (file.path == path) return file.content.substr(0, file.content.find_last_not_of('\n') + 1);
  fail(ErrorCode::internal, "episode {} has no file {}", episode.id, path);
}

DemoTurn final_answer(Random& random, const Skill& skill, const std::string& right) {
  return {.answer = chance(random, skill.wrong_copy) ? with_wrong_digit(random, right) : right,
          .command = {},
          .output = {}};
}

}  // namespace tidelock::rl

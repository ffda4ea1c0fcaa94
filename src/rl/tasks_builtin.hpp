// What the built-in families share. Private to rl/.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "rl/task.hpp"

namespace tidelock::rl {

std::unique_ptr<TaskFamily> make_calc_family();
std::unique_ptr<TaskFamily> make_vault_family();
std::unique_ptr<TaskFamily> make_shell_family();

// Fills in key, messages, files and reference_answer of an episode from random numbers.
using DrawContent = std::function<void(Random&, Episode&)>;

// Draws until the key belongs to `split`, then adds what all built-in episodes have: id, tool, verifier.
Episode make_builtin(std::string_view family, std::uint64_t seed, double difficulty, Split split,
                     const DrawContent& draw);

// Error{invalid_argument} when difficulty is outside 1..most.
void check_difficulty(std::string_view family, double difficulty, int most);
// floor(difficulty), or one more with the probability of the fraction.
int draw_level(Random& random, double difficulty);
// Uniform with exactly `digits` digits, the first not 0.
std::int64_t draw_number(Random& random, int digits);
bool chance(Random& random, double probability);
// `number` with one of its digits changed: always another number, of as many digits.
std::string with_wrong_digit(Random& random, const std::string& number);

// Adds the user's message; question() is its text.
void ask(Episode& episode, std::string text);
const std::string& question(const Episode& episode);
// The content of one of its files, as `cat` shows it (without the final newline).
std::string shown_file(const Episode& episode, std::string_view path);
// The final answer: `right`, or with skill.wrong_copy a digit changed.
DemoTurn final_answer(Random& random, const Skill& skill, const std::string& right);

}  // namespace tidelock::rl

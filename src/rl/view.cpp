#include "rl/view.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "rl/view_draw.hpp"

namespace tidelock::rl {
namespace {

using namespace draw;

constexpr int kPlotRows = 8;
constexpr int kAxis = 6;         // columns left of the plot: " 1.0 ┤"
constexpr int kSideWidth = 46;   // of the panel to the right of the plot
constexpr int kTwoColumns = 96;  // from this width on, the panel stands beside the plot
constexpr int kLabel = 12;       // columns of the labels of the lower part

using Lines = std::vector<std::string>;

std::string label(const Pen& pen, std::string_view text) {
  return pad(fmt::format(" {}", pen(kDim, text)), kLabel);
}

Lines title(const ViewState& s, int width, const Pen& pen) {
  const std::string left = fmt::format(" {}  {}", pen(kBold, "tidelock rl"), pen(kCyan, plain(s.run)));
  const std::string right =
      fmt::format("{} ", pen(kDim, fmt::format("{} · {} · seed {}", plain(s.model), s.loss, s.seed)));
  Lines lines{spread(left, right, width)};

  const double done = s.steps > 0 ? static_cast<double>(s.step) / static_cast<double>(s.steps) : 0;
  std::string times = duration(s.elapsed_s);
  if (s.step > 0 && s.step < s.steps)
    times += fmt::format(" · {} left",
                         duration(s.elapsed_s / static_cast<double>(s.step) * static_cast<double>(s.steps - s.step)));
  const std::string count = fmt::format(" step {}/{} ", pen(kBold, fmt::format("{}", s.step)), s.steps);
  std::string phase;
  if (s.step < s.steps && !s.phase.empty())
    phase = pen(kDim, fmt::format("{} {} ", s.phase, percent(s.phase_fraction)));
  const int room = width - display_width(count) - display_width(times) - std::max(display_width(phase), 14) - 5;
  std::string progress = count;
  if (room >= 8) {
    const int full = static_cast<int>(std::lround(done * room));
    progress += pen(kGreen, repeat("━", full)) + pen(kDim, repeat("─", room - full));
  }
  progress += fmt::format("  {}", times);
  lines.push_back(spread(progress, phase, width));
  return lines;
}

// The curve of rewards over all steps of the run, with the evaluations as points.
Lines reward_plot(const ViewState& s, int width, const Pen& pen) {
  const int columns = width - kAxis - 1;
  Plot plot(columns, kPlotRows);
  const auto last = static_cast<double>(std::max<std::int64_t>({s.steps, std::ssize(s.rewards), 1}));
  const auto x_of = [&](double step) { return static_cast<int>(std::lround(step / last * (plot.width() - 1))); };
  const auto y_of = [&](double reward) {
    return static_cast<int>(std::lround(std::clamp(reward, 0.0, 1.0) * (plot.height() - 1)));
  };
  for (std::size_t i = 0; i < s.rewards.size(); ++i) {
    const int x = x_of(static_cast<double>(i + 1)), y = y_of(s.rewards[i]);
    if (i == 0)
      plot.dot(x, y);
    else
      plot.line(x_of(static_cast<double>(i)), y_of(s.rewards[i - 1]), x, y);
  }
  const auto place = [&](int row, int column) {
    return static_cast<std::size_t>(row) * static_cast<std::size_t>(columns) + static_cast<std::size_t>(column);
  };
  std::vector<std::string> points(place(kPlotRows, 0));
  for (const ViewEvaluation& evaluation : s.evaluations) {
    const int column = std::clamp(x_of(static_cast<double>(evaluation.step)) / 2, 0, columns - 1);
    const int row = (plot.height() - 1 - y_of(evaluation.result.mean_at_k.value)) / 4;
    points.at(place(row, column)) = pen(kYellow, "●");
  }
  Lines lines;
  for (int row = 0; row < kPlotRows; ++row) {
    std::string line = row == 0               ? "  1.0 ┤"
                       : row == kPlotRows / 2 ? "  0.5 ┤"
                       : row == kPlotRows - 1 ? "  0.0 ┤"
                                              : "      │";
    line = pen(kDim, line);
    std::string run;  // neighbouring cells of the curve share one colour sequence
    for (int column = 0; column < columns; ++column) {
      const std::string& point = points.at(place(row, column));
      if (point.empty()) {
        run += plot.cell(column, row);
        continue;
      }
      line += pen(kCyan, run) + point;
      run.clear();
    }
    lines.push_back(line + pen(kCyan, run));
  }
  lines.push_back(pen(kDim, fmt::format("      ╰{}", repeat("─", columns))));
  std::string legend = pad("", kAxis + 1) + pen(kCyan, "⠤⠒") + pen(kDim, " reward of the step ");
  if (!s.rewards.empty()) legend += pen(kBold, fmt::format("{:.2f}", s.rewards.back()));
  if (!s.evaluations.empty())
    legend += fmt::format("  {}", pen(kYellow, "●")) +
              pen(kDim, fmt::format(" held-out mean@{}", s.evaluations.back().result.k));
  lines.push_back(clip(legend, width));
  return lines;
}

std::string estimate(const Estimate& e, const Pen& pen, const char* code) {
  return fmt::format("{} {}", pen(code, fmt::format("{:.3f}", e.value)),
                     pen(kDim, fmt::format("[{:.2f} {:.2f}]", e.low, e.high)));
}

// The number that matters most, in a box.
Lines mismatch_box(const ViewState& s, const Pen& pen) {
  const bool clean = s.mismatch_tokens == 0;
  const char* code = s.compared_tokens == 0 ? kDim : clean ? kGreen : kRed;
  const std::string number = s.compared_tokens == 0 ? "–" : grouped(s.mismatch_tokens);
  const int inner = display_width(number) + 4;
  const std::string of = s.compared_tokens == 0
                             ? "no sampled tokens compared yet"
                             : fmt::format("of {} sampled tokens differ", grouped(s.compared_tokens));
  const std::string what = s.compared_tokens == 0 ? ""
                           : clean                ? "rollout and trainer agree by bits"
                                                  : fmt::format("off by up to {:.1e}", s.mismatch_max_abs);
  const std::string edge = repeat("─", inner);
  return {fmt::format(" {}{}", pen(code, fmt::format("╭{}╮", edge)), pen(kDim, " mismatch")),
          fmt::format(" {} {}", pen(code, fmt::format("│  {}  │", number)), of),
          fmt::format(" {} {}", pen(code, fmt::format("╰{}╯", edge)), clean ? what : pen(kRed, what))};
}

Lines evaluation_table(const ViewState& s, int rows, const Pen& pen) {
  if (s.evaluations.empty()) return {fmt::format(" {}", pen(kDim, "held out: not evaluated yet"))};
  const Evaluation& last = s.evaluations.back().result;
  Lines lines{fmt::format(" {}", pen(kDim, fmt::format("{:<9} {:<18}{}", "held out", fmt::format("mean@{}", last.k),
                                                       fmt::format("pass@{}  n={}", last.k, last.n))))};
  const auto line = [&](const ViewEvaluation& e, const char* code) {
    return fmt::format(" {} {} {}", pad(fmt::format("step {}", e.step), 9), estimate(e.result.mean_at_k, pen, code),
                       estimate(e.result.pass_at_k, pen, code));
  };
  // The first and as many of the latest as fit.
  const auto count = static_cast<int>(s.evaluations.size());
  const int shown = std::min(count, std::max(rows - 1, 2));
  lines.push_back(line(s.evaluations.front(), count == 1 ? kBold : kDim));
  for (int i = count - shown + 1; i < count; ++i)
    lines.push_back(line(s.evaluations[static_cast<std::size_t>(i)], i + 1 == count ? kBold : kDim));
  return lines;
}

Lines time_lines(const ViewState& s, int width, const Pen& pen) {
  struct Part {
    const char *name, *glyph, *code;
    double seconds;
  };
  const std::array<Part, 4> parts{{{"rollout", "█", "36", s.rollout_s},
                                   {"sandbox", "▓", "35", s.sandbox_s},
                                   {"train", "▒", "33", s.train_s},
                                   {"other", "░", "2", s.other_s}}};
  std::vector<double> seconds;
  double sum = 0;
  for (const Part& part : parts) {
    seconds.push_back(part.seconds);
    sum += part.seconds;
  }
  std::string line = label(pen, "time"), legend = pad("", kLabel);
  if (!(sum > 0)) return {line + pen(kDim, "nothing finished yet")};
  const std::vector<int> cells = share(seconds, width - kLabel - 2);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    line += pen(parts.at(i).code, repeat(parts.at(i).glyph, cells[i]));
    legend += fmt::format("{} {} {}   ", pen(parts.at(i).code, parts.at(i).glyph), parts.at(i).name,
                          percent(parts.at(i).seconds / sum));
  }
  return {line, legend};
}

Lines rate_lines(const ViewState& s, int width, const Pen& pen) {
  const auto number = [&](double value) { return pen(kBold, grouped(static_cast<std::int64_t>(std::llround(value)))); };
  Lines lines{label(pen, "speed") + fmt::format("rollout {} tok/s   train {} tok/s", number(s.rollout_tokens_per_s),
                                                number(s.train_tokens_per_s))};
  const int cells = std::clamp((width - 70) / 2, 6, 16);
  const auto meter = [&](double fraction) { return pen(kCyan, bar(fraction, cells)) + pen(kDim, "▏"); };
  lines.push_back(label(pen, "sandboxes") +
                  fmt::format("wait for the model {} {}   frozen {} {}", meter(s.sandbox_wait_fraction),
                              percent(s.sandbox_wait_fraction), meter(s.sandbox_frozen_fraction),
                              percent(s.sandbox_frozen_fraction)));
  lines.push_back(label(pen, "learning") + fmt::format("{} tool calls a trajectory   {} of groups teach   weights v{}",
                                                       pen(kBold, fmt::format("{:.2f}", s.tool_rate)),
                                                       pen(kBold, percent(s.alive_fraction)), s.weight_version));
  return lines;
}

Lines sample_lines(const ViewState& s, int width, const Pen& pen) {
  if (s.sample.question.empty()) return {};
  Lines lines{label(pen, "sample") + plain(s.sample.question)};
  constexpr std::size_t kCalls = 3;
  for (std::size_t i = 0; i < s.sample.calls.size() && i < kCalls; ++i) {
    const auto& [command, output] = s.sample.calls[i];
    lines.push_back(pad("", kLabel) + pen(kCyan, fmt::format("$ {}", plain(command))) + pen(kDim, "  → ") +
                    plain(output));
  }
  if (s.sample.calls.size() > kCalls)
    lines.push_back(pad("", kLabel) + pen(kDim, fmt::format("… {} more calls", s.sample.calls.size() - kCalls)));
  const bool right = s.sample.reward >= 1;
  const std::string verdict = pen(right                 ? kGreen
                                  : s.sample.reward > 0 ? kYellow
                                                        : kRed,
                                  fmt::format("{} reward {:g}", right ? "✓" : "✗", s.sample.reward));
  const int room = width - kLabel - display_width(verdict) - 3;
  lines.push_back(pad("", kLabel) + clip(pen(kBold, plain(s.sample.answer)), room) + "  " + verdict);
  return lines;
}

}  // namespace

std::vector<std::string> render(const ViewState& state, int width, bool color) {
  width = std::clamp(width, 60, 200);
  const Pen pen{color};
  Lines lines = title(state, width, pen);
  const auto append = [&](const Lines& more) { lines.insert(lines.end(), more.begin(), more.end()); };
  const std::string gap;
  lines.push_back(gap);
  if (width >= kTwoColumns) {
    const int left_width = width - kSideWidth - 2;
    const Lines plot = reward_plot(state, left_width, pen);
    Lines side = mismatch_box(state, pen);
    side.push_back(gap);
    const Lines table = evaluation_table(state, static_cast<int>(plot.size() - side.size()), pen);
    side.insert(side.end(), table.begin(), table.end());
    for (std::size_t i = 0; i < std::max(plot.size(), side.size()); ++i)
      lines.push_back(pad(i < plot.size() ? plot[i] : "", left_width + 2) + (i < side.size() ? side[i] : ""));
  } else {
    append(reward_plot(state, width - 1, pen));
    lines.push_back(gap);
    append(mismatch_box(state, pen));
    append(evaluation_table(state, 4, pen));
  }
  lines.push_back(gap);
  append(time_lines(state, width, pen));
  append(rate_lines(state, width, pen));
  if (!state.sample.question.empty()) lines.push_back(gap);
  append(sample_lines(state, width, pen));
  for (std::string& line : lines) line = clip(line, width);
  return lines;
}

std::string plain_line(const ViewState& s) {
  std::string line = fmt::format("step {}/{}", s.step, s.steps);
  if (!s.rewards.empty()) line += fmt::format("  reward {:.3f}", s.rewards.back());
  line += fmt::format("  mismatch {} of {}", s.mismatch_tokens, s.compared_tokens);
  line += fmt::format("  tools {:.2f}  alive {:.2f}  rollout {:.0f} tok/s  train {:.0f} tok/s  wait {:.2f}  {}",
                      s.tool_rate, s.alive_fraction, s.rollout_tokens_per_s, s.train_tokens_per_s,
                      s.sandbox_wait_fraction, duration(s.elapsed_s));
  if (!s.evaluations.empty() && s.evaluations.back().step == s.step) {
    const Evaluation& e = s.evaluations.back().result;
    line += fmt::format("  held-out mean@{} {:.3f} [{:.3f} {:.3f}] pass@{} {:.3f} [{:.3f} {:.3f}] n {}", e.k,
                        e.mean_at_k.value, e.mean_at_k.low, e.mean_at_k.high, e.k, e.pass_at_k.value, e.pass_at_k.low,
                        e.pass_at_k.high, e.n);
  }
  return line;
}

}  // namespace tidelock::rl

#include "rl/view_draw.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>

#include "rl/view.hpp"

namespace tidelock::rl {

int display_width(std::string_view text) {
  int width = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\x1b') {
      while (i < text.size() && text[i] != 'm') ++i;
    } else if ((static_cast<unsigned char>(text[i]) & 0xC0) != 0x80) {
      ++width;
    }
  }
  return width;
}

namespace draw {
namespace {

std::string encode(std::uint32_t point) {
  std::string out;
  if (point < 0x80) {
    out += static_cast<char>(point);
  } else if (point < 0x800) {
    out += static_cast<char>(0xC0 | point >> 6);
    out += static_cast<char>(0x80 | (point & 0x3F));
  } else {
    out += static_cast<char>(0xE0 | point >> 12);
    out += static_cast<char>(0x80 | (point >> 6 & 0x3F));
    out += static_cast<char>(0x80 | (point & 0x3F));
  }
  return out;
}

// One code point of `text` at i, which moves on; what is not UTF-8 is U+FFFD.
std::uint32_t decode(std::string_view text, std::size_t& i) {
  const auto lead = static_cast<unsigned char>(text[i++]);
  if (lead < 0x80) return lead;
  const int more = lead >= 0xF0 ? 3 : lead >= 0xE0 ? 2 : lead >= 0xC2 ? 1 : 0;
  std::uint32_t point = lead & (0x3FU >> more);
  for (int k = 0; k < more; ++k) {
    if (i >= text.size() || (static_cast<unsigned char>(text[i]) & 0xC0) != 0x80) return 0xFFFD;
    point = point << 6 | (static_cast<unsigned char>(text[i++]) & 0x3FU);
  }
  return more == 0 ? 0xFFFD : point;
}

}  // namespace

std::string Pen::operator()(const char* code, std::string_view text) const {
  if (!color || text.empty()) return std::string(text);
  return fmt::format("\x1b[{}m{}\x1b[0m", code, text);
}

std::string repeat(std::string_view text, int count) {
  std::string out;
  for (int i = 0; i < count; ++i) out += text;
  return out;
}

std::string pad(std::string text, int width) {
  const int missing = width - display_width(text);
  if (missing > 0) text.append(static_cast<std::size_t>(missing), ' ');
  return text;
}

std::string clip(const std::string& text, int width) {
  if (display_width(text) <= width) return text;
  std::string out;
  bool styled = false;
  int used = 0;
  for (std::size_t i = 0; i < text.size();) {
    if (text[i] == '\x1b') {
      const std::size_t end = text.find('m', i);
      out += text.substr(i, end - i + 1);
      styled = true;
      i = end == std::string::npos ? text.size() : end + 1;
      continue;
    }
    const std::size_t start = i++;
    while (i < text.size() && (static_cast<unsigned char>(text[i]) & 0xC0) == 0x80) ++i;
    if (++used > width - 1) break;
    out += text.substr(start, i - start);
  }
  out += "…";
  if (styled) out += "\x1b[0m";
  return out;
}

std::string spread(const std::string& left, const std::string& right, int width) {
  const int room = width - display_width(left) - display_width(right);
  if (room < 1) return clip(left, width);
  return left + repeat(" ", room) + right;
}

std::string grouped(std::int64_t value) {
  std::string digits = fmt::format("{}", value);
  const std::size_t first = digits.starts_with('-') ? 1 : 0;
  for (std::size_t i = digits.size(); i > first + 3;) {
    i -= 3;
    digits.insert(i, 1, ',');
  }
  return digits;
}

std::string duration(double seconds) {
  const auto s = static_cast<std::int64_t>(std::llround(std::clamp(seconds, 0.0, 3.6e7)));
  if (s < 60) return fmt::format("{}s", s);
  if (s < 3600) return fmt::format("{}m {:02}s", s / 60, s % 60);
  return fmt::format("{}h {:02}m", s / 3600, s / 60 % 60);
}

std::string percent(double fraction) {
  return fmt::format("{:.0f} %", 100 * std::clamp(fraction, 0.0, 1.0));
}

std::string bar(double fraction, int width) {
  static constexpr std::array<const char*, 8> kEighths{"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
  const int eighths = static_cast<int>(std::lround(std::clamp(fraction, 0.0, 1.0) * width * 8));
  std::string out = repeat("█", eighths / 8);
  out += kEighths.at(static_cast<std::size_t>(eighths % 8));
  return pad(out, width);
}

std::vector<int> share(const std::vector<double>& parts, int width) {
  double sum = 0;
  for (const double part : parts) sum += std::max(part, 0.0);
  std::vector<int> cells(parts.size(), 0);
  if (!(sum > 0)) return cells;
  std::vector<std::pair<double, std::size_t>> remainders;
  int used = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const double exact = std::max(parts[i], 0.0) / sum * width;
    cells[i] = static_cast<int>(exact);
    used += cells[i];
    remainders.emplace_back(exact - cells[i], parts.size() - i);  // ties to the first part
  }
  std::sort(remainders.rbegin(), remainders.rend());
  for (std::size_t k = 0; used < width && k < remainders.size(); ++k, ++used)
    ++cells[parts.size() - remainders[k].second];
  return cells;
}

std::string plain(std::string_view text) {
  while (!text.empty() && text.back() == '\n') text.remove_suffix(1);
  std::string out;
  for (std::size_t i = 0; i < text.size();) {
    const std::uint32_t point = decode(text, i);
    if (point == '\n')
      out += " ⏎ ";
    else if (point < 0x20 || (point >= 0x7F && point < 0xA0))
      out += ' ';
    else if ((point >= 0x300 && point < 0x370) || point >= 0x590)
      out += "·";
    else
      out += encode(point);
  }
  return out;
}

Plot::Plot(int columns, int rows)
    : columns_(columns), rows_(rows), cells_(static_cast<std::size_t>(columns) * static_cast<std::size_t>(rows), 0) {}

void Plot::dot(int x, int y) {
  if (x < 0 || y < 0 || x >= width() || y >= height()) return;
  // Bits of U+2800: the left column is 1 2 4 40h from the top, the right one 8 10h 20h 80h.
  static constexpr std::array<std::array<std::uint8_t, 2>, 4> kBits{
      {{0x01, 0x08}, {0x02, 0x10}, {0x04, 0x20}, {0x40, 0x80}}};
  const int down = height() - 1 - y;
  cells_[index(x / 2, down / 4)] |= kBits.at(static_cast<std::size_t>(down % 4)).at(static_cast<std::size_t>(x % 2));
}

void Plot::line(int x0, int y0, int x1, int y1) {
  const int steps = std::max({std::abs(x1 - x0), std::abs(y1 - y0), 1});
  for (int i = 0; i <= steps; ++i) {
    const double t = static_cast<double>(i) / steps;
    dot(static_cast<int>(std::lround(x0 + t * (x1 - x0))), static_cast<int>(std::lround(y0 + t * (y1 - y0))));
  }
}

std::string Plot::cell(int column, int row) const {
  const std::uint8_t bits = cells_[index(column, row)];
  return bits == 0 ? " " : encode(0x2800U + bits);
}

}  // namespace draw
}  // namespace tidelock::rl

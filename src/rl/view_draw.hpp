// Drawing with characters: styled text, bars, a braille plot. Private to rl/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tidelock::rl::draw {

// SGR codes. The 16 basic colours: they follow the person's own terminal theme.
inline constexpr const char* kBold = "1";
inline constexpr const char* kDim = "2";
inline constexpr const char* kGreen = "1;32";
inline constexpr const char* kRed = "1;31";
inline constexpr const char* kYellow = "1;33";
inline constexpr const char* kCyan = "36";

struct Pen {
  bool color = false;
  std::string operator()(const char* code, std::string_view text) const;
};

std::string repeat(std::string_view text, int count);  // empty for count <= 0
std::string pad(std::string text, int width);          // with spaces on the right
std::string clip(const std::string& text, int width);  // to columns, SGR sequences kept whole and closed
// `left`, spaces, `right`, together `width` columns; `right` is dropped when there is no room.
std::string spread(const std::string& left, const std::string& right, int width);

// 12345 -> "12,345"
std::string grouped(std::int64_t value);
// 75.2 -> "1m 15s"
std::string duration(double seconds);
std::string percent(double fraction);

// A bar of `width` cells filled to `fraction`, in eighths of a cell.
std::string bar(double fraction, int width);

// How `width` cells are shared among parts, largest remainders first, so that the cells add up to `width`.
std::vector<int> share(const std::vector<double>& parts, int width);

// Untrusted text on one line: control characters become spaces (a new line becomes a mark), code points that terminals
// may draw with another width than one become a dot. No escape sequence survives.
std::string plain(std::string_view text);

// A canvas of braille dots: columns * 2 by rows * 4.
class Plot {
 public:
  Plot(int columns, int rows);
  int width() const { return columns_ * 2; }
  int height() const { return rows_ * 4; }
  void dot(int x, int y);  // y upward from 0; outside is ignored
  void line(int x0, int y0, int x1, int y1);
  std::string cell(int column, int row) const;  // row downward from 0

 private:
  std::size_t index(int column, int row) const {
    return static_cast<std::size_t>(row) * static_cast<std::size_t>(columns_) + static_cast<std::size_t>(column);
  }
  int columns_, rows_;
  std::vector<std::uint8_t> cells_;
};

}  // namespace tidelock::rl::draw

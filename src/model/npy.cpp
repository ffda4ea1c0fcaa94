#include "model/npy.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

#include "base/error.hpp"
#include "base/files.hpp"
#include "model/json.hpp"

namespace tidelock::model {
namespace {

static_assert(std::endian::native == std::endian::little, "arrays are little-endian and copied as they are");

constexpr std::string_view magic = "\x93NUMPY";
constexpr std::size_t alignment = 64;

// The header: a Python dictionary of exactly three keys, as NumPy writes it,
//   {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }
class HeaderReader {
 public:
  HeaderReader(std::string file, std::string_view text) : file_(std::move(file)), text_(text) {}

  void read(std::string& descr, bool& fortran_order, std::vector<std::int64_t>& shape) {
    int seen_descr = 0, seen_order = 0, seen_shape = 0;
    expect('{');
    while (!accept('}')) {
      const std::string key = string();
      expect(':');
      if (key == "descr" && seen_descr++ == 0) {
        descr = string();
      } else if (key == "fortran_order" && seen_order++ == 0) {
        fortran_order = boolean();
      } else if (key == "shape" && seen_shape++ == 0) {
        shape = tuple();
      } else {
        wrong(fmt::format("key {} is unknown or stands twice", json_quote(key)));
      }
      if (!accept(',')) {
        expect('}');
        break;
      }
    }
    skip_space();
    if (at_ != text_.size()) wrong("text after the dictionary");
    if (seen_descr + seen_order + seen_shape != 3) wrong("descr, fortran_order or shape is missing");
  }

 private:
  [[noreturn]] void wrong(const std::string& why) const {
    fail(ErrorCode::corrupt_data, "{}: .npy header, byte {}: {}", file_, at_, why);
  }
  void skip_space() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n')) ++at_;
  }
  bool accept(char c) {
    skip_space();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  void expect(char c) {
    if (!accept(c)) wrong(fmt::format("expected '{}'", c));
  }
  bool accept_word(std::string_view word) {
    skip_space();
    if (!text_.substr(at_).starts_with(word)) return false;
    at_ += word.size();
    return true;
  }
  std::string string() {
    skip_space();
    const char quote = at_ < text_.size() ? text_[at_] : '\0';
    if (quote != '\'' && quote != '"') wrong("expected a string");
    const std::size_t end = text_.find(quote, at_ + 1);
    if (end == std::string_view::npos) wrong("a string without an end");
    std::string value(text_.substr(at_ + 1, end - at_ - 1));
    at_ = end + 1;
    return value;
  }
  bool boolean() {
    if (accept_word("True")) return true;
    if (accept_word("False")) return false;
    wrong("expected True or False");
  }
  std::vector<std::int64_t> tuple() {
    std::vector<std::int64_t> values;
    expect('(');
    while (!accept(')')) {
      skip_space();
      std::int64_t value = 0;
      const auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), value);
      if (error != std::errc() || value < 0) wrong("expected a dimension");
      at_ = static_cast<std::size_t>(end - text_.data());
      values.push_back(value);
      if (!accept(',')) {
        expect(')');
        break;
      }
    }
    return values;
  }

  std::string file_;
  std::string_view text_;
  std::size_t at_ = 0;
};

std::optional<std::size_t> npy_elements(std::span<const std::int64_t> shape) {
  std::int64_t count = 1;
  for (const std::int64_t dimension : shape)
    if (dimension < 0 || __builtin_mul_overflow(count, dimension, &count)) return std::nullopt;
  return static_cast<std::size_t>(count);
}

// Where the header's text starts and ends.
std::pair<std::size_t, std::size_t> header_range(const std::string& file, std::string_view content) {
  if (!content.starts_with(magic) || content.size() < 10)
    fail(ErrorCode::corrupt_data, "{}: not a .npy file: it does not start with \\x93NUMPY and a version", file);
  const int version = static_cast<unsigned char>(content[6]);
  if (version < 1 || version > 3)
    fail(ErrorCode::not_supported, "{}: .npy format version {}, expected 1 to 3", file, version);
  const std::size_t width = version == 1 ? 2 : 4;  // bytes of the length
  if (content.size() < 8 + width) fail(ErrorCode::corrupt_data, "{}: truncated .npy header", file);
  std::uint32_t length = 0;
  std::memcpy(&length, content.data() + 8, width);
  if (length > content.size() - 8 - width)
    fail(ErrorCode::corrupt_data, "{}: .npy header of {} bytes in a file of {}", file, length, content.size());
  return {8 + width, 8 + width + length};
}

template <typename T>
std::vector<T> copy_values(const std::string& file, std::string_view data, std::span<const std::int64_t> shape) {
  const auto count = npy_elements(shape);
  // Compared by division: count * sizeof(T) might not fit.
  if (!count || data.size() % sizeof(T) != 0 || data.size() / sizeof(T) != *count)
    fail(ErrorCode::corrupt_data, "{}: shape ({}) with elements of {} bytes does not fit {} bytes of data", file,
         fmt::join(shape, ", "), sizeof(T), data.size());
  std::vector<T> values(*count);
  if (*count > 0) std::memcpy(values.data(), data.data(), data.size());
  return values;
}

NpyArray parse_npy(const std::string& file, std::string_view content) {
  const auto [begin, end] = header_range(file, content);
  std::string descr;
  bool fortran_order = false;
  NpyArray array;
  HeaderReader(file, content.substr(begin, end - begin)).read(descr, fortran_order, array.shape);
  if (fortran_order) fail(ErrorCode::not_supported, "{}: column-major order; save it with order='C'", file);
  const std::string_view data = content.substr(end);
  if (descr == "<f4") {
    array.values = copy_values<float>(file, data, array.shape);
  } else if (descr == "<i4") {
    array.values = copy_values<std::int32_t>(file, data, array.shape);
  } else if (descr == "<i8") {
    array.values = copy_values<std::int64_t>(file, data, array.shape);
  } else {
    fail(ErrorCode::not_supported, "{}: dtype {}, expected <f4, <i4 or <i8", file, json_quote(descr));
  }
  return array;
}

TokenId check_token(const std::string& file, std::int64_t value, std::size_t place) {
  if (value < 0 || value > std::numeric_limits<TokenId>::max())
    fail(ErrorCode::corrupt_data, "{}: token {} is {}, expected 0 to {}", file, place, value,
         std::numeric_limits<TokenId>::max());
  return static_cast<TokenId>(value);
}

std::vector<TokenId> array_tokens(const std::string& file, const NpyArray& array) {
  if (array.shape.size() != 1 || std::holds_alternative<std::vector<float>>(array.values))
    fail(ErrorCode::corrupt_data, "{}: shape ({}){}; tokens are one dimension of integers", file,
         fmt::join(array.shape, ", "), std::holds_alternative<std::vector<float>>(array.values) ? " of floats" : "");
  std::vector<TokenId> tokens;
  const auto append = [&](const auto& values) {
    for (const auto value : values)
      tokens.push_back(check_token(file, static_cast<std::int64_t>(value), tokens.size()));
  };
  if (const auto* narrow = std::get_if<std::vector<std::int32_t>>(&array.values)) append(*narrow);
  if (const auto* wide = std::get_if<std::vector<std::int64_t>>(&array.values)) append(*wide);
  return tokens;
}

std::vector<TokenId> text_tokens(const std::string& file, std::string_view text) {
  constexpr std::string_view space = " \t\r\n";
  std::vector<TokenId> tokens;
  for (std::size_t at = text.find_first_not_of(space); at != std::string_view::npos;
       at = text.find_first_not_of(space, at)) {
    const std::string_view word = text.substr(at, text.find_first_of(space, at) - at);
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
    if (error != std::errc() || end != word.data() + word.size())
      fail(ErrorCode::corrupt_data, "{}: {} is not a token id", file, json_quote(word.substr(0, 40)));
    tokens.push_back(check_token(file, value, tokens.size()));
    at += word.size();
  }
  return tokens;
}

}  // namespace

void write_npy(const std::filesystem::path& path, std::span<const float> values,
               const std::vector<std::int64_t>& shape) {
  // NumPy reads no more than 32 dimensions; this also keeps the header within its 16-bit length.
  if (shape.size() > 32 || npy_elements(shape) != values.size())
    fail(ErrorCode::invalid_argument, "{}: shape ({}) does not fit {} values", path.string(), fmt::join(shape, ", "),
         values.size());
  // A tuple of one has a comma behind it.
  std::string header = fmt::format("{{'descr': '<f4', 'fortran_order': False, 'shape': ({}{}), }}",
                                   fmt::join(shape, ", "), shape.size() == 1 ? "," : "");
  const std::size_t before = magic.size() + 4;
  header.resize((before + header.size() + 1 + alignment - 1) / alignment * alignment - before - 1, ' ');
  header += '\n';
  const auto length = static_cast<std::uint16_t>(header.size());
  AtomicFile file(path);
  file.write(magic);
  file.write(std::string_view("\x01\x00", 2));
  file.write(std::as_bytes(std::span(&length, 1)));
  file.write(header);
  file.write(std::as_bytes(values));
  file.commit();
}

NpyArray read_npy(const std::filesystem::path& path) {
  return parse_npy(path.string(), read_file(path));
}

std::vector<TokenId> read_tokens(const std::filesystem::path& path) {
  const std::string content = read_file(path);
  const std::string file = path.string();
  if (content.starts_with(magic)) return array_tokens(file, parse_npy(file, content));
  return text_tokens(file, content);
}

}  // namespace tidelock::model

// Tokenizers from the metadata of a GGUF file.
#include <unicode/utf8.h>

#include <algorithm>
#include <array>

#include "base/error.hpp"
#include "model/json.hpp"
#include "model/tokenizer_vocabulary.hpp"

namespace tidelock::model {
namespace {

// tokenizer.ggml.token_type
enum class TokenType : std::int32_t { normal = 1, unknown = 2, control = 3, user_defined = 4, unused = 5 };

bool is_special_type(std::int32_t type) {
  return type >= static_cast<std::int32_t>(TokenType::unknown) && type <= static_cast<std::int32_t>(TokenType::unused);
}

// GPT-2 writes each byte as one printable character: bytes that are printable in Latin-1 as themselves, the others in
// ascending order from U+0100 on. By character, the byte; -1 for characters that stand for none.
std::array<int, 512> make_byte_of_character() {
  std::array<int, 512> byte_of{};
  byte_of.fill(-1);
  int next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
    byte_of[static_cast<std::size_t>(printable ? byte : next++)] = byte;
  }
  return byte_of;
}

std::optional<std::string> to_bytes(std::string_view written) {
  static const std::array<int, 512> byte_of = make_byte_of_character();
  std::string bytes;
  const auto size = static_cast<std::int32_t>(written.size());
  for (std::int32_t at = 0; at < size;) {
    UChar32 c = 0;
    U8_NEXT(written.data(), at, size, c);
    if (c < 0 || c >= static_cast<UChar32>(byte_of.size()) || byte_of[static_cast<std::size_t>(c)] < 0)
      return std::nullopt;
    bytes.push_back(static_cast<char>(byte_of[static_cast<std::size_t>(c)]));
  }
  if (bytes.empty()) return std::nullopt;
  return bytes;
}

void check_header(const GgufVocabulary& v, const std::string& name) {
  if (v.model != "gpt2")
    throw Error(ErrorCode::not_supported,
                fmt::format("{}: tokenizer.ggml.model is {}, expected \"gpt2\" or \"none\"", name, json_quote(v.model)),
                "models of this family carry a byte-level BPE vocabulary");
  if (v.pre != "kimi-k2")
    fail(ErrorCode::not_supported, "{}: tokenizer.ggml.pre is {}, expected \"kimi-k2\": other rules cut text elsewhere",
         name, json_quote(v.pre));
  if (v.tokens.size() > static_cast<std::size_t>(INT32_MAX) || v.tokens.empty())
    fail(ErrorCode::corrupt_data, "{}: tokenizer.ggml.tokens holds {} tokens", name, v.tokens.size());
  if (v.types.size() != v.tokens.size())
    fail(ErrorCode::corrupt_data, "{}: tokenizer.ggml.token_type has {} entries for {} tokens", name, v.types.size(),
         v.tokens.size());
}

// The base tokens' number. They come first, without a gap; every special one stands behind them.
std::size_t count_base(const GgufVocabulary& v, const std::string& name) {
  const auto normal = static_cast<std::int32_t>(TokenType::normal);
  const auto base = static_cast<std::size_t>(
      std::find_if(v.types.begin(), v.types.end(), [&](std::int32_t type) { return type != normal; }) -
      v.types.begin());
  for (std::size_t id = base; id < v.types.size(); ++id)
    if (!is_special_type(v.types[id]))
      fail(ErrorCode::corrupt_data,
           "{}: token {} has type {} behind the special token {}: expected normal tokens (1) first, then only special "
           "ones (2 to 5)",
           name, id, v.types[id], base);
  return base;
}

// Text is merged by rank, which is the id. A list of merges must say the same: each makes a token of two, in the order
// of their ids.
template <typename Find>
void check_merges(const GgufVocabulary& v, const std::string& name, const Find& find) {
  std::int64_t last = -1;
  for (std::size_t i = 0; i < v.merges.size(); ++i) {
    const std::string& merge = v.merges[i];
    const std::size_t gap = merge.find(' ');
    const auto left = gap == std::string::npos ? std::nullopt : to_bytes(std::string_view(merge).substr(0, gap));
    const auto right = gap == std::string::npos ? std::nullopt : to_bytes(std::string_view(merge).substr(gap + 1));
    const auto made = left && right ? find(*left + *right) : std::nullopt;
    if (!made || !find(*left) || !find(*right))
      fail(ErrorCode::corrupt_data, "{}: merge {}, {}, is not two tokens that make a third", name, i,
           json_quote(merge.substr(0, 80)));
    if (*made <= last)
      fail(ErrorCode::not_supported,
           "{}: merge {} makes token {} after token {}: merges in another order than the tokens' ids are not supported",
           name, i, *made, last);
    last = *made;
  }
}

}  // namespace

Tokenizer Tokenizer::from_gguf(const GgufVocabulary& v, const std::string& name) {
  auto vocabulary = std::make_shared<Vocabulary>();
  vocabulary->name = name;
  if (v.model == "none") {
    if (v.size < 1 || v.size > INT32_MAX) fail(ErrorCode::corrupt_data, "{}: a vocabulary of {} tokens", name, v.size);
    vocabulary->ids_only = static_cast<std::int32_t>(v.size);
    return Tokenizer(std::move(vocabulary));
  }
  check_header(v, name);
  const std::size_t base = count_base(v, name);
  for (std::size_t id = 0; id < base; ++id) {
    auto bytes = to_bytes(v.tokens[id]);
    if (!bytes)
      fail(ErrorCode::corrupt_data, "{}: token {}, {}, is not written in GPT-2's characters for bytes", name, id,
           json_quote(v.tokens[id].substr(0, 80)));
    vocabulary->base.push_back(std::move(*bytes));
  }
  vocabulary->specials.assign(v.tokens.begin() + static_cast<std::ptrdiff_t>(base), v.tokens.end());
  for (std::size_t i = 0; i < vocabulary->specials.size(); ++i)
    if (vocabulary->specials[i].empty())
      fail(ErrorCode::corrupt_data, "{}: the special token {} has no name", name, base + i);
  vocabulary->index(name, name);
  check_merges(v, name, [&](const std::string& bytes) { return vocabulary->find(bytes); });
  return Tokenizer(std::move(vocabulary));
}

}  // namespace tidelock::model

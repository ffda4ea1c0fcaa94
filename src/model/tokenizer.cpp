#include "model/tokenizer.hpp"

#include <algorithm>
#include <charconv>
#include <queue>

#include "base/files.hpp"
#include "model/json.hpp"
#include "model/pretokenizer.hpp"
#include "model/tokenizer_vocabulary.hpp"

namespace tidelock::model {

namespace {

constexpr std::uint64_t max_vocabulary_bytes = std::uint64_t{64} << 20;
constexpr std::int64_t max_special_tokens = 65536;

// Strict: canonical alphabet, padding required, unused bits zero.
std::optional<std::string> decode_base64(std::string_view text) {
  constexpr std::string_view alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  if (text.empty() || text.size() % 4 != 0) return std::nullopt;
  const std::size_t padding = text.ends_with("==") ? 2 : text.ends_with('=') ? 1 : 0;
  std::string bytes;
  std::uint32_t bits = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool pad = i >= text.size() - padding;
    const std::size_t digit = pad ? 0 : alphabet.find(text[i]);
    if (digit == std::string_view::npos) return std::nullopt;
    bits = (bits << 6) | static_cast<std::uint32_t>(digit);
    if (i % 4 == 3) {
      for (const int shift : {16, 8, 0}) bytes.push_back(static_cast<char>((bits >> shift) & 0xFF));
      bits = 0;
    }
  }
  for (std::size_t i = 0; i < padding; ++i) {
    if (bytes.back() != '\0') return std::nullopt;
    bytes.pop_back();
  }
  return bytes;
}

std::optional<std::int64_t> parse_number(std::string_view text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size() || value < 0) return std::nullopt;
  return value;
}

// The lines of tiktoken.model as tokens by rank.
std::vector<std::string> read_ranks(const std::filesystem::path& path) {
  const std::string content = read_file(path, max_vocabulary_bytes);
  const auto lines = static_cast<std::size_t>(std::count(content.begin(), content.end(), '\n')) +
                     (content.empty() || content.back() == '\n' ? 0 : 1);
  std::vector<std::string> tokens(lines);
  std::size_t line = 0;
  for (std::size_t at = 0; at < content.size(); ++line) {
    const std::size_t end = std::min(content.find('\n', at), content.size());
    const std::string_view text = std::string_view(content).substr(at, end - at);
    at = end + 1;
    const std::size_t gap = text.find(' ');
    const auto bytes = gap == std::string_view::npos ? std::nullopt : decode_base64(text.substr(0, gap));
    const auto rank = gap == std::string_view::npos ? std::nullopt : parse_number(text.substr(gap + 1));
    if (!bytes || !rank)
      fail(ErrorCode::corrupt_data, "{}: line {}: expected \"BASE64 RANK\", found {}", path.string(), line + 1,
           json_quote(text.substr(0, 80)));
    // As many ranks as lines, each in range and none twice: then there is no gap.
    if (static_cast<std::uint64_t>(*rank) >= lines)
      fail(ErrorCode::corrupt_data, "{}: line {}: rank {} of {} tokens: the ranks have a gap", path.string(), line + 1,
           *rank, lines);
    std::string& place = tokens[static_cast<std::size_t>(*rank)];
    if (!place.empty())
      fail(ErrorCode::corrupt_data, "{}: line {}: rank {} stands twice", path.string(), line + 1, *rank);
    place = *bytes;
  }
  return tokens;
}

std::vector<std::string> all_bytes() {
  std::vector<std::string> tokens(256);
  for (std::size_t byte = 0; byte < 256; ++byte) tokens[byte] = std::string(1, static_cast<char>(byte));
  return tokens;
}

// What tokenizer_config.json says.
struct TokenizerConfig {
  bool byte_level = false;
  std::int64_t reserved = 0;                                // special ids, named or not; 0: as many as are named
  std::vector<std::pair<std::int64_t, std::string>> named;  // by id
};

TokenizerConfig read_config(const std::filesystem::path& path) {
  const Json document = read_json(path);
  if (!document.is_object()) fail(ErrorCode::corrupt_data, "{}: not a JSON object", path.string());
  TokenizerConfig config;
  const Json kind = document.value("tokenizer_class", Json(""));
  config.byte_level = kind == "byte";
  const Json reserved = document.value("num_reserved_special_tokens", Json(kind == "TikTokenTokenizer" ? 256 : 0));
  if (!reserved.is_number_integer() || reserved < 0 || reserved > max_special_tokens)
    fail(ErrorCode::corrupt_data, "{}: num_reserved_special_tokens is {}, expected 0 to {}", path.string(),
         reserved.dump(), max_special_tokens);
  config.reserved = reserved.get<std::int64_t>();
  const Json added = document.value("added_tokens_decoder", Json::object());
  if (!added.is_object()) fail(ErrorCode::corrupt_data, "{}: added_tokens_decoder is not an object", path.string());
  for (const auto& [key, entry] : added.items()) {
    const auto id = parse_number(key);
    const auto content = entry.is_object() ? entry.find("content") : entry.end();
    if (!id || !entry.is_object() || content == entry.end() || !content->is_string() ||
        content->get_ref<const std::string&>().empty())
      fail(ErrorCode::corrupt_data, "{}: added_tokens_decoder {}: expected ID: {{\"content\": NAME}}, found {}",
           path.string(), json_quote(key), entry.dump().substr(0, 80));
    config.named.emplace_back(*id, content->get<std::string>());
  }
  std::sort(config.named.begin(), config.named.end());
  return config;
}

// Names of the special ids from `first` on.
std::vector<std::string> place_specials(const TokenizerConfig& config, std::int64_t first, const std::string& path) {
  const auto named = static_cast<std::int64_t>(config.named.size());
  const std::int64_t count = config.reserved > 0 ? config.reserved : named;
  if (count > max_special_tokens)
    fail(ErrorCode::corrupt_data, "{}: {} special tokens, at most {} are accepted", path, count, max_special_tokens);
  std::vector<std::string> names(static_cast<std::size_t>(count));
  for (const auto& [id, name] : config.named) {
    if (id < first || id >= first + count)
      fail(ErrorCode::corrupt_data,
           "{}: special token {} has id {}; with {} base tokens and {} special ones, expected {} to {}", path,
           json_quote(name), id, first, count, first, first + count - 1);
    std::string& place = names[static_cast<std::size_t>(id - first)];
    if (!place.empty()) fail(ErrorCode::corrupt_data, "{}: special id {} stands twice", path, id);
    place = name;
  }
  for (std::size_t i = 0; i < names.size(); ++i)
    if (names[i].empty()) names[i] = fmt::format("<|reserved_token_{}|>", first + static_cast<std::int64_t>(i));
  return names;
}

// Merges pairs of neighbouring parts of one piece, lowest rank first and leftmost among equals, until none is left.
class PieceMerger {
 public:
  template <typename Find>
  void merge(std::string_view piece, const Find& find, std::vector<TokenId>& out) {
    const std::size_t size = piece.size();
    length_.assign(size, 1);
    previous_.resize(size);
    for (std::size_t i = 0; i < size; ++i) previous_[i] = i - 1;
    const auto offer = [&](std::size_t left) {
      const std::size_t right = left + length_[left];
      if (right >= size) return;
      const std::size_t bytes = length_[left] + length_[right];
      if (const auto rank = find(piece.substr(left, bytes))) queue_.push({*rank, left, bytes});
    };
    for (std::size_t i = 0; i + 1 < size; ++i) offer(i);
    while (!queue_.empty()) {
      const Pair pair = queue_.top();
      queue_.pop();
      // A pair that has changed since it was offered has other lengths. (Equal ones are the same bytes: same token.)
      const std::size_t right = pair.left + length_[pair.left];
      if (length_[pair.left] == 0 || right >= size || length_[pair.left] + length_[right] != pair.bytes) continue;
      length_[right] = 0;
      length_[pair.left] = pair.bytes;
      if (const std::size_t next = pair.left + pair.bytes; next < size) previous_[next] = pair.left;
      if (pair.left > 0) offer(previous_[pair.left]);
      offer(pair.left);
    }
    for (std::size_t i = 0; i < size; i += length_[i]) out.push_back(*find(piece.substr(i, length_[i])));
  }

 private:
  struct Pair {
    TokenId rank;
    std::size_t left, bytes;
    bool operator<(const Pair& other) const { return std::pair(rank, left) > std::pair(other.rank, other.left); }
  };
  std::vector<std::size_t> length_;    // of the part that starts here; 0 inside a part
  std::vector<std::size_t> previous_;  // where the part before starts; only for starts beyond 0
  std::priority_queue<Pair> queue_;    // empty between pieces
};

[[noreturn]] void refuse_text(const std::string& name) {
  throw Error(ErrorCode::not_supported,
              fmt::format("{} has no tokenizer: text cannot be turned into tokens or back", name),
              "give and take token ids");
}

}  // namespace

void Tokenizer::Vocabulary::index(const std::string& base_source, const std::string& special_source) {
  TokenId id = 0;
  for (const std::string& token : base) {
    if (!id_of_bytes.emplace(token, id).second)
      fail(ErrorCode::corrupt_data, "{}: the tokens of rank {} and {} are the same bytes", base_source,
           id_of_bytes.at(token), id);
    longest = std::max(longest, token.size());
    ++id;
  }
  for (const std::string& special : specials)
    if (!id_of_special.emplace(special, id++).second)
      fail(ErrorCode::corrupt_data, "{}: two special tokens are called {}", special_source, json_quote(special));
  for (std::size_t byte = 0; byte < 256; ++byte) {
    const auto found = find(std::string(1, static_cast<char>(byte)));
    if (!found) fail(ErrorCode::corrupt_data, "{}: byte {} has no token", base_source, byte);
    id_of_byte[byte] = *found;
  }
}

Tokenizer::Tokenizer(std::shared_ptr<const Vocabulary> vocabulary) : vocabulary_(std::move(vocabulary)) {}

Tokenizer Tokenizer::load(const std::filesystem::path& folder) {
  const auto config_path = folder / "tokenizer_config.json", ranks_path = folder / "tiktoken.model";
  const TokenizerConfig config = read_config(config_path);
  auto vocabulary = std::make_shared<Vocabulary>();
  vocabulary->name = folder.string();
  vocabulary->bytes_only = config.byte_level;
  vocabulary->base = config.byte_level ? all_bytes() : read_ranks(ranks_path);
  vocabulary->specials =
      place_specials(config, static_cast<std::int64_t>(vocabulary->base.size()), config_path.string());
  vocabulary->index(ranks_path.string(), config_path.string());
  return Tokenizer(std::move(vocabulary));
}

const std::string& Tokenizer::name() const {
  return vocabulary_->name;
}

bool Tokenizer::has_text() const {
  return vocabulary_->ids_only == 0;
}

std::vector<TokenId> Tokenizer::encode_text(std::string_view text) const {
  if (!has_text()) refuse_text(vocabulary_->name);
  std::vector<TokenId> tokens;
  tokens.reserve(text.size() / 3);
  if (vocabulary_->bytes_only) {
    for (const char byte : text) tokens.push_back(vocabulary_->id_of_byte[static_cast<unsigned char>(byte)]);
    return tokens;
  }
  PieceMerger merger;
  const auto find = [this](std::string_view bytes) { return vocabulary_->find(bytes); };
  for (const std::string_view piece : split_pieces(text)) {
    // A whole piece that is a token is taken even where merging by rank would not arrive at it.
    if (const auto whole = find(piece)) {
      tokens.push_back(*whole);
    } else {
      merger.merge(piece, find, tokens);
    }
  }
  return tokens;
}

std::optional<TokenId> Tokenizer::find_special(std::string_view name) const {
  const auto found = vocabulary_->id_of_special.find(name);
  return found == vocabulary_->id_of_special.end() ? std::nullopt : std::optional(found->second);
}

TokenId Tokenizer::special(std::string_view name) const {
  const auto found = find_special(name);
  if (!found) fail(ErrorCode::not_found, "the vocabulary of {} has no special token {}", vocabulary_->name, name);
  return *found;
}

void Tokenizer::check_range(TokenId token) const {
  if (token < 0 || token >= vocab_size())
    fail(ErrorCode::invalid_argument, "token {} is not in the vocabulary of {} tokens", token, vocab_size());
}

std::string_view Tokenizer::token_bytes(TokenId token) const {
  check_range(token);
  if (!has_text()) refuse_text(vocabulary_->name);
  const auto index = static_cast<std::size_t>(token);
  const std::size_t base = vocabulary_->base.size();
  return index < base ? vocabulary_->base[index] : vocabulary_->specials[index - base];
}

bool Tokenizer::is_special(TokenId token) const {
  check_range(token);
  return has_text() && static_cast<std::size_t>(token) >= vocabulary_->base.size();
}

std::string Tokenizer::decode(std::span<const TokenId> tokens) const {
  std::string text;
  for (const TokenId token : tokens) text += token_bytes(token);
  return text;
}

std::int32_t Tokenizer::vocab_size() const {
  return static_cast<std::int32_t>(vocabulary_->size());
}

}  // namespace tidelock::model

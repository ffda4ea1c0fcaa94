#include "model/gguf_vocabulary.hpp"

#include <algorithm>
#include <limits>
#include <optional>
#include <unordered_map>

#include "base/error.hpp"
#include "model/gguf_config.hpp"

namespace tidelock::model {
namespace {

constexpr std::uint64_t kNormal = 1, kControl = 3, kUnused = 5;  // tokenizer.ggml.token_type

class Keys {
 public:
  Keys(const GgufMetadata& keys, const std::string& name) : keys_(keys), name_(name) {}

  std::string text(const char* key) const {
    const GgufValue* value = find(key);
    if (value == nullptr) return {};
    if (value->is_array || value->type != GgufType::string) wrong(key, "a string");
    return value->strings.front();
  }
  std::vector<std::string> texts(const char* key) const {
    const GgufValue* value = find(key);
    if (value == nullptr) return {};
    if (!value->is_array || value->type != GgufType::string) wrong(key, "a list of strings");
    return value->strings;
  }
  std::vector<std::int32_t> integers(const char* key) const {
    const GgufValue* value = find(key);
    std::vector<std::int32_t> out;
    if (value == nullptr) return out;
    if (!value->is_array || value->integers.size() != value->size()) wrong(key, "a list of whole numbers");
    for (const std::uint64_t x : value->integers) {
      if (x > static_cast<std::uint64_t>(std::numeric_limits<std::int32_t>::max())) wrong(key, "small whole numbers");
      out.push_back(static_cast<std::int32_t>(x));
    }
    return out;
  }

 private:
  const GgufValue* find(const char* key) const {
    const auto found = keys_.find(key);
    return found == keys_.end() ? nullptr : &found->second;
  }
  [[noreturn]] void wrong(const char* key, const char* expected) const {
    fail(ErrorCode::corrupt_data, "{}: {} is not {}", name_, key, expected);
  }

  const GgufMetadata& keys_;
  const std::string& name_;
};

// GPT-2's character for each byte, in UTF-8 (tokenizer_gguf.cpp reads them).
std::string gpt2_characters(std::string_view bytes) {
  static const std::vector<std::string> characters = [] {
    std::vector<std::string> out;
    int next = 256;
    for (int byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
      const int c = printable ? byte : next++;
      if (c < 0x80)
        out.emplace_back(1, static_cast<char>(c));
      else
        out.push_back({static_cast<char>(0xC0 | c >> 6), static_cast<char>(0x80 | (c & 0x3F))});
    }
    return out;
  }();
  std::string out;
  for (const char byte : bytes) out += characters[static_cast<unsigned char>(byte)];
  return out;
}

using Ranks = std::unordered_map<std::string_view, std::int32_t>;

// The two tokens that merging by rank has left before it makes `token`; nothing when merging never comes to it.
std::optional<std::pair<std::string_view, std::string_view>> last_merge(const Ranks& ranks, std::string_view token,
                                                                        std::int32_t rank) {
  std::vector<std::size_t> cuts(token.size() + 1);  // between pieces
  for (std::size_t i = 0; i < cuts.size(); ++i) cuts[i] = i;
  while (cuts.size() > 3) {
    std::int32_t best = rank;
    std::size_t at = 0;
    for (std::size_t i = 0; i + 2 < cuts.size(); ++i) {
      const auto found = ranks.find(token.substr(cuts[i], cuts[i + 2] - cuts[i]));
      if (found == ranks.end() || found->second >= best) continue;
      best = found->second;
      at = i + 1;
    }
    if (at == 0) return std::nullopt;
    cuts.erase(cuts.begin() + static_cast<std::ptrdiff_t>(at));
  }
  return std::pair(token.substr(0, cuts[1]), token.substr(cuts[1]));
}

std::vector<std::string> merges_of(const Tokenizer& tokenizer, std::int32_t base) {
  Ranks ranks;
  for (std::int32_t id = 0; id < base; ++id) ranks.emplace(tokenizer.token_bytes(id), id);
  std::vector<std::string> merges;
  for (std::int32_t id = 0; id < base; ++id) {
    const std::string_view token = tokenizer.token_bytes(id);
    if (token.size() < 2) continue;
    if (const auto pair = last_merge(ranks, token, id))
      merges.push_back(gpt2_characters(pair->first) + " " + gpt2_characters(pair->second));
  }
  return merges;
}

}  // namespace

GgufVocabulary read_vocabulary(const GgufMetadata& metadata, std::int64_t size, const std::string& name) {
  const Keys keys(metadata, name);
  GgufVocabulary v;
  v.model = keys.text("tokenizer.ggml.model");
  v.pre = keys.text("tokenizer.ggml.pre");
  v.tokens = keys.texts("tokenizer.ggml.tokens");
  v.types = keys.integers("tokenizer.ggml.token_type");
  v.merges = keys.texts("tokenizer.ggml.merges");
  v.size = size;
  return v;
}

GgufMetadata write_vocabulary(const Tokenizer& tokenizer, std::int64_t size) {
  if (!tokenizer.has_text()) return {{"tokenizer.ggml.model", GgufValue::of("none")}};
  if (tokenizer.vocab_size() > size)
    fail(ErrorCode::invalid_argument, "{}: {} tokens for a model with a vocabulary of {}", tokenizer.name(),
         tokenizer.vocab_size(), size);
  std::vector<std::string> tokens;
  std::vector<std::uint64_t> types;
  std::int32_t base = 0;
  for (TokenId id = 0; id < tokenizer.vocab_size(); ++id) {
    const bool special = tokenizer.is_special(id);
    const std::string bytes(tokenizer.token_bytes(id));
    tokens.push_back(special ? bytes : gpt2_characters(bytes));
    types.push_back(special ? kControl : kNormal);
    if (!special) base = id + 1;
  }
  for (std::int64_t id = tokenizer.vocab_size(); id < size; ++id) {  // rows of the embedding that no token uses
    tokens.push_back(fmt::format("[PAD{}]", id));
    types.push_back(kUnused);
  }
  return {{"tokenizer.ggml.model", GgufValue::of("gpt2")},
          {"tokenizer.ggml.pre", GgufValue::of("kimi-k2")},
          {"tokenizer.ggml.tokens", GgufValue::list(std::move(tokens))},
          {"tokenizer.ggml.token_type", GgufValue::list(GgufType::i32, std::move(types))},
          {"tokenizer.ggml.merges", GgufValue::list(merges_of(tokenizer, base))}};
}

Tokenizer load_tokenizer(const std::filesystem::path& path) {
  if (path.extension() != ".gguf") return Tokenizer::load(path);
  const GgufModel file(path);
  const Config config = gguf_config(file);
  return Tokenizer::from_gguf(read_vocabulary(file.metadata(), config.vocab, path.string()), path.string());
}

}  // namespace tidelock::model

// Tokenizers from GGUF metadata against the same vocabulary from its folder.
#include <gtest/gtest.h>

#include <rapidcheck.h>

#include "base/base.hpp"
#include "model/chat.hpp"
#include "model/expect_refused.hpp"
#include "model/k2_vocabulary.hpp"
#include "model/pretokenizer.hpp"
#include "model/tokenizer.hpp"

namespace tidelock::model {
namespace tokenizer_gguf_test {

using testing::expect_refused;
using testing::k2_tokenizer;

// GPT-2's table as its rule says it: printable Latin-1 stays, the rest is numbered from U+0100 on.
std::string as_characters(std::string_view bytes) {
  std::string text;
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    unsigned code = byte;
    if (byte < 33) code = 256U + byte;
    if (byte >= 127 && byte <= 160) code = 256U + 33U + (byte - 127U);
    if (byte == 173) code = 256U + 33U + 34U;
    if (code < 0x80) {
      text += static_cast<char>(code);
    } else {
      text += {static_cast<char>(0xC0U | (code >> 6)), static_cast<char>(0x80U | (code & 63U))};
    }
  }
  return text;
}

// What a converter writes for `tokenizer`: special tokens of the kinds that are markup, merges by taking each token
// apart with the tokens before it alone.
GgufVocabulary exported(const Tokenizer& tokenizer) {
  GgufVocabulary v{.model = "gpt2", .pre = "kimi-k2"};
  for (TokenId id = 0; id < tokenizer.vocab_size(); ++id) {
    const std::string bytes(tokenizer.token_bytes(id));
    v.tokens.push_back(tokenizer.is_special(id) ? bytes : as_characters(bytes));
    v.types.push_back(!tokenizer.is_special(id) ? 1 : bytes.starts_with("<|tool") ? 4 : 3);
  }
  const auto rank = [&](std::string_view part, TokenId below) -> TokenId {
    for (TokenId id = 0; id < below; ++id)
      if (tokenizer.token_bytes(id) == part) return id;
    return below;
  };
  for (TokenId id = 0; id < tokenizer.vocab_size() && !tokenizer.is_special(id); ++id) {
    std::vector<std::string> parts;
    for (const char c : tokenizer.token_bytes(id)) parts.emplace_back(1, c);
    while (parts.size() > 2) {
      std::size_t best = 0;
      for (std::size_t i = 1; i + 1 < parts.size(); ++i)
        if (rank(parts[i] + parts[i + 1], id) < rank(parts[best] + parts[best + 1], id)) best = i;
      parts[best] += parts[best + 1];
      parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(best) + 1);
    }
    if (parts.size() == 2) v.merges.push_back(as_characters(parts[0]) + " " + as_characters(parts[1]));
  }
  return v;
}

const GgufVocabulary& whole() {
  static const GgufVocabulary v = exported(k2_tokenizer(true));
  return v;
}

TEST(TokenizerGguf, IsTheTokenizerOfTheFolder) {
  ASSERT_GT(whole().merges.size(), 100U);
  GgufVocabulary ranks_only = whole();
  ranks_only.merges.clear();
  for (const GgufVocabulary& v : {whole(), ranks_only}) {
    const Tokenizer tokenizer = Tokenizer::from_gguf(v, "x.gguf");
    const Tokenizer& folder = k2_tokenizer(true);
    EXPECT_EQ(tokenizer.name(), "x.gguf");
    EXPECT_TRUE(tokenizer.has_text());
    ASSERT_EQ(tokenizer.vocab_size(), folder.vocab_size());
    for (TokenId id = 0; id < folder.vocab_size(); ++id) {
      EXPECT_EQ(tokenizer.token_bytes(id), folder.token_bytes(id));
      EXPECT_EQ(tokenizer.is_special(id), folder.is_special(id));
    }
    EXPECT_EQ(chat_protocol(tokenizer), ChatProtocol::k2);
    EXPECT_TRUE(rc::check("same tokens of any bytes", [&](const std::vector<std::uint8_t>& bytes) {
      const std::string text(bytes.begin(), bytes.end());
      RC_ASSERT(tokenizer.encode_text(text) == folder.encode_text(text));
      RC_ASSERT(tokenizer.decode(tokenizer.encode_text(text)) == text);
    }));
    for (const std::string text : {"the lesson is in the other notes", "<|im_end|> 12*34?", "\n\n  x = {\"a\": 1}"})
      EXPECT_EQ(tokenizer.encode_text(text), folder.encode_text(text));
  }
}

TEST(TokenizerGguf, IdsWithoutText) {
  const Tokenizer tokenizer = Tokenizer::from_gguf({.model = "none", .size = 1000}, "bench.gguf");
  EXPECT_EQ(tokenizer.vocab_size(), 1000);
  EXPECT_FALSE(tokenizer.has_text());
  EXPECT_FALSE(tokenizer.is_special(999));
  EXPECT_THROW(tokenizer.is_special(1000), Error);
  EXPECT_EQ(tokenizer.find_special("<|im_end|>"), std::nullopt);
  const std::vector<TokenId> tokens{1, 2};
  expect_refused(ErrorCode::not_supported, "bench.gguf has no tokenizer", [&] { tokenizer.encode_text("x"); });
  expect_refused(ErrorCode::not_supported, "bench.gguf has no tokenizer", [&] { tokenizer.encode_text(""); });
  expect_refused(ErrorCode::not_supported, "bench.gguf has no tokenizer", [&] { tokenizer.decode(tokens); });
  expect_refused(ErrorCode::not_supported, "bench.gguf has no tokenizer", [&] { tokenizer.token_bytes(1); });
  expect_refused(ErrorCode::not_supported, "no chat protocol", [&] { chat_protocol(tokenizer); });
  for (const std::int64_t size : {std::int64_t{0}, std::int64_t{-1}, std::int64_t{1} << 40})
    expect_refused(ErrorCode::corrupt_data, "vocabulary of",
                   [&] { Tokenizer::from_gguf({.model = "none", .size = size}, "bench.gguf"); });
}

TEST(TokenizerGguf, ListsThatDoNotFitTogetherAreRefused) {
  const auto refused = [](ErrorCode code, const std::string& part, const auto& damage) {
    GgufVocabulary v = whole();
    damage(v);
    expect_refused(code, part, [&] { Tokenizer::from_gguf(v, "x.gguf"); });
  };
  const auto corrupt = ErrorCode::corrupt_data, unsupported = ErrorCode::not_supported;
  EXPECT_NO_THROW(Tokenizer::from_gguf(whole(), "x.gguf"));
  refused(unsupported, "\"llama\"", [](auto& v) { v.model = "llama"; });
  refused(unsupported, "\"qwen2\"", [](auto& v) { v.pre = "qwen2"; });
  refused(unsupported, "pre is \"\"", [](auto& v) { v.pre = ""; });
  refused(corrupt, "holds 0 tokens", [](auto& v) { v.tokens.clear(); });
  refused(corrupt, "token_type has", [](auto& v) { v.types.pop_back(); });
  refused(corrupt, "token 402 has type 1 behind", [](auto& v) { v.types[402] = 1; });  // a gap of special tokens
  refused(corrupt, "token 300 has type 1 behind", [](auto& v) { v.types[299] = 3; });
  refused(corrupt, "has type 6", [](auto& v) { v.types[0] = 6; });
  refused(corrupt, "has type 0", [](auto& v) { v.types[405] = 0; });
  refused(corrupt, "same bytes", [](auto& v) { v.tokens[300] = v.tokens[301]; });
  refused(corrupt, "two special tokens", [](auto& v) { v.tokens[402] = v.tokens[403]; });
  refused(corrupt, "has no name", [](auto& v) { v.tokens[402] = ""; });
  refused(corrupt, "byte 65 has no token", [](auto& v) {
    v.tokens[65] = "AAAAAAA";
    v.merges.clear();
  });
  for (const std::string bad : {"", " x", "中", "\xff", "a\tb"})
    refused(corrupt, "token 300,", [&](auto& v) { v.tokens[300] = bad; });
  for (const std::string bad : {"", "ab", "a ", " a", "a b c", "zzzzzz q", "中 a"})
    refused(corrupt, "merge 5,", [&](auto& v) { v.merges[5] = bad; });
  refused(unsupported, "merges in another order", [](auto& v) { std::swap(v.merges[5], v.merges[6]); });
  refused(unsupported, "merges in another order", [](auto& v) { v.merges[6] = v.merges[5]; });
}

}  // namespace tokenizer_gguf_test
}  // namespace tidelock::model

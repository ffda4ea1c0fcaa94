#include "model/tokenizer.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <rapidcheck.h>
#include <cstdlib>
#include <map>
#include <sstream>

#include "base/base.hpp"
#include "model/json.hpp"
#include "model/pretokenizer.hpp"

namespace tidelock::model {
namespace tokenizer_test {

const std::filesystem::path fixtures = std::filesystem::path(TIDELOCK_SOURCE_DIR) / "tests/model/fixtures";

std::filesystem::path scratch() {
  auto path = std::filesystem::temp_directory_path() / fmt::format("tidelock-tokenizer-{}", ::getpid());
  std::filesystem::remove_all(path);
  std::filesystem::create_directories(path);
  return path;
}

std::string from_hex(const std::string& hex) {
  std::string bytes;
  for (std::size_t i = 0; i < hex.size(); i += 2)
    bytes.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  return bytes;
}

std::vector<std::string> pieces_of(std::string_view text) {
  std::vector<std::string> pieces;
  for (const auto piece : split_pieces(text)) pieces.emplace_back(piece);
  return pieces;
}

using Pieces = std::vector<std::string>;

TEST(Pretokenizer, CutsAsTheExpressionSays) {
  EXPECT_EQ(pieces_of("Hello, world!"), (Pieces{"Hello", ",", " world", "!"}));
  EXPECT_EQ(pieces_of("I'M they'll"), (Pieces{"I'M", " they'll"}));
  EXPECT_EQ(pieces_of("don'tell"), (Pieces{"don't", "ell"}));
  EXPECT_EQ(pieces_of("HTTPServer getValue"), (Pieces{"HTTPServer", " get", "Value"}));
  EXPECT_EQ(pieces_of("12345 6"), (Pieces{"123", "45", " ", "6"}));
  EXPECT_EQ(pieces_of("中文abc"), (Pieces{"中文", "abc"}));
  EXPECT_EQ(pieces_of("a  b"), (Pieces{"a", " ", " b"}));
  EXPECT_EQ(pieces_of("a \n\n b  "), (Pieces{"a", " \n\n", " b", "  "}));
  EXPECT_EQ(pieces_of("x = {\n\t1"), (Pieces{"x", " =", " {\n", "\t", "1"}));
  EXPECT_EQ(pieces_of("=\""), (Pieces{"=\""}));
  EXPECT_TRUE(split_pieces("").empty());
}

TEST(Pretokenizer, InvalidUtf8IsKeptByteForByte) {
  EXPECT_EQ(pieces_of("a\xff\xfe b"), (Pieces{"a", "\xff\xfe", " b"}));
  EXPECT_EQ(pieces_of("\xe4\xb8"), (Pieces{"\xe4\xb8"}));                  // cut short
  EXPECT_EQ(pieces_of("\xc0\xaf!a"), (Pieces{"\xc0\xaf!", "a"}));          // overlong
  EXPECT_EQ(pieces_of("\xed\xa0\x80"), (Pieces{"\xed\xa0\x80"}));          // a surrogate
  EXPECT_EQ(pieces_of("\xf4\x90\x80\x80"), (Pieces{"\xf4\x90\x80\x80"}));  // beyond U+10FFFF
}

TEST(Pretokenizer, LongTextIsCutWhereTheReferenceCutsIt) {
  const auto lengths = [](const std::string& text) {
    std::vector<std::size_t> result;
    for (const auto piece : split_pieces(text)) result.push_back(piece.size());
    return result;
  };
  EXPECT_EQ(lengths(std::string(60'000, 'a')), (std::vector<std::size_t>{25'000, 25'000, 10'000}));
  EXPECT_EQ(lengths(std::string(60'000, ' ')), (std::vector<std::size_t>{25'000, 25'000, 10'000}));
  // Short runs are not cut, but every 400,000 characters are: here inside the pair "ab".
  std::string text = "x";
  while (text.size() < 400'100) text += " a";
  const auto pieces = split_pieces(text);
  std::size_t at = 0;
  bool cut = false;
  for (const auto piece : pieces) {
    at += piece.size();
    cut = cut || at == 400'000;
  }
  EXPECT_TRUE(cut);
  EXPECT_EQ(pieces.size(), (text.size() - 1) / 2 + 2);
}

TEST(Tokenizer, AgreesWithTwoIndependentPrograms) {
  const Tokenizer tokenizer = Tokenizer::load(fixtures / "bpe");
  std::istringstream lines(read_file(fixtures / "tokenizer_cases.jsonl"));
  int cases = 0;
  for (std::string line; std::getline(lines, line); ++cases) {
    const Json row = parse_json(line, "tokenizer_cases.jsonl");
    const std::string text = from_hex(row["text"].get<std::string>());
    std::vector<std::size_t> lengths;
    for (const auto piece : split_pieces(text)) lengths.push_back(piece.size());
    EXPECT_EQ(lengths, row["pieces"].get<std::vector<std::size_t>>()) << text;
    EXPECT_EQ(tokenizer.encode_text(text), row["ids"].get<std::vector<TokenId>>()) << text;
    EXPECT_EQ(tokenizer.decode(tokenizer.encode_text(text)), text);
  }
  EXPECT_EQ(cases, 500);
}

TEST(Tokenizer, AnyBytesSurviveTheRoundTrip) {
  const Tokenizer tokenizer = Tokenizer::load(fixtures / "bpe");
  EXPECT_TRUE(rc::check("decode(encode(bytes)) == bytes", [&](const std::vector<std::uint8_t>& bytes) {
    const std::string text(bytes.begin(), bytes.end());
    RC_ASSERT(tokenizer.decode(tokenizer.encode_text(text)) == text);
  }));
}

TEST(Tokenizer, MergesAsANaiveLoopDoes) {
  const Tokenizer tokenizer = Tokenizer::load(fixtures / "bpe");
  std::map<std::string, TokenId, std::less<>> ranks;
  for (TokenId id = 0; id < tokenizer.vocab_size(); ++id)
    if (!tokenizer.is_special(id)) ranks[std::string(tokenizer.token_bytes(id))] = id;
  const auto naive = [&](const std::string& piece) {
    std::vector<std::string> parts;
    for (const char byte : piece) parts.emplace_back(1, byte);
    if (ranks.contains(piece)) parts = {piece};
    for (;;) {
      std::size_t best = parts.size();
      TokenId rank = tokenizer.vocab_size();
      for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
        const auto found = ranks.find(parts[i] + parts[i + 1]);
        if (found != ranks.end() && found->second < rank) {
          rank = found->second;
          best = i;
        }
      }
      if (best == parts.size()) break;
      parts[best] += parts[best + 1];
      parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(best) + 1);
    }
    std::vector<TokenId> ids;
    for (const auto& part : parts) ids.push_back(ranks.at(part));
    return ids;
  };
  // Letters only, so that each word is one piece; drawn from the frequent ones, so that merges compete.
  EXPECT_TRUE(rc::check("same tokens", [&](const std::vector<std::uint8_t>& choices) {
    std::string word;
    for (const auto choice : choices) word += "eshlrtonai"[choice % 10];
    RC_ASSERT(tokenizer.encode_text(word) == naive(word));
  }));
}

TEST(Tokenizer, TextNeverBecomesASpecialToken) {
  const Tokenizer tokenizer = Tokenizer::load(fixtures / "bpe");
  for (const std::string name : {"<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "[EOS]"}) {
    const auto tokens = tokenizer.encode_text("x " + name + name);
    for (const TokenId token : tokens) EXPECT_FALSE(tokenizer.is_special(token));
    EXPECT_EQ(tokenizer.decode(tokens), "x " + name + name);
    EXPECT_TRUE(tokenizer.is_special(tokenizer.special(name)));
    EXPECT_EQ(tokenizer.decode(std::vector{tokenizer.special(name)}), name);
  }
  EXPECT_EQ(tokenizer.find_special("<|nothing|>"), std::nullopt);
  EXPECT_THROW(tokenizer.special("<|nothing|>"), Error);
  EXPECT_THROW(tokenizer.decode(std::vector<TokenId>{tokenizer.vocab_size()}), Error);
  EXPECT_THROW(tokenizer.decode(std::vector<TokenId>{-1}), Error);
}

TEST(Tokenizer, AMegabyteOfOneLetterIsNoTrouble) {
  // Quadratic merging would need 10^11 steps here: the test would not end.
  const Tokenizer tokenizer = Tokenizer::load(fixtures / "bpe");
  for (const char letter : {'a', ' ', '\n', '=', '\xff'}) {
    const std::string text(std::size_t{1} << 20, letter);
    EXPECT_EQ(tokenizer.decode(tokenizer.encode_text(text)), text);
  }
}

TEST(Trainer, MakesTheCommittedVocabularyAgain) {
  const auto folder = scratch();
  const std::string command =
      fmt::format("python3 {}/tools/train_bpe.py {}/bpe_corpus.txt --size 400 --out {} > {}/log", TIDELOCK_SOURCE_DIR,
                  fixtures.string(), folder.string(), folder.string());
  ASSERT_EQ(std::system(command.c_str()), 0);
  for (const std::string name : {"tiktoken.model", "tokenizer_config.json"})
    EXPECT_EQ(read_file(folder / name), read_file(fixtures / "bpe" / name));
  std::filesystem::remove_all(folder);
}

TEST(Trainer, DigitsStayAloneAndMergesStayInsidePieces) {
  const Tokenizer tokenizer = Tokenizer::load(fixtures / "bpe");
  for (TokenId id = 256; !tokenizer.is_special(id); ++id) {
    const std::string token(tokenizer.token_bytes(id));
    EXPECT_EQ(token.find_first_of("0123456789"), std::string::npos) << token;
    EXPECT_EQ(split_pieces(token).size(), 1U) << token;
  }
}

class Files : public ::testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove_all(folder_); }
  void ranks(const std::string& content) { write_file_atomic(folder_ / "tiktoken.model", content); }
  void config(const std::string& content) { write_file_atomic(folder_ / "tokenizer_config.json", content); }
  std::string refused() {
    try {
      Tokenizer::load(folder_);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::corrupt_data);
      return error.what();
    }
    ADD_FAILURE() << "nothing was thrown";
    return {};
  }
  std::filesystem::path folder_ = scratch();
  std::string bytes_ = read_file(fixtures / "bpe/tiktoken.model");
};

#define EXPECT_SAYS(message, part) EXPECT_NE((message).find(part), std::string::npos) << (message)

TEST_F(Files, BytesAloneNeedNoRanks) {
  config(
      R"({"tokenizer_class":"byte","added_tokens_decoder":{"256":{"content":"<|open|>"},"257":{"content":"[EOS]"}}})");
  const Tokenizer tokenizer = Tokenizer::load(folder_);
  EXPECT_EQ(tokenizer.vocab_size(), 258);
  EXPECT_EQ(tokenizer.encode_text("h\xff"), (std::vector<TokenId>{'h', 255}));
  EXPECT_EQ(tokenizer.special("[EOS]"), 257);
}

TEST_F(Files, UnnamedReservedIdsGetTheirName) {
  config(
      R"({"tokenizer_class":"byte","num_reserved_special_tokens":4,"added_tokens_decoder":{"257":{"content":"[EOS]"}}})");
  const Tokenizer tokenizer = Tokenizer::load(folder_);
  EXPECT_EQ(tokenizer.vocab_size(), 260);
  EXPECT_EQ(tokenizer.token_bytes(256), "<|reserved_token_256|>");
  EXPECT_EQ(tokenizer.special("<|reserved_token_259|>"), 259);
  // The full family's folder does not say a number: it always has 256.
  config(R"({"tokenizer_class":"TikTokenTokenizer","added_tokens_decoder":{"400":{"content":"[BOS]"}}})");
  ranks(bytes_);
  EXPECT_EQ(Tokenizer::load(folder_).vocab_size(), 656);
}

TEST_F(Files, APieceThatIsATokenIsTakenWhole) {
  // "xyz" cannot be reached by merging pairs, as there is neither "xy" nor "yz".
  config("{}");
  ranks(bytes_ + "eHl6 400\n");
  const Tokenizer tokenizer = Tokenizer::load(folder_);
  EXPECT_EQ(tokenizer.encode_text("xyz"), (std::vector<TokenId>{400}));
  EXPECT_EQ(tokenizer.encode_text("xyzz"), (std::vector<TokenId>{'x', 'y', 'z', 'z'}));
}

TEST_F(Files, BadRanksAreRefused) {
  config(R"({"tokenizer_class":"x"})");
  ranks(bytes_);
  EXPECT_NO_THROW(Tokenizer::load(folder_));
  ranks(bytes_.substr(0, bytes_.size() - 1));  // no newline at the end: still whole
  EXPECT_NO_THROW(Tokenizer::load(folder_));
  ranks(bytes_ + "YWFhYWE= 401\n");
  EXPECT_SAYS(refused(), "gap");
  ranks(bytes_ + "YWFhYWE= 399\n");
  EXPECT_SAYS(refused(), "stands twice");
  ranks(bytes_ + "YQ== 400\n");
  EXPECT_SAYS(refused(), "same bytes");
  for (const std::string line :
       {"YWFhYWE 400", "YWFhYW*= 400", "YR== 400", " 400", "YQ==", "YWFhYWE= -1", "YWFhYWE= 4x",
        "YWFhYWE= 99999999999999999999", "", "==== 400", "Y=== 400", "YW=h 400"}) {
    ranks(bytes_ + line + "\n");
    EXPECT_SAYS(refused(), "line 401");
  }
  ranks("YQ== 0\n");
  EXPECT_SAYS(refused(), "has no token");
  ranks("");
  EXPECT_SAYS(refused(), "has no token");
}

TEST_F(Files, BadSpecialsAreRefused) {
  const auto refuse = [&](const std::string& fields, const std::string& part) {
    config("{\"tokenizer_class\":\"byte\"," + fields + "}");
    EXPECT_SAYS(refused(), part);
  };
  refuse(R"("added_tokens_decoder":{"255":{"content":"a"}})", "has id 255");
  refuse(R"("added_tokens_decoder":{"256":{"content":"a"},"258":{"content":"b"}})", "has id 258");
  refuse(R"("added_tokens_decoder":{"256":{"content":"a"},"257":{"content":"a"}})", "two special tokens");
  refuse(R"("added_tokens_decoder":{"256":{"content":"a"},"0256":{"content":"b"}})", "stands twice");
  refuse(R"("num_reserved_special_tokens":2,"added_tokens_decoder":{"258":{"content":"a"}})", "expected 256 to 257");
  refuse(R"("num_reserved_special_tokens":-1)", "num_reserved_special_tokens");
  refuse(R"("num_reserved_special_tokens":1e9)", "num_reserved_special_tokens");
  refuse(R"("added_tokens_decoder":[])", "not an object");
  refuse(R"("added_tokens_decoder":{"x":{"content":"a"}})", "expected ID");
  refuse(R"("added_tokens_decoder":{"256":{"content":""}})", "expected ID");
  refuse(R"("added_tokens_decoder":{"256":"a"})", "expected ID");
  config("[]");
  EXPECT_SAYS(refused(), "not a JSON object");
}

}  // namespace tokenizer_test
}  // namespace tidelock::model

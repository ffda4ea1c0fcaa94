// Bytes to tokens and back: byte-level BPE by rank over the Kimi pre-tokenizer's pieces, or plain bytes.
//
// A folder holds
//   tokenizer_config.json  added_tokens_decoder {"ID": {"content": NAME}}: the special tokens;
//                          tokenizer_class "byte": the base tokens are the 256 bytes, no other file is read;
//                          num_reserved_special_tokens N: ids base..base+N-1 are special, those without a name are
//                          called <|reserved_token_ID|> (256 when absent and tokenizer_class is "TikTokenTokenizer")
//   tiktoken.model         one "BASE64 RANK" a line: the base tokens; a token's rank is its id
//
// Text never becomes a special token: encode_text knows only base tokens, so what a user or a tool writes cannot forge
// markup. Specials enter a prompt by name, from the chat template alone.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tidelock::model {

using TokenId = std::int32_t;

// The tokenizer of a GGUF file as its metadata says it: the values of tokenizer.ggml.*
struct GgufVocabulary {
  std::string model = {};                // "gpt2": byte-level BPE; "none": ids without text
  std::string pre = {};                  // the rule that cuts text into pieces: "kimi-k2"
  std::vector<std::string> tokens = {};  // by id; normal ones in GPT-2's characters for bytes, special ones by name
  std::vector<std::int32_t> types = {};  // token_type: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused
  std::vector<std::string> merges = {};  // "LEFT RIGHT" in the order of ids; may be empty, since ids are ranks
  std::int64_t size = 0;                 // with "none": the model's vocabulary
};

// Immutable and thread-safe; a copy shares the vocabulary.
class Tokenizer {
 public:
  // Throws Error{not_found, io} for missing files, Error{corrupt_data} for bad base64, ids with gaps or duplicates,
  // tokens or names that stand twice, a byte without a token, and specials outside their range.
  static Tokenizer load(const std::filesystem::path& folder);

  // The tokenizer in a GGUF file; `name` is the file's, for messages. With model "none" there are ids and no text:
  // encode_text, decode and token_bytes throw Error{not_supported}, and there are no special tokens. Throws
  // Error{not_supported} for other models and rules, Error{corrupt_data} for lists that do not fit together, normal
  // tokens behind special ones, and what load() refuses.
  static Tokenizer from_gguf(const GgufVocabulary& vocabulary, const std::string& name);

  // Of the folder or file that it was read from.
  const std::string& name() const;
  // False for ids without text.
  bool has_text() const;

  // Plain BPE over any bytes; decode() gives exactly `text` back. Time O(n log n).
  std::vector<TokenId> encode_text(std::string_view text) const;

  // The special token of this name. special() throws Error{not_found} naming the vocabulary.
  TokenId special(std::string_view name) const;
  std::optional<TokenId> find_special(std::string_view name) const;

  // Bytes of all tokens, specials by name; not necessarily UTF-8. Throws Error{invalid_argument} for an id outside
  // [0, vocab_size()), as token_bytes and is_special do.
  std::string decode(std::span<const TokenId> tokens) const;
  std::string_view token_bytes(TokenId token) const;
  bool is_special(TokenId token) const;

  std::int32_t vocab_size() const;

 private:
  struct Vocabulary;
  void check_range(TokenId token) const;
  explicit Tokenizer(std::shared_ptr<const Vocabulary> vocabulary);
  std::shared_ptr<const Vocabulary> vocabulary_;
};

}  // namespace tidelock::model

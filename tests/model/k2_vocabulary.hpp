// The small BPE vocabulary of the fixtures with the special tokens of the K2 family.
#pragma once

#include <string>
#include <vector>

#include "model/chat.hpp"
#include "model/temporary_folder.hpp"
#include "model/tokenizer.hpp"

namespace tidelock::model::testing {

inline std::vector<std::string> k2_specials(bool thinking) {
  std::vector<std::string> names{"[BOS]",
                                 "[EOS]",
                                 "<|im_end|>",
                                 "<|im_user|>",
                                 "<|im_assistant|>",
                                 "<|im_system|>",
                                 "<|tool_calls_section_begin|>",
                                 "<|tool_calls_section_end|>",
                                 "<|tool_call_begin|>",
                                 "<|tool_call_argument_begin|>",
                                 "<|tool_call_end|>",
                                 "<|im_middle|>"};
  if (thinking) names.insert(names.end(), {"<think>", "</think>"});
  return names;
}

// The fixtures' base tokens with these special ones.
inline Tokenizer with_specials(const std::vector<std::string>& names) {
  const TemporaryFolder folder;
  const auto ranks = read_file(std::filesystem::path(TIDELOCK_SOURCE_DIR) / "tests/model/fixtures/bpe/tiktoken.model");
  write_file_atomic(folder.path / "tiktoken.model", ranks);
  std::string added;
  for (std::size_t i = 0; i < names.size(); ++i)
    added += fmt::format("{}\"{}\":{{\"content\":\"{}\"}}", i == 0 ? "" : ",", 400 + i, names[i]);
  write_file_atomic(folder.path / "tokenizer_config.json", "{\"added_tokens_decoder\":{" + added + "}}");
  return Tokenizer::load(folder.path);
}

inline const Tokenizer& k2_tokenizer(bool thinking) {
  static const Tokenizer plain = with_specials(k2_specials(false)), thinker = with_specials(k2_specials(true));
  return thinking ? thinker : plain;
}

using Parts = std::vector<std::string>;

// Markup by its name, every other part as one text of its own.
inline std::vector<TokenId> segments(const Parts& parts, const Tokenizer& tokenizer = k2_tokenizer(true)) {
  std::vector<TokenId> tokens;
  for (const std::string& part : parts) {
    if (const auto special = tokenizer.find_special(part)) {
      tokens.push_back(*special);
    } else {
      for (const TokenId token : tokenizer.encode_text(part)) tokens.push_back(token);
    }
  }
  return tokens;
}

inline Message user(const std::string& text) {
  return {.role = "user", .content = text};
}
inline Message assistant(const std::string& reasoning, const std::string& content, std::vector<ToolCall> calls = {}) {
  return {.role = "assistant", .content = content, .reasoning = reasoning, .tool_calls = std::move(calls)};
}
inline Message result(const std::string& id, const std::string& text, const std::string& name = "") {
  return {.role = "tool", .content = text, .tool_call_id = id, .name = name};
}

}  // namespace tidelock::model::testing

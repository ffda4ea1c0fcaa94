// Pieces of an assistant's turn as chat.hpp writes them, for whoever holds a model to them token by token. The
// protocols stand in chat_k2.cpp and chat_k3.cpp.
#pragma once

#include <cstddef>
#include <string_view>
#include <utility>
#include <vector>

#include "model/tokenizer.hpp"

namespace tidelock::model {

namespace k2 {
// <|tool_call_begin|> functions.NAME:NUMBER <|tool_call_argument_begin|>; `number` counts the conversation's calls from
// 0.
std::vector<TokenId> open_call(const Tokenizer& tokenizer, std::string_view name, std::size_t number);
}  // namespace k2

namespace k3 {
using Attributes = std::vector<std::pair<std::string_view, std::string_view>>;
std::vector<TokenId> open_tag(const Tokenizer& tokenizer, std::string_view tag, const Attributes& attributes = {});
std::vector<TokenId> close_tag(const Tokenizer& tokenizer, std::string_view tag);
}  // namespace k3

}  // namespace tidelock::model

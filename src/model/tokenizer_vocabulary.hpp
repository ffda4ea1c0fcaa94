// What a Tokenizer shares between its copies. Private to model/.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "model/tokenizer.hpp"

namespace tidelock::model {

struct Tokenizer::Vocabulary {
  std::string name;                   // of the folder or file, for messages
  std::vector<std::string> base;      // bytes by id
  std::vector<std::string> specials;  // names; specials[i] has id base.size() + i
  std::unordered_map<std::string_view, TokenId> id_of_bytes;
  std::unordered_map<std::string_view, TokenId> id_of_special;
  std::array<TokenId, 256> id_of_byte{};
  std::size_t longest = 1;    // bytes of the longest base token
  bool bytes_only = false;    // no merges: pieces need not be looked for
  std::int32_t ids_only = 0;  // above 0: that many ids, and no text for any of them

  std::size_t size() const { return ids_only > 0 ? static_cast<std::size_t>(ids_only) : base.size() + specials.size(); }
  std::optional<TokenId> find(std::string_view bytes) const {
    if (bytes.size() > longest) return std::nullopt;
    const auto found = id_of_bytes.find(bytes);
    return found == id_of_bytes.end() ? std::nullopt : std::optional(found->second);
  }

  // Fills everything from `base` and `specials`, which do not change any more. Throws Error{corrupt_data} for tokens or
  // names that stand twice and for bytes without a token; the messages name where each was read from.
  void index(const std::string& base_source, const std::string& special_source);
};

}  // namespace tidelock::model

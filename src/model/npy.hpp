// NumPy's .npy files, as far as logits and token files need them, and token files as text.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <variant>
#include <vector>

#include "model/tokenizer.hpp"

namespace tidelock::model {

struct NpyArray {
  std::vector<std::int64_t> shape;  // row-major; empty for a scalar
  std::variant<std::vector<float>, std::vector<std::int32_t>, std::vector<std::int64_t>> values;
};

// Writes float32, row-major, format version 1.0; whole or not at all (AtomicFile). The bytes depend on the arguments
// only. Throws Error{invalid_argument} when shape and values disagree.
void write_npy(const std::filesystem::path& path, std::span<const float> values,
               const std::vector<std::int64_t>& shape);

// Reads versions 1 to 3, little-endian float32, int32 and int64 in row-major order. Throws Error{corrupt_data} for
// anything that is not such a file, Error{not_supported} for another dtype or column-major order.
NpyArray read_npy(const std::filesystem::path& path);

// Token ids of a one-dimensional integer .npy file, or of a text file with ids between white space. The range is not
// checked against a vocabulary. Throws Error{corrupt_data} naming what is no id.
std::vector<TokenId> read_tokens(const std::filesystem::path& path);

}  // namespace tidelock::model

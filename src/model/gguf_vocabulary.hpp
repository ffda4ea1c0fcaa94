// The keys tokenizer.ggml.* of a GGUF file, and the tokenizer of whatever a path names.
#pragma once

#include <filesystem>

#include "model/gguf.hpp"
#include "model/tokenizer.hpp"

namespace tidelock::model {

// Throws Error{corrupt_data} for keys of the wrong type. `size` is the model's vocabulary.
GgufVocabulary read_vocabulary(const GgufMetadata& keys, std::int64_t size, const std::string& name);

// The keys that give this tokenizer back, padded to the model's vocabulary, with the merges that other programs want.
// Throws Error{invalid_argument} for a tokenizer that is larger than the model.
GgufMetadata write_vocabulary(const Tokenizer& tokenizer, std::int64_t size);

// Of a checkpoint folder, or of a .gguf file.
Tokenizer load_tokenizer(const std::filesystem::path& path);

}  // namespace tidelock::model

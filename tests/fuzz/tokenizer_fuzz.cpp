// Two halves by the first byte: text to tokens and back under a fixed vocabulary, or a vocabulary file.
#include <unistd.h>

#include <cstdlib>

#include "base/error.hpp"
#include "base/files.hpp"
#include "model/pretokenizer.hpp"
#include "model/tokenizer.hpp"

namespace {

using namespace tidelock;
using namespace tidelock::model;

void check_round_trip(const Tokenizer& tokenizer, const std::string& text) {
  std::size_t at = 0;
  for (const auto piece : split_pieces(text)) {
    if (piece.empty() || piece.data() != text.data() + at) std::abort();
    at += piece.size();
  }
  if (at != text.size()) std::abort();
  const auto tokens = tokenizer.encode_text(text);
  for (const TokenId token : tokens)
    if (tokenizer.is_special(token)) std::abort();
  if (tokenizer.decode(tokens) != text) std::abort();
}

// A folder of this process whose files each run writes anew.
std::filesystem::path make_folder() {
  auto path = std::filesystem::temp_directory_path() / ("tidelock-fuzz-" + std::to_string(::getpid()));
  std::filesystem::create_directories(path);
  return path;
}

void write(const std::filesystem::path& path, std::string_view text) {
  std::FILE* file = std::fopen(path.c_str(), "wb");
  if (file == nullptr || std::fwrite(text.data(), 1, text.size(), file) != text.size()) std::abort();
  std::fclose(file);
}

// The text up to a zero byte is tokenizer_config.json; the rest follows the tokens of the 256 bytes.
void check_vocabulary(const std::string& text) {
  static const std::filesystem::path folder = make_folder();
  static const std::string bytes =
      read_file(std::string(TIDELOCK_SOURCE_DIR) + "/tests/model/fixtures/bpe/tiktoken.model");
  const std::size_t cut = std::min(text.find('\0'), text.size());
  write(folder / "tokenizer_config.json", text.substr(0, cut));
  write(folder / "tiktoken.model", cut < text.size() ? bytes + text.substr(cut + 1) : bytes);
  try {
    const Tokenizer tokenizer = Tokenizer::load(folder);
    for (TokenId id = 0; id < tokenizer.vocab_size(); ++id)
      if (tokenizer.token_bytes(id).empty()) std::abort();
    check_round_trip(tokenizer, text);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::corrupt_data) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Tokenizer fixed = Tokenizer::load(std::string(TIDELOCK_SOURCE_DIR) + "/tests/model/fixtures/bpe");
  if (size == 0) return 0;
  const std::string text(reinterpret_cast<const char*>(data) + 1, size - 1);
  if (data[0] == '{') {
    check_vocabulary("{" + text);
  } else {
    check_round_trip(fixed, text);
  }
  return 0;
}

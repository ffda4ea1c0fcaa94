#include "model/weight_source.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/error.hpp"

namespace tidelock::model {

int piece_count(const Parameter& parameter) {
  return parameter.kind == ParameterKind::absorbed ? 2 : 1;
}

PieceShape piece_shape(const Config& config, const Parameter& parameter, int piece) {
  const MlaConfig& m = config.mla;
  if (parameter.kind != ParameterKind::absorbed) return {parameter.shape[0], parameter.shape[1]};
  return piece == 0 ? PieceShape{std::int64_t{m.heads} * m.latent, m.nope}
                    : PieceShape{std::int64_t{m.heads} * m.value, m.latent};
}

void WeightSource::check_finite(ParameterId id, int piece, std::span<const std::byte> rows) const {
  const Parameter& p = model_->parameter(id);
  const PieceShape shape = piece_shape(config_, p, piece);
  const std::int64_t n = shape.out * shape.in, bad = numerics::find_not_finite(format(id, piece), rows.data(), n);
  if (bad < n)
    fail(ErrorCode::corrupt_data, "{}: tensor {} holds a value that is not finite at element {} of {}", path_.string(),
         p.name, bad, n);
}

namespace {

// The inverse of what makes an absorbed matrix's pieces: [heads][latent][nope] and [heads][value][latent] back to each
// head's nope key rows and value rows.
void join_halves(const MlaConfig& m, int piece, const std::vector<float>& x, std::vector<float>& out) {
  const std::int64_t latent = m.latent, rows = m.nope + m.value;
  for (std::int64_t h = 0; h < m.heads; ++h) {
    float* to = out.data() + h * rows * latent;
    if (piece == 1) {
      std::copy_n(x.data() + h * m.value * latent, m.value * latent, to + m.nope * latent);
      continue;
    }
    for (std::int64_t l = 0; l < latent; ++l)
      for (std::int64_t n = 0; n < m.nope; ++n)
        to[n * latent + l] = x[static_cast<std::size_t>((h * latent + l) * m.nope + n)];
  }
}

}  // namespace

void WeightSource::values(ParameterId id, std::vector<float>& out) const {
  const Parameter& p = model_->parameter(id);
  out.resize(static_cast<std::size_t>(p.count()));
  if (p.kind == ParameterKind::vector || p.kind == ParameterKind::conv) {
    stored_vector(id, out);
    for (std::size_t i = 0; i < out.size(); ++i)
      if (!std::isfinite(out[i]))
        fail(ErrorCode::corrupt_data, "{}: tensor {} holds {} at element {} of {}", path_.string(), p.name, out[i], i,
             out.size());
    return;
  }
  std::vector<std::byte> scratch;
  std::vector<float> half;
  for (int piece = 0; piece < piece_count(p); ++piece) {
    const PieceShape shape = piece_shape(config_, p, piece);
    std::vector<float>& to = p.kind == ParameterKind::absorbed ? half : out;
    to.resize(static_cast<std::size_t>(shape.out * shape.in));
    const auto rows = this->rows(id, piece, scratch);
    check_finite(id, piece, rows);
    numerics::dequantize(format(id, piece), rows.data(), shape.out * shape.in, to.data());
    if (p.kind == ParameterKind::absorbed) join_halves(config_.mla, piece, half, out);
  }
}

std::vector<float> turn_conv(std::span<const float> values, bool to_tap_major) {
  const std::size_t channels = values.size() / 4;
  std::vector<float> out(values.size());
  for (std::size_t c = 0; c < channels; ++c)
    for (std::size_t tap = 0; tap < 4; ++tap)
      (to_tap_major ? out[tap * channels + c] : out[c * 4 + tap]) =
          to_tap_major ? values[c * 4 + tap] : values[tap * channels + c];
  return out;
}

void to_ggml_nibbles(const std::byte* packed, std::byte* block) {
  const std::byte low{0x0F}, high{0xF0};
  for (int i = 0; i < 8; ++i) {  // byte i holds elements 2i and 2i + 1, byte i + 8 elements 2i + 16 and 2i + 17
    block[2 * i] = (packed[i] & low) | packed[i + 8] << 4;
    block[2 * i + 1] = packed[i] >> 4 | (packed[i + 8] & high);
  }
}

void from_ggml_nibbles(const std::byte* block, std::byte* packed) {
  const std::byte low{0x0F}, high{0xF0};
  for (int i = 0; i < 8; ++i) {
    packed[i] = (block[2 * i] & low) | block[2 * i + 1] << 4;
    packed[i + 8] = block[2 * i] >> 4 | (block[2 * i + 1] & high);
  }
}

std::unique_ptr<WeightSource> open_weights(const std::filesystem::path& path) {
  if (std::filesystem::is_directory(path)) return open_folder(path);
  if (!std::filesystem::exists(path)) fail(ErrorCode::not_found, "{} does not exist", path.string());
  if (path.extension() == ".gguf") return open_gguf(path);
  throw Error(ErrorCode::invalid_argument,
              fmt::format("{} is neither a checkpoint folder nor a .gguf file", path.string()),
              "give the folder that holds config.json, or the .gguf file");
}

}  // namespace tidelock::model

#include "model/convert.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/base.hpp"
#include "model/gguf_config.hpp"
#include "model/gguf_tensors.hpp"
#include "model/gguf_vocabulary.hpp"
#include "model/safetensors.hpp"

namespace tidelock::model {
namespace {

using numerics::block_elements;
using numerics::row_bytes;

constexpr std::int64_t kChunkElements = 1 << 20;  // converted at a time, so that no matrix is in memory twice

bool is_expert(const Parameter& p) {
  return p.name.find(".experts.") != std::string::npos;
}

// Hands the rows of a piece to `sink` in another format.
void produce_piece(const WeightSource& source, const Model& model, ParameterId id, int piece, Format to,
                   const ByteSink& sink) {
  std::vector<std::byte> scratch, blocks;
  const PieceShape shape = piece_shape(model.config(), model.parameter(id), piece);
  const Format from = source.format(id, piece);
  const auto rows = source.rows(id, piece, scratch);
  source.check_finite(id, piece, rows);
  if (from == to) return sink(rows);
  std::vector<float> values;
  const std::int64_t step = std::max<std::int64_t>(1, kChunkElements / shape.in);
  for (std::int64_t row = 0; row < shape.out; row += step) {
    const std::int64_t n = std::min(step, shape.out - row) * shape.in;
    values.resize(static_cast<std::size_t>(n));
    blocks.resize(row_bytes(to, n));
    numerics::dequantize(from, rows.data() + static_cast<std::size_t>(row) * row_bytes(from, shape.in), n,
                         values.data());
    numerics::quantize(to, values.data(), n, blocks.data());
    sink(blocks);
  }
}

std::uint32_t ggml_type(Format format) {
  constexpr std::array<std::uint32_t, 8> types = {ggml::f32,  ggml::bf16, ggml::q8_0,  ggml::q4_k,
                                                  ggml::q5_k, ggml::q6_k, ggml::mxfp4, ggml::q5_1};
  return types.at(static_cast<std::size_t>(format));
}

class Converter {
 public:
  Converter(const WeightSource& source, const Model& model, const ConvertOptions& options)
      : source_(source), model_(model), c_(model.config()), options_(options) {}

  ConvertReport to_gguf(const std::filesystem::path& out) {
    auto metadata = gguf_metadata(c_, out.stem().string());
    add_vocabulary(metadata);
    std::vector<GgufTensorToWrite> tensors;
    for (const GgufEntry& entry : gguf_entries(model_)) {
      tensors.push_back(gguf_tensor(entry));
      report_.bytes += gguf_tensor_bytes(tensors.back());
    }
    report_.tensors = tensors.size();
    if (c_.mla.latent_eps != c_.rms_eps || c_.kda.l2_eps != c_.rms_eps)
      report_.notices.push_back(fmt::format(
          "GGUF has one epsilon for all norms: other programs will take {} where this model has {} (latents) "
          "and {} (q, k); Tidelock reads its own from keys tidelock.*",
          c_.rms_eps, c_.mla.latent_eps, c_.kda.l2_eps));
    write_gguf(out, metadata, tensors);
    return std::move(report_);
  }

  ConvertReport to_folder(const std::filesystem::path& out) {
    Config config = c_;
    std::vector<TensorToWrite> tensors;
    if (options_.type == Format::f32 || options_.type == Format::bf16) config.format = *options_.type;
    packed_ = config.experts.packed = packs_experts();
    if (packed_) config.format = Format::bf16;
    for (std::size_t i = 0; i < model_.parameters().size(); ++i) add_safetensors(static_cast<ParameterId>(i), tensors);
    if (narrowed_ != 0)
      report_.notices.push_back(
          fmt::format("{} float32 matrices are rounded to bf16, as checkpoints with packed experts "
                      "have them",
                      narrowed_));
    report_.tensors = tensors.size();
    if (std::filesystem::exists(out) && !std::filesystem::is_empty(out))
      throw Error(ErrorCode::invalid_argument, fmt::format("{} exists and is not an empty folder", out.string()),
                  "give a new folder");
    std::filesystem::create_directories(out);
    write_file_atomic(out / "config.json", config_to_json(config));
    copy_tokenizer(out);
    report_.files = write_checkpoint(out, tensors, {{"format", "pt"}, {"tidelock_contract", numerics::kContractName}},
                                     options_.shard_bytes);
    return std::move(report_);
  }

 private:
  // The format in which a piece is written.
  Format target(const Parameter& p, ParameterId id, int piece) {
    const Format from = source_.format(id, piece);
    if (p.kind == ParameterKind::router) return Format::f32;
    if (!options_.type || (*options_.type == Format::mxfp4 && !is_expert(p))) return from;
    if (piece_shape(c_, p, piece).in % block_elements(*options_.type) == 0) return *options_.type;
    return from;
  }
  void count_kept(Format to) {
    if (options_.type && *options_.type != Format::mxfp4 && to != *options_.type) ++report_.kept;
  }

  GgufTensorToWrite gguf_tensor(const GgufEntry& entry) {
    GgufTensorToWrite out{entry.name, ggml::f32, entry.ne, nullptr};
    const ParameterId id = entry.parameters.front();
    const Parameter& p = model_.parameter(id);
    switch (entry.role) {
      case GgufRole::vector:
      case GgufRole::conv:
      case GgufRole::decay:
      case GgufRole::score:
        out.produce = [this, entry](const ByteSink& sink) { produce_vector(entry, sink); };
        return out;
      case GgufRole::matrix:
      case GgufRole::experts:
      case GgufRole::keys:
      case GgufRole::values:
        break;
    }
    const int piece = entry.role == GgufRole::values ? 1 : 0;
    const Format to = target(p, id, piece);
    if (p.kind != ParameterKind::router) count_kept(to);
    out.type = ggml_type(to);
    out.produce = [this, entry, piece, to](const ByteSink& sink) {
      for (const ParameterId each : entry.parameters) produce_piece(source_, model_, each, piece, to, sink);
    };
    return out;
  }

  void produce_vector(const GgufEntry& entry, const ByteSink& sink) const {
    std::vector<float> x, norm;
    source_.values(entry.parameters.back(), x);
    if (entry.role == GgufRole::conv) x = turn_conv(x, false);
    if (entry.role == GgufRole::decay)
      for (float& a : x) a = -std::exp(a);
    if (entry.role == GgufRole::score) {
      source_.values(entry.parameters.front(), norm);
      for (std::size_t i = 0; i < x.size(); ++i) x[i] *= norm[i];
    }
    sink(std::as_bytes(std::span(x)));
  }

  void add_vocabulary(std::vector<std::pair<std::string, GgufValue>>& metadata) {
    GgufMetadata vocabulary = source_.vocabulary();
    const bool ours = vocabulary.empty();  // else the source's own keys, end tokens included
    if (ours && std::filesystem::exists(source_.path() / "tokenizer_config.json"))
      vocabulary = write_vocabulary(Tokenizer::load(source_.path()), c_.vocab);
    if (vocabulary.empty()) {
      vocabulary.emplace("tokenizer.ggml.model", GgufValue::of("none"));
      report_.notices.emplace_back("the file has no vocabulary (tokenizer.ggml.model = none): the source has none");
    }
    metadata.insert(metadata.end(), vocabulary.begin(), vocabulary.end());
    if (!ours) return;
    const char* keys[] = {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"};
    for (std::size_t i = 0; i < std::min(c_.end_tokens.size(), std::size(keys)); ++i)
      metadata.emplace_back(keys[i], GgufValue::of(static_cast<std::uint32_t>(c_.end_tokens[i])));
  }

  bool packs_experts() {
    for (const LayerIds& layer : model_.layers)
      for (const auto* list : {&layer.ffn.expert_gate, &layer.ffn.expert_up, &layer.ffn.expert_down})
        for (const ParameterId id : *list)
          if (target(model_.parameter(id), id, 0) == Format::mxfp4) return true;
    return false;
  }

  void add_safetensors(ParameterId id, std::vector<TensorToWrite>& tensors) {
    const Parameter& p = model_.parameter(id);
    TensorToWrite out{p.name, Dtype::f32, p.shape, {}, nullptr};
    if (p.kind == ParameterKind::vector || p.kind == ParameterKind::conv || p.kind == ParameterKind::router) {
      out.produce = [this, id, &p](const ByteSink& sink) {
        std::vector<float> x;
        source_.values(id, x);
        if (p.kind == ParameterKind::conv) x = turn_conv(x, false);
        sink(std::as_bytes(std::span(x)));
      };
      return add(std::move(out), tensors);
    }
    Format to = target(p, id, 0);
    if (to == Format::mxfp4 && is_expert(p)) return add_packed(id, tensors);
    if (to != Format::f32 && to != Format::bf16)
      throw Error(ErrorCode::not_supported,
                  fmt::format("{} is {}, for which safetensors checkpoints have no form", p.name, format_name(to)),
                  "choose --type bf16 or --type f32");
    count_kept(to);
    if (to == Format::f32 && packed_) {
      to = Format::bf16;
      ++narrowed_;
    }
    out.dtype = to == Format::f32 ? Dtype::f32 : Dtype::bf16;
    out.produce = [this, id, &p, to](const ByteSink& sink) {
      if (p.kind != ParameterKind::absorbed) return produce_piece(source_, model_, id, 0, to, sink);
      std::vector<float> x;
      source_.values(id, x);
      std::vector<std::byte> rows(row_bytes(to, p.count()));
      numerics::quantize(to, x.data(), p.count(), rows.data());
      sink(rows);
    };
    add(std::move(out), tensors);
  }

  // Two tensors, codes and scales, from blocks of both.
  void add_packed(ParameterId id, std::vector<TensorToWrite>& tensors) {
    const Parameter& p = model_.parameter(id);
    const auto produce = [this, id](bool scales) {
      return [this, id, scales](const ByteSink& sink) {
        std::vector<std::byte> out;
        produce_piece(source_, model_, id, 0, Format::mxfp4, [&](std::span<const std::byte> blocks) {
          out.resize(blocks.size() / 17 * (scales ? 1 : 16));
          for (std::size_t i = 0; i < blocks.size() / 17; ++i)
            if (scales)
              out[i] = blocks[i * 17];
            else
              from_ggml_nibbles(blocks.data() + i * 17 + 1, out.data() + i * 16);
          sink(out);
        });
      };
    };
    add({p.name + "_packed", Dtype::u8, {p.shape[0], p.shape[1] / 2}, {}, produce(false)}, tensors);
    add({p.name + "_scale", Dtype::u8, {p.shape[0], p.shape[1] / 32}, {}, produce(true)}, tensors);
  }

  void add(TensorToWrite tensor, std::vector<TensorToWrite>& tensors) {
    std::uint64_t bytes = dtype_size(tensor.dtype);
    for (const std::int64_t d : tensor.shape) bytes *= static_cast<std::uint64_t>(d);
    report_.bytes += bytes;
    tensors.push_back(std::move(tensor));
  }

  void copy_tokenizer(const std::filesystem::path& out) {
    bool any = false;
    for (const char* name : {"tiktoken.model", "tokenizer_config.json", "special_tokens_map.json",
                             "chat_template.jinja", "generation_config.json"}) {
      if (!std::filesystem::is_regular_file(source_.path() / name)) continue;
      write_file_atomic(out / name, read_file(source_.path() / name, 256 << 20));
      any = true;
    }
    if (!any) report_.notices.emplace_back("the folder has no tokenizer: the source has none as files");
  }

  const WeightSource& source_;
  const Model& model_;
  const Config& c_;
  ConvertOptions options_;
  ConvertReport report_;
  bool packed_ = false;  // the folder's routed experts are MXFP4
  std::size_t narrowed_ = 0;
};

}  // namespace

ConvertReport convert_model(const std::filesystem::path& in, const std::filesystem::path& out,
                            const ConvertOptions& options) {
  if (!options.to_gguf && options.type == Format::q8_0)
    throw Error(ErrorCode::not_supported, "q8_0 has no form in safetensors checkpoints", "convert --to gguf");
  if (options.to_gguf && out.extension() != ".gguf")
    throw Error(ErrorCode::invalid_argument, fmt::format("{} does not end in .gguf", out.string()),
                "name the file to write, for instance model.gguf");
  const auto source = open_weights(in);
  const Model model(source->config(), false);
  source->bind(model);
  Converter converter(*source, model, options);
  return options.to_gguf ? converter.to_gguf(out) : converter.to_folder(out);
}

}  // namespace tidelock::model

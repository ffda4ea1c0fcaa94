#include <map>

#include "base/base.hpp"
#include "cli/cli.hpp"
#include "cli/sizes.hpp"
#include "model/gguf.hpp"
#include "model/plan.hpp"
#include "model/weight_source.hpp"

namespace tidelock::cli {
namespace {

using model::ParameterId;

std::string count_text(std::int64_t parameters) {
  const auto n = static_cast<double>(parameters);
  return n >= 1e9 ? fmt::format("{:.2f} billion", n / 1e9) : fmt::format("{:.3g} million", n / 1e6);
}

std::string yes(bool value, const char* text) {
  return value ? std::string(", ") + text : std::string();
}

void print_architecture(const model::Config& c) {
  const auto kda = static_cast<int>(std::count(c.layers.begin(), c.layers.end(), model::LayerKind::kda));
  fmt::print("layers        {} ({} KDA, {} MLA{}), hidden {}, vocabulary {}, context {}\n", c.layer_count(), kda,
             c.layer_count() - kda,
             c.residual_block == 0 ? "" : fmt::format(", block residuals every {}", c.residual_block), c.hidden,
             c.vocab, c.max_context);
  if (kda != 0)
    fmt::print("KDA           {} heads of {}{}{}\n", c.kda.heads, c.kda.head_dim,
               c.kda.bounded ? fmt::format(", gate bounded at {}", c.kda.lower_bound) : ", gate unbounded",
               yes(c.kda.full_rank_gate, "full-rank output gate"));
  if (kda != c.layer_count())
    fmt::print(
        "MLA           {} heads, latent {} + {}, query {} + {}, value {}{}{}{}\n", c.mla.heads, c.mla.latent,
        c.mla.extra, c.mla.nope, c.mla.extra, c.mla.value,
        c.mla.q_lora == 0 ? "" : fmt::format(", q-LoRA {}", c.mla.q_lora), yes(c.mla.output_gate, "output gate"),
        c.index.heads == 0 ? "" : fmt::format(", indexer {} x {} picks {}", c.index.heads, c.index.dim, c.index.top_k));
  if (c.experts.count != 0)
    fmt::print("experts       {} of {} a token, width {}{}, {} shared; dense before layer {}\n", c.experts.top_k,
               c.experts.count, c.experts.intermediate,
               c.experts.latent == 0 ? "" : fmt::format(" on a latent of {}", c.experts.latent), c.experts.shared,
               c.first_dense);
}

// Bytes in the file by (row, type), rows as they are first seen.
class Table {
 public:
  void add(const std::string& row, std::string_view type, std::uint64_t bytes) {
    if (!cells_.contains(row)) rows_.push_back(row);
    cells_[row][std::string(type)] += bytes;
  }
  static void head(const char* what) { fmt::print("\n{:<32}{:>12}  {}\n", what, "in the file", "of which"); }
  void print() const {
    for (const auto& row : rows_) {
      std::uint64_t total = 0;
      std::string parts;
      for (const auto& [type, bytes] : cells_.at(row)) {
        total += bytes;
        parts += fmt::format("{}{} {}", parts.empty() ? "" : ", ", bytes_text(bytes), type);
      }
      fmt::print("{:<32}{:>12}  {}\n", row, bytes_text(total), parts);
    }
  }

 private:
  std::vector<std::string> rows_;
  std::map<std::string, std::map<std::string, std::uint64_t>> cells_;
};

std::string layer_row(const model::Model& m, const std::string& name) {
  const std::size_t at = name.find("layers.");
  if (at == std::string::npos) return "embedding, head, last norms";
  const int layer = std::stoi(name.substr(at + 7));
  const model::Config& c = m.config();
  return fmt::format("layer {:>3}  {}  {}", layer,
                     c.layers[static_cast<std::size_t>(layer)] == model::LayerKind::kda ? "KDA" : "MLA",
                     c.is_dense_ffn(layer) ? "dense" : "experts");
}

void print_model(const model::WeightSource& source, const model::Model& m) {
  Table groups, all, layers;
  std::uint64_t packed = 0;
  const auto format = [&](ParameterId id, int piece) { return source.format(id, piece); };
  for (ParameterId id = 0; id < static_cast<ParameterId>(m.parameters().size()); ++id) {
    const model::StoredWeight stored = source.stored(id);
    groups.add(model::group_name(model::weight_group(m, id)), stored.type, stored.bytes);
    layers.add(layer_row(m, m.parameter(id).name), stored.type, stored.bytes);
    all.add("all weights", stored.type, stored.bytes);
    packed += model::packed_parameter_bytes(m, id, format);
  }
  fmt::print("parameters    {}, {} active a token\n", count_text(m.parameter_count()),
             count_text(m.active_parameter_count()));
  print_architecture(m.config());
  Table::head("weights");
  groups.print();
  all.print();
  Table::head("layer");
  layers.print();
  fmt::print("\nsupported     yes; {} in memory once packed, {} of it free here\n", bytes_text(packed),
             bytes_text(available_memory()));
}

// What a file that cannot be run says about itself.
void print_refused(const std::filesystem::path& path, const Error& error) {
  if (path.extension() == ".gguf" && std::filesystem::is_regular_file(path)) {
    try {
      const model::GgufModel file(path);
      std::map<std::string, std::uint64_t> types;
      for (const auto& [name, tensor] : file.tensors()) types[std::string(tensor->type->name)] += tensor->bytes.size();
      const auto* arch = file.find_key("general.architecture");
      fmt::print("architecture  {}, {} tensors\n", arch == nullptr || arch->strings.empty() ? "?" : arch->strings[0],
                 file.tensors().size());
      for (const auto& [type, bytes] : types) fmt::print("{:<14}{}\n", type, bytes_text(bytes));
    } catch (const Error&) {  // then the first error says it all
    }
  }
  fmt::print("supported     no: {}\n", error.what());
}

int run(const std::string& path) {
  fmt::print("model         {}\n", path);
  try {
    const auto source = model::open_weights(path);
    fmt::print("kind          {}\n", source->kind());
    const model::Model m(source->config(), false);
    source->bind(m);
    print_model(*source, m);
    return 0;
  } catch (const Error& error) {
    print_refused(path, error);
    return exit_code(error.code());
  }
}

}  // namespace

Action add_info(CLI::App& app) {
  auto path = std::make_shared<std::string>();
  app.add_option("model", *path, "checkpoint folder or .gguf file")->required();
  return [path] { return run(*path); };
}

}  // namespace tidelock::cli

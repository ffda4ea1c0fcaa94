#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "base/base.hpp"
#include "cli/cli.hpp"
#include "cli/sizes.hpp"
#include "model/plan.hpp"
#include "model/weight_source.hpp"

namespace tidelock::cli {
namespace {

struct PlanOptions {
  std::string model, memory, nvme, bandwidth, context;
  std::int64_t sequences = 1;
  int threads = 0;
  bool json = false;
};

// The shape of a model and its formats: of a checkpoint, or of a config.json alone.
struct Shape {
  std::unique_ptr<model::WeightSource> source;
  std::unique_ptr<model::Model> model;
  model::FormatOf format;
};

Shape read_shape(const std::filesystem::path& path) {
  Shape shape;
  const bool folder = std::filesystem::is_directory(path);
  const bool weights = folder && (std::filesystem::exists(path / "model.safetensors") ||
                                  std::filesystem::exists(path / "model.safetensors.index.json"));
  if (weights || path.extension() == ".gguf") {
    shape.source = model::open_weights(path);
    shape.model = std::make_unique<model::Model>(shape.source->config(), false);
    shape.source->bind(*shape.model);
    shape.format = [source = shape.source.get()](model::ParameterId id, int piece) {
      return source->format(id, piece);
    };
    return shape;
  }
  const std::filesystem::path config = folder ? path / "config.json" : path;
  shape.model =
      std::make_unique<model::Model>(model::parse_config(read_file(config, 16 << 20), config.string()), false);
  shape.format = model::config_formats(*shape.model);
  return shape;
}

void print_ledger(const char* title, const std::vector<model::LedgerLine>& lines, const std::string& total) {
  fmt::print("\n{}\n", title);
  for (const auto& line : lines) fmt::print("  {:<46}{:>12}\n", line.what, bytes_text(line.bytes));
  fmt::print("  {:<46}{:>12}\n", "total", total);
}

void print_verdict(const model::Plan& p, const model::PlanRequest& r) {
  const std::uint64_t needed = p.weight_bytes + p.state_bytes + p.workspace_bytes;
  fmt::print("\nmemory        {} needed, {} given: {}\n", bytes_text(needed), bytes_text(r.memory),
             p.fits ? "fits" : "does not fit; refused without --weights mmap");
  if (!p.fits)
    fmt::print("streamed      {} of {} would stay in memory, {} a step would come from NVMe\n",
               bytes_text(p.resident_bytes), bytes_text(p.weight_bytes + p.state_bytes), bytes_text(p.streamed_bytes));
  if (p.step_seconds > 0)
    fmt::print("decode        at most {:.3g} tokens/s in all, {:.3g} each ({:.3g} s a step; memory {}/s{})\n",
               p.tokens_per_second, p.tokens_per_second / static_cast<double>(r.sequences), p.step_seconds,
               bytes_text(static_cast<std::uint64_t>(r.memory_bandwidth)),
               p.fits ? "" : fmt::format(", NVMe {}/s", bytes_text(static_cast<std::uint64_t>(r.nvme))));
  else
    fmt::print("decode        no speed: {}\n",
               p.resident_bytes == 0 ? "the work memory alone does not fit" : "give --nvme to stream the rest");
}

void print_json(const model::Plan& p, const model::PlanRequest& r) {
  const auto ledger = [](const std::vector<model::LedgerLine>& lines) {
    nlohmann::json out = nlohmann::json::array();
    for (const auto& line : lines) out.push_back({{"what", line.what}, {"bytes", line.bytes}});
    return out;
  };
  const nlohmann::json out = {{"context", r.context},
                              {"sequences", r.sequences},
                              {"memory", r.memory},
                              {"memory_bandwidth", r.memory_bandwidth},
                              {"nvme", r.nvme},
                              {"persists", ledger(p.persists)},
                              {"workspace", ledger(p.workspace)},
                              {"moved_per_step", ledger(p.moved)},
                              {"weight_bytes", p.weight_bytes},
                              {"state_bytes", p.state_bytes},
                              {"workspace_bytes", p.workspace_bytes},
                              {"moved_bytes", p.moved_bytes},
                              {"fits", p.fits},
                              {"resident_bytes", p.resident_bytes},
                              {"streamed_bytes", p.streamed_bytes},
                              {"step_seconds", p.step_seconds},
                              {"tokens_per_second", p.tokens_per_second}};
  fmt::print("{}\n", out.dump());
}

int run(const PlanOptions& o) {
  const Shape shape = read_shape(o.model);
  model::PlanRequest request;
  const std::int64_t most = shape.model->config().max_context;
  request.context = o.context.empty() ? std::min<std::int64_t>(4096, most) : parse_tokens(o.context, "--context");
  if (request.context > most)
    fail(ErrorCode::invalid_argument, "--context {}: the model's context is {}", request.context, most);
  request.sequences = o.sequences;
  request.memory = o.memory.empty() ? available_memory() : parse_bytes(o.memory, "--memory");
  request.nvme = o.nvme.empty() ? 0 : parse_rate(o.nvme, "--nvme");
  request.memory_bandwidth =
      o.bandwidth.empty() ? measure_bandwidth(resolve_threads(o.threads)) : parse_rate(o.bandwidth, "--bandwidth");
  const model::Plan plan = model::make_plan(*shape.model, shape.format, request);
  if (o.json) {
    print_json(plan, request);
    return 0;
  }
  fmt::print("{}: {} sequence{} with {} tokens each\n", o.model, request.sequences, request.sequences == 1 ? "" : "s",
             request.context);
  print_ledger("what persists", plan.persists, bytes_text(plan.weight_bytes + plan.state_bytes));
  print_ledger("workspace (one arena serves both)", plan.workspace, bytes_text(plan.workspace_bytes));
  print_ledger("moved per decode step", plan.moved, bytes_text(plan.moved_bytes));
  print_verdict(plan, request);
  return 0;
}

}  // namespace

Action add_plan(CLI::App& app) {
  auto o = std::make_shared<PlanOptions>();
  app.add_option("model", o->model, "checkpoint folder, .gguf file, or a config.json without weights")->required();
  app.add_option("--memory", o->memory, "such as 64G (powers of 1024); without it what is free here");
  app.add_option("--nvme", o->nvme, "read rate of the drive, such as 7GB/s; without it nothing is streamed");
  app.add_option("--bandwidth", o->bandwidth, "read rate of memory, such as 34GB/s; without it it is measured here");
  app.add_option("--context", o->context, "tokens behind each sequence, such as 1M; without it 4096");
  app.add_option("--sequences", o->sequences, "decoded together")->check(CLI::Range(1, 1 << 20));
  app.add_flag("--json", o->json, "one JSON object instead of text");
  add_threads(app, o->threads);
  return [o] { return run(*o); };
}

}  // namespace tidelock::cli

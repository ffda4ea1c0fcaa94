// cli/: `tidelock <verb>`. Each verb parses its own arguments and returns the process's exit code; errors are thrown as
// Error and printed by main(). Exit codes: 0 done, 1 failure, 2 wrong input, 3 a mismatch of bits.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/team.hpp"
#include "model/packed_weights.hpp"

namespace tidelock::cli {

// A verb registers its options on `app` and returns what to run when it was chosen.
using Action = std::function<int()>;
Action add_rl(CLI::App& app);
Action add_train(CLI::App& app);
Action add_eval(CLI::App& app);
Action add_generate(CLI::App& app);
Action add_serve(CLI::App& app);
Action add_events(CLI::App& app);
Action add_logits(CLI::App& app);
Action add_info(CLI::App& app);
Action add_convert(CLI::App& app);
Action add_plan(CLI::App& app);
Action add_sandbox(CLI::App& app);
Action add_bench(CLI::App& app);
Action add_bench_model(CLI::App& app);

// --threads for every verb that computes; 0 stands for all cores this process may use.
void add_threads(CLI::App& app, int& threads);
int resolve_threads(int threads);

// --weights and --packed for every verb that runs a model without training it.
struct WeightOptions {
  std::string place = "memory", packed;
};
void add_weights(CLI::App& app, WeightOptions& options);
std::unique_ptr<model::Model> load_weights(model::WeightSource& source, const WeightOptions& options, Team& team);
std::unique_ptr<model::Model> load_weights(const std::string& path, const WeightOptions& options, Team& team);

}  // namespace tidelock::cli

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "base/base.hpp"
#include "cli/cli.hpp"

namespace tidelock::cli {

// `bench kernels` runs the separate program bench_kernels, which links the peers that it compares with.
Action add_bench(CLI::App& app) {
  struct Options {
    std::vector<std::string> rest;
  };
  auto o = std::make_shared<Options>();
  CLI::App* kernels = app.add_subcommand(
      "kernels", "matrix products, GEMV and KDA against oneDNN, plain recurrences and the machine's limits");
  kernels->allow_extras();
  kernels->prefix_command();
  kernels->footer(
      "Options: --json (one object per line: name, value, unit, peer, ratio), --threads N, --filter SUBSTRING");
  CLI::App* model = app.add_subcommand("model", "prefill and decode speed of a checkpoint, as llama-bench measures it");
  const Action run_model = add_bench_model(*model);
  app.require_subcommand(1);
  return [kernels, model, run_model] {
    if (model->parsed()) return run_model();
    const auto program = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "bench_kernels";
    if (!std::filesystem::exists(program))
      throw Error(ErrorCode::not_found, fmt::format("{} was not built", program.string()),
                  "install libdnnl-dev and configure with -DTIDELOCK_BENCH=ON");
    std::vector<std::string> arguments = kernels->remaining();
    std::vector<char*> argv{const_cast<char*>(program.c_str())};
    for (auto& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    ::execv(program.c_str(), argv.data());
    fail_errno("cannot run", program.string());
    return 1;
  };
}

}  // namespace tidelock::cli

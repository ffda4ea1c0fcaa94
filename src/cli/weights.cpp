#include "cli/cli.hpp"

namespace tidelock::cli {

void add_weights(CLI::App& app, WeightOptions& options) {
  app.add_option("--packed", options.packed,
                 "file of packed weights: made when it is missing or stale, and loaded at the speed of reading");
  app.add_option("--weights", options.place,
                 "memory; or mmap: run from the file of --packed, for models larger than memory")
      ->check(CLI::IsMember({"memory", "mmap"}))
      ->capture_default_str();
}

std::unique_ptr<model::Model> load_weights(model::WeightSource& source, const WeightOptions& options, Team& team) {
  return model::load_packed(source, {options.packed, options.place == "mmap"}, team);
}

std::unique_ptr<model::Model> load_weights(const std::string& path, const WeightOptions& options, Team& team) {
  return load_weights(*model::open_weights(path), options, team);
}

}  // namespace tidelock::cli

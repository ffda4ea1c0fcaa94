// `tidelock sandbox serve`.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace tidelock::cli {

struct SandboxServeOptions {
  std::string listen = "127.0.0.1:3000", keys;
  std::vector<std::string> templates{"base=busybox"}, images{"busybox=busybox"};
  int memory_mib = 256, disk_mib = 256, processes = 128, pool = 0, max_body_mib = 64;
};

void add_sandbox_serve(CLI::App& app, SandboxServeOptions& options);
int serve_sandboxes(const std::string& directory, const std::string& accelerator, const SandboxServeOptions& options);

}  // namespace tidelock::cli

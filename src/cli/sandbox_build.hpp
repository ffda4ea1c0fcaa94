// `tidelock sandbox build`, `upload` and `download`.
#pragma once

#include <string>

#include "sandbox/sandbox.hpp"

namespace tidelock::cli {

struct BuildRequest {
  std::string recipe;   // a file; empty: the image as it is
  std::string name;     // of the template
  std::string context;  // folder of COPY's files and of FROM; empty: the recipe's
  bool no_cache = false;
};

// Builds a template and prints what its steps say on standard error. `spec` has the image (without a recipe) and sizes.
int build_named(sandbox::Runtime& runtime, const sandbox::Spec& spec, const BuildRequest& request);

// One file, or "-" for standard input and output. The file here is written whole or not at all. Throws Error.
int upload(sandbox::Sandbox& box, const std::string& from, const std::string& to);
int download(sandbox::Sandbox& box, const std::string& from, const std::string& to);

}  // namespace tidelock::cli

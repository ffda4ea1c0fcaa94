#include "cli/sandbox_build.hpp"

#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <iostream>
#include <iterator>

#include "base/base.hpp"
#include "sandbox/build/archive.hpp"
#include "sandbox/build/builder.hpp"

namespace tidelock::cli {
namespace fs = std::filesystem;
namespace {

constexpr std::uint64_t kMaxFile = 1ULL << 30;  // bytes of one that is copied; it is in memory for a while

sandbox::BuildRecipe read_recipe(const sandbox::Spec& spec, const BuildRequest& request, const fs::path& context) {
  sandbox::BuildRecipe out;
  if (request.recipe.empty()) {
    out.image = spec.image;
    return out;
  }
  out = sandbox::parse_recipe(read_file(request.recipe, 1U << 20), request.recipe);
  if (!out.image.empty() && out.image != "busybox" && fs::exists(context / out.image))
    out.image = (context / out.image).string();
  return out;
}

}  // namespace

int build_named(sandbox::Runtime& runtime, const sandbox::Spec& spec, const BuildRequest& request) {
  if (request.name.empty())
    throw Error(ErrorCode::invalid_argument, "sandbox build: a recipe needs the template's name", "give --name NAME");
  const fs::path beside = fs::path(request.recipe).parent_path();
  const fs::path context = !request.context.empty() ? fs::path(request.context) : beside.empty() ? "." : beside;
  if (!fs::is_directory(context)) fail(ErrorCode::not_found, "--context {}: expected a folder", context.string());
  sandbox::BuildRecipe recipe = read_recipe(spec, request, context);
  recipe.force = request.no_cache;
  sandbox::BuildOptions options;
  options.name = request.name;
  options.limits = spec.limits;
  options.files = [&context](const sandbox::BuildStep& step) {
    return sandbox::archive_files(context.string(), step.arguments.at(0));
  };
  options.log = [](int step, const std::string& line) {
    if (step > 0)
      fmt::print(stderr, "[{}] {}\n", step, line);
    else
      fmt::print(stderr, "{}\n", line);
  };
  const sandbox::BuildResult result = sandbox::build_template(runtime, recipe, options);
  fmt::print("template {}: {} steps done, {} were done before\n", request.name, result.done, result.cached);
  return 0;
}

int upload(sandbox::Sandbox& box, const std::string& from, const std::string& to) {
  std::string content;
  if (from == "-") {
    content.assign(std::istreambuf_iterator<char>(std::cin), {});
  } else {
    content = read_file(from, kMaxFile);
  }
  box.files({.operation = sandbox::FileCommand::Operation::write, .path = to, .content = content});
  return 0;
}

int download(sandbox::Sandbox& box, const std::string& from, const std::string& to) {
  const std::string content = box.read_file(from, kMaxFile);
  if (to != "-") {
    write_file_atomic(to, content);
  } else if (std::fwrite(content.data(), 1, content.size(), stdout) != content.size() || std::fflush(stdout) != 0) {
    fail(ErrorCode::io, "cannot write to standard output");
  }
  return 0;
}

}  // namespace tidelock::cli

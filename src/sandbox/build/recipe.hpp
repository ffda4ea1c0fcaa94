// Recipes of templates: what an image is changed by before sandboxes are made from it. Pure.
//
//   FROM image.tar                  an OCI image layout (folder or archive), a folder, busybox, or template:NAME
//   ENV NAME=value OTHER="a value"  of every later command, and of every command in the sandboxes
//   WORKDIR /app                    made when it is not there; where later commands run
//   USER root                       or user (uid 1000, the first); whose rights later commands have
//   COPY source... destination      files and folders beside the recipe, by their paths; * and ? are looked up there
//   RUN command                     by /bin/bash -c, or /bin/sh -c where there is no bash
//   START command                   goes on running in every sandbox of the template
//   READY command                   the template is taken when it ends with code 0
//
// A line that ends with a backslash goes on with the next; a line that begins with # is a comment.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "sandbox/sandbox.hpp"

namespace tidelock::sandbox {

struct BuildStep {
  enum class Kind { run, copy, env, workdir, user };
  Kind kind{};
  // run: COMMAND [USER]; copy: SOURCE DESTINATION [USER [MODE]]; env: NAME VALUE...; workdir: PATH; user: NAME
  std::vector<std::string> arguments;
  bool force = false;  // done again, with all that follow, even if it was done before
};

struct BuildRecipe {
  std::string image, snapshot;  // what it starts from: an image as of Spec, or a snapshot (a template); one of the two
  std::vector<BuildStep> steps;
  std::string start, ready;  // commands; empty: none
  bool force = false;        // every step is done again
};

// Throws Error{invalid_argument} naming `name`, the line and what was expected.
BuildRecipe parse_recipe(std::string_view text, const std::string& name);

// Refuses what a step cannot be, wherever it came from. Throws Error{invalid_argument}.
void check_step(const BuildStep& step);

// One line about a step, for logs.
std::string describe(const BuildStep& step);

// What `defaults` are after a step; files are not looked at.
Defaults after_step(Defaults defaults, const BuildStep& step);

// `path` as it is from `directory`: absolute, without "." and ".." parts.
std::string resolve_path(const std::string& directory, const std::string& path);

}  // namespace tidelock::sandbox

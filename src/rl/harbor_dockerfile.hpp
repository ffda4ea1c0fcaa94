// The part of a Dockerfile that needs no build. Private to rl/.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "rl/task.hpp"

namespace tidelock::rl {

struct Dockerfile {
  std::string image;      // of FROM
  std::string directory;  // of the last WORKDIR; "/" without one
  std::map<std::string, std::string> environment;
  std::vector<SandboxFile> files;  // of COPY
};

// FROM, WORKDIR, ENV and COPY of files beside it are honoured; LABEL, EXPOSE and CMD change nothing for an agent and
// are passed over; everything else is Error{not_supported} naming the file, the line and the instruction.
Dockerfile read_dockerfile(const std::filesystem::path& path);

// All regular files below `directory`, with paths below `target` and their mode; sorted. Links and special files are
// Error{not_supported}, more than 64 MiB in all is Error{exhausted}.
std::vector<SandboxFile> read_tree(const std::filesystem::path& directory, const std::string& target);

}  // namespace tidelock::rl

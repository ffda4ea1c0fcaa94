// Tasks in Harbor form (spec of the format: the Harbor project's task.toml, schema 1.0 and 1.1): a folder of folders
//
//   NAME/task.toml             limits and time-outs; every key that would change the task's meaning and is not honoured
//                              here is refused by name
//   NAME/instruction.md        the user's message
//   NAME/environment/          files for the sandbox; Dockerfile: FROM, WORKDIR, ENV and COPY of local files; RUN and
//                              all else would need a build and is refused by name
//   NAME/tests/test.sh         uploaded to /tests after the agent ended; writes /logs/verifier/reward.json or
//   reward.txt NAME/solution/             never read
//
// FROM busybox (any tag) or no Dockerfile at all is the built-in image. Any other image must be named in `images`.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "rl/task.hpp"

namespace tidelock::rl {

struct HarborOptions {
  std::map<std::string, std::string> images;  // image name in FROM or docker_image -> template name or root directory
};

// Reads one task folder. Throws Error naming the file and the field: not_found, corrupt_data or not_supported.
Episode load_harbor_task(const std::filesystem::path& directory, const HarborOptions& options = {});

// All tasks below `directory`, by name ascending. Throws Error{not_found} when there is none.
std::vector<Episode> load_harbor_tasks(const std::filesystem::path& directory, const HarborOptions& options = {});

// A family over such a folder: make() draws one of the tasks of the split (split by the task's name, as everywhere).
// Difficulty is ignored. It has no demonstrations.
std::unique_ptr<TaskFamily> make_harbor_family(const std::filesystem::path& directory,
                                               const HarborOptions& options = {});

}  // namespace tidelock::rl

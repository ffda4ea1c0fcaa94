// The run directory: the only thing of ours that the host's file system ever shows.
//
//   <base>/tidelock-sandbox-XXXXXX/   owner: one runtime and its helper; removed when both are gone
//     lock       held (flock) while either lives; a directory whose lock can be taken is stale
//     cgroups    one cgroup directory a line, written before it is made
//     mnt        where a container mounts its root in its own mount namespace; empty on the host
//     empty      a root without files, to try the runtime with
//     busybox    the built-in image, read-only
// Everything in it can be rebuilt; nothing in it outlives the run.
#pragma once

#include <filesystem>
#include <string>

#include "sandbox/wire.hpp"

namespace tidelock::sandbox {

// Makes a new run directory under `base` and takes its lock. Removes stale ones of the same user first: their
// processes, cgroups and files. Throws Error{io}.
struct RunDirectory {
  std::filesystem::path path;
  FileDescriptor lock;
};
RunDirectory make_run_directory(const std::filesystem::path& base);

// Removes what a run left: processes in its cgroups, the cgroups, the files. The caller holds the lock or knows the
// owner dead. Never throws: what cannot be removed is logged.
void remove_run_directory(const std::filesystem::path& path) noexcept;

void record_cgroup(const std::filesystem::path& run, const std::filesystem::path& cgroup);

}  // namespace tidelock::sandbox

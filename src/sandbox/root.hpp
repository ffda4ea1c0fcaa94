// A container's root: an overlay of the image (read-only) and a size-limited tmpfs, with its own /dev and /proc.
//
// Everything is mounted in the container's own mount namespace, so the kernel removes it with the last process: the
// host never sees a mount, and never stores a byte of what the container writes.
#pragma once

#include <cstdint>
#include <string>

#include "sandbox/wire.hpp"

namespace tidelock::sandbox {

struct RootPlan {
  std::string image_root;   // directory, read-only
  std::string mount_point;  // an empty directory of the run
  std::uint64_t disk_bytes = 0;
  std::uint32_t uid = 0;  // owner of /root; the user that commands run as
  bool user_namespace = false;
  int copy_from = -1;  // upper directory of another container to start from; -1: none
};

// Run in the new namespaces, before any command. Makes the root, enters it, and returns the upper directory (an O_PATH
// descriptor, for forks). Throws Error{not_supported} or Error{io} naming the step.
FileDescriptor enter_root(const RootPlan& plan);

// Brings the loopback interface of the calling network namespace up.
void raise_loopback();

}  // namespace tidelock::sandbox

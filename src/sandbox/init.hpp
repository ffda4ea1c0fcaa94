// Process 1 of a container: takes requests from the program, runs them as the container's user, reaps.
//
// It is trusted code with a few capabilities inside the container's namespaces; commands run without any.
// Single-threaded: it never waits for anything but its one poll.
#pragma once

#include <linux/filter.h>

#include <cstdint>
#include <string>
#include <vector>

#include "sandbox/wire.hpp"

namespace tidelock::sandbox {

struct InitPlan {
  FileDescriptor socket;  // to the program
  std::uint32_t uid = 0;  // of commands
  Limits limits;
  bool user_namespace = false;
  bool limit_memory = false;  // by rlimit, because no cgroup does
  const std::vector<sock_filter>* filter = nullptr;
};

// Serves until the program closes the socket. Does not return.
[[noreturn]] void serve_init(InitPlan plan, FileDescriptor upper);

}  // namespace tidelock::sandbox

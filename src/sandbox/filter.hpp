// The system calls that a command in a container may make.
//
// An allow-list: what is not named fails with ENOSYS (so that a C library tries the older way), what is known and
// refused fails with EPERM. Nothing that mounts, traces, loads, makes namespaces, opens raw or kernel-facing sockets,
// or submits work past the filter (io_uring) is allowed.
#pragma once

#include <linux/filter.h>

#include <vector>

namespace tidelock::sandbox {

// Compiles the filter once; ~2 ms. Throws Error{not_supported} when libseccomp refuses this machine.
std::vector<sock_filter> compile_filter();

// Installs it in the calling thread for good (needs no_new_privs). False and errno on failure.
bool install_filter(const std::vector<sock_filter>& program) noexcept;

}  // namespace tidelock::sandbox

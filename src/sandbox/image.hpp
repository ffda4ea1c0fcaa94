// Images: read-only roots of containers.
#pragma once

#include <filesystem>

namespace tidelock::sandbox {

// Builds the image "busybox" at `root` (which must not exist) from the host's static busybox: every applet as a link,
// /etc/passwd, /etc/group, /root, /tmp. About 2 MB and 5 ms. Throws Error{not_supported} when the host has no static
// busybox, Error{io}.
void build_busybox_image(const std::filesystem::path& root);

// Whether an ELF file needs no dynamic loader.
bool is_static_executable(const std::filesystem::path& path);

}  // namespace tidelock::sandbox

// The guest's kernel and its first files.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace tidelock::sandbox::vm {

struct GuestKernel {
  std::filesystem::path image;    // vmlinuz
  std::filesystem::path modules;  // lib/modules/VERSION/kernel
};

// Debian's cloud kernel, unpacked by tools/setup.sh or installed: $TIDELOCK_GUEST_KERNEL, ~/.local/share, /var/lib, /.
// Throws Error{not_supported} naming the places and the remedy.
GuestKernel find_kernel();

// The modules that a guest needs, each after those that it depends on. Throws Error{not_found}.
std::vector<std::filesystem::path> needed_modules(const std::filesystem::path& modules);

// The first files of a guest, as the kernel unpacks them: the agent as /init, modules and their order.
std::string make_initramfs(const std::vector<std::filesystem::path>& modules);

}  // namespace tidelock::sandbox::vm

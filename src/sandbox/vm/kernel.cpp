#include "sandbox/vm/kernel.hpp"

#include <algorithm>
#include <cstdlib>
#include <map>

#include "base/error.hpp"
#include "base/files.hpp"

// The agent's program, put into ours by agent_image.S.
extern "C" const char tidelock_agent_begin[], tidelock_agent_end[];

namespace tidelock::sandbox::vm {
namespace fs = std::filesystem;
namespace {

constexpr const char* kWanted[] = {"virtio_pci", "virtio_blk", "virtio_console"};

std::string module_name(const fs::path& path) {
  std::string name = path.stem().string();
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

// From the module's own notes: "depends=a,b" between zero bytes.
std::vector<std::string> dependencies(const fs::path& path) {
  const std::string content = read_file(path), key = std::string(1, '\0') + "depends=";
  std::vector<std::string> out;
  const std::size_t at = content.find(key);
  if (at == std::string::npos) {
    return out;
  }
  std::string list = content.c_str() + at + key.size();
  while (!list.empty()) {
    const std::size_t end = std::min(list.find(','), list.size());
    out.push_back(list.substr(0, end));
    list.erase(0, end + 1);
  }
  return out;
}

// One entry of the "newc" archive that Linux unpacks.
void add_entry(std::string& out, const std::string& name, unsigned mode, std::string_view content) {
  static constexpr unsigned kLinks = 1;
  out += fmt::format("070701{:08X}{:08X}{:08X}{:08X}{:08X}{:08X}{:08X}{:08X}{:08X}{:08X}{:08X}{:08X}{:08X}", 0, mode, 0,
                     0, kLinks, 0, content.size(), 0, 0, 0, 0, name.size() + 1, 0);
  out += name;
  out.append(1 + (4 - (out.size() + 1) % 4) % 4, '\0');
  out += content;
  out.append((4 - out.size() % 4) % 4, '\0');
}

}  // namespace

GuestKernel find_kernel() {
  std::vector<fs::path> roots;
  if (const char* given = std::getenv("TIDELOCK_GUEST_KERNEL")) {
    roots.emplace_back(given);
  } else {
    if (const char* home = std::getenv("HOME")) {
      roots.push_back(fs::path(home) / ".local/share/tidelock/kernel");
    }
    roots.insert(roots.end(), {"/var/lib/tidelock/kernel", "/"});
  }
  for (const fs::path& root : roots) {
    std::error_code none;
    std::vector<fs::path> images;
    for (const fs::directory_entry& entry : fs::directory_iterator(root / "boot", none)) {
      const std::string name = entry.path().filename();
      if (name.rfind("vmlinuz-", 0) == 0 && name.find("cloud") != std::string::npos) {
        images.push_back(entry.path());
      }
    }
    std::sort(images.rbegin(), images.rend());
    for (const fs::path& image : images) {
      const fs::path modules = root / "lib/modules" / image.filename().string().substr(8) / "kernel";
      if (fs::is_directory(modules)) {
        return {image, modules};
      }
    }
  }
  std::string places;
  for (const fs::path& root : roots) {
    places += fmt::format(" {}", root.string());
  }
  throw Error(
      ErrorCode::not_supported, fmt::format("no cloud kernel for guests (boot/vmlinuz-*cloud*) under{}", places),
      "run tools/setup.sh, or name the folder of an unpacked linux-image-cloud package in TIDELOCK_GUEST_KERNEL");
}

std::vector<fs::path> needed_modules(const fs::path& modules) {
  std::map<std::string, fs::path> known;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(modules)) {
    if (entry.path().extension() == ".ko") {
      known[module_name(entry.path())] = entry.path();
    }
  }
  std::vector<fs::path> out;
  const auto add = [&](const auto& self, const std::string& name) -> void {
    const auto found = known.find(name);
    if (found == known.end()) {
      fail(ErrorCode::not_found, "kernel module {} is not under {}", name, modules.string());
    }
    for (const std::string& needed : dependencies(found->second)) {
      self(self, needed);
    }
    if (std::find(out.begin(), out.end(), found->second) == out.end()) {
      out.push_back(found->second);
    }
  };
  for (const char* name : kWanted) {
    add(add, name);
  }
  return out;
}

std::string make_initramfs(const std::vector<fs::path>& modules) {
  constexpr unsigned kFolder = 0040755, kProgram = 0100755, kFile = 0100644;
  std::string out, list;
  for (const char* folder : {"dev", "modules", "newroot", "proc", "sys"}) {
    add_entry(out, folder, kFolder, {});
  }
  add_entry(out, "init", kProgram,
            {tidelock_agent_begin, static_cast<std::size_t>(tidelock_agent_end - tidelock_agent_begin)});
  for (const fs::path& module : modules) {
    add_entry(out, "modules/" + module.filename().string(), kFile, read_file(module));
    list += module.filename().string() + "\n";
  }
  add_entry(out, "modules/list", kFile, list);
  add_entry(out, "TRAILER!!!", 0, {});
  return out;
}

}  // namespace tidelock::sandbox::vm

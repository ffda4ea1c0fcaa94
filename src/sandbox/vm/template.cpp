#include "sandbox/vm/template.hpp"
#include "sandbox/command.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <thread>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "sandbox/image.hpp"
#include "sandbox/oci/unpack.hpp"
#include "sandbox/vm/channel.hpp"
#include "sandbox/vm/kernel.hpp"

namespace tidelock::sandbox::vm {
namespace fs = std::filesystem;
using Json = nlohmann::json;
namespace {

constexpr int kManifestVersion = 1;
constexpr std::chrono::seconds kBootPatience{90};
constexpr std::uint64_t kMiB = 1U << 20;

std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}

std::uint64_t tree_bytes(const fs::path& root) {
  std::uint64_t bytes = 0;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(root)) {
    bytes += 4096 + (!entry.is_symlink() && entry.is_regular_file() ? entry.file_size() : 0);
  }
  return bytes;
}

void run_tool(const std::string& command, const std::string& what, const std::string& package) {
  FILE* pipe = popen((command + " 2>&1").c_str(), "re");
  std::string text;
  char part[512];
  while (pipe != nullptr && fgets(part, sizeof part, pipe) != nullptr) {
    text += part;
  }
  if (pipe == nullptr || pclose(pipe) != 0) {
    throw Error(ErrorCode::io, fmt::format("cannot {}: {}", what, text), "is the package " + package + " installed?");
  }
}

// The root as an ext4 file system in a file. The journal of ext4 is left out: a guest's disk and memory are always
// taken together, so there is never a disk to recover.
void build_disk(const fs::path& root, const fs::path& disk, std::uint64_t bytes) {
  const FileDescriptor file(open(disk.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!file || ftruncate(file.get(), static_cast<off_t>(bytes)) != 0) {
    fail_errno("create", disk.string());
  }
  run_tool(fmt::format("PATH=$PATH:/usr/sbin:/sbin mke2fs -q -t ext4 -O ^has_journal -m 0 -E "
                       "lazy_itable_init=0,root_owner=0:0 -d {} {}",
                       shell_word(root.string()), shell_word(disk.string())),
           "make the file system of a template", "e2fsprogs");
}

Json manifest_of(const Template& made, const std::string& recipe) {
  return {{"version", kManifestVersion},
          {"recipe", recipe},
          {"emulator", made.emulator},
          {"accelerator", made.shape.accelerator},
          {"memory_bytes", made.shape.memory_bytes},
          {"disk_bytes", made.shape.disk_bytes},
          {"devices_sha256", sha256_hex(read_file(made.devices()))}};
}

void sync_file(const fs::path& path) {
  const FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file || fsync(file.get()) != 0) {
    fail_errno("sync", path.string());
  }
}

std::string tail(const fs::path& log) {
  const std::string text = fs::exists(log) ? read_file(log) : "";
  return text.substr(text.size() - std::min<std::size_t>(text.size(), 600));
}

void boot(Template& made, const fs::path& work, const GuestKernel& kernel, const fs::path& initrd,
          const Launcher& launcher) {
  LaunchPlan plan{launcher.emulator,
                  made.shape,
                  "tidelock-" + launcher.directory_id + "-template",
                  work,
                  made.memory(),
                  launcher.user,
                  false,
                  kernel.image,
                  initrd,
                  {}};
  const std::unique_ptr<Machine> machine = Machine::launch(plan);
  try {
    machine->add_writable({"base", made.folder / "disk", true});
    machine->attach("base");
    machine->go_on();
    Channel agent;
    agent.open(machine->agent_socket(), kBootPatience);
    ExecRequest io;
    io.timeout = std::chrono::seconds(30);
    GuestRequest first;  // so that every copy has run a shell once: its pages and caches are warm
    first.path = "/root";
    first.processes = 64;
    first.arguments = std::string("/bin/sh\0-c\0sync; echo ready\0", 28);
    first.environment = std::string("PATH=/bin:/usr/bin\0", 19);
    const ExecResult result = agent.run(first, io);
    if (result.output != "ready\n") {
      fail(ErrorCode::io, "the first command of the guest printed '{}' and '{}'", result.output, result.error);
    }
    agent.close();
    std::this_thread::sleep_for(std::chrono::milliseconds(200));  // the agent learns that nobody listens
    machine->stop();
    machine->save_devices(made.devices());
  } catch (const Error& error) {
    machine->end();
    throw Error(error.code(),
                fmt::format("building a template: {}; the console's last words: {}", error.what(), tail(work / "log")),
                error.remedy());
  }
  machine->end();
}

// On a crowded host an emulated guest's clock calibration can fail, which its kernel takes for broken hardware.
void boot_with_patience(Template& made, const fs::path& work, const GuestKernel& kernel, const fs::path& initrd,
                        const Launcher& launcher) {
  constexpr int kAttempts = 3;
  for (int attempt = 1;; ++attempt) {
    try {
      boot(made, work, kernel, initrd, launcher);
      return;
    } catch (const Error& error) {
      if (attempt == kAttempts || error.code() != ErrorCode::io) {
        throw;
      }
      spdlog::warn("attempt {} of {}: {}", attempt, kAttempts, error.what());
    }
    for (const char* left : {"monitor", "agent", "log", "made/devices"}) {
      fs::remove(work / left);
    }
  }
}

}  // namespace

std::string choose_accelerator(const std::string& wanted) {
  if (wanted != "auto") {
    if (wanted == "kvm" && access("/dev/kvm", R_OK | W_OK) != 0) {
      fail(ErrorCode::not_supported,
           "accelerator 'kvm': /dev/kvm cannot be opened; expected a host with KVM, or 'tcg'");
    }
    if (wanted != "kvm" && wanted != "tcg") {
      fail(ErrorCode::invalid_argument, "accelerator '{}', expected auto, kvm or tcg", wanted);
    }
    return wanted;
  }
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("flags", 0) == 0) {
      line += ' ';
      const bool able = line.find(" vmx ") != std::string::npos || line.find(" svm ") != std::string::npos;
      return able && access("/dev/kvm", R_OK | W_OK) == 0 ? "kvm" : "tcg";
    }
  }
  return "tcg";
}

Template ensure_template(const TemplateSpec& spec, const fs::path& root, const fs::path& work,
                         const Launcher& launcher) {
  const GuestKernel kernel = find_kernel();
  fs::remove_all(work);
  make_folder(work);
  fs::path image = spec.image;
  std::optional<oci::Layout> layout;
  oci::Image layers;
  std::string identity = spec.image;  // what the root is made of
  if (spec.image == "busybox") {
    image = work / "root";
    build_busybox_image(image);
  } else if (oci::is_layout(image)) {
    layout.emplace(image);
    layers = layout->image();
    identity = layers.digest;
  } else if (fs::is_directory(image)) {
    identity = fs::canonical(image).string();
  } else {
    throw Error(ErrorCode::not_found,
                fmt::format("image '{}': expected 'busybox', a folder that holds a root, or an OCI image layout (a "
                            "folder or a tar archive)",
                            spec.image),
                "images are not fetched from registries: save it as an OCI archive first");
  }
  const std::string initrd = make_initramfs(needed_modules(kernel.modules));
  Template made;
  made.emulator = launcher.emulator.version;
  made.shape.accelerator = choose_accelerator(spec.accelerator);
  made.shape.memory_bytes = round_up(spec.memory_bytes, kMiB);
  // An eighth more: inodes and block maps.
  const auto disk_for = [&spec](const fs::path& root_folder) {
    return round_up((spec.disk_bytes + tree_bytes(root_folder)) / 8 * 9 + 4 * kMiB, kMiB);
  };
  // A layout is unpacked only when it must be; its digest and what the guest may write say how large its disk is.
  made.shape.disk_bytes = layout ? spec.disk_bytes : disk_for(image);
  if (made.shape.memory_bytes < 96 * kMiB) {
    fail(ErrorCode::invalid_argument, "a microVM with {} bytes of memory; its kernel needs at least {}",
         spec.memory_bytes, 96 * kMiB);
  }
  // A folder is taken by its name: whoever changes what it holds gives the build another name.
  const std::string recipe = fmt::format("{}\n{}\n{}\n{}\n{}\n{}\n{}\n{}", kManifestVersion, sha256_hex(initrd),
                                         kernel.image.filename().string(), identity, made.emulator,
                                         made.shape.accelerator, made.shape.memory_bytes, made.shape.disk_bytes);
  made.key = sha256_hex(recipe).substr(0, 24);
  if (fs::exists(root / made.key / "manifest.json")) {
    fs::remove_all(work);
    return open_template(made.key, root, launcher.emulator);
  }
  if (layout) {
    image = work / "root";
    oci::unpack(*layout, layers, image);
    oci::complete_root(image);
    made.shape.disk_bytes = disk_for(image);
  }
  made.folder = work / "made";
  make_folder(made.folder);
  build_disk(image, made.folder / "disk", made.shape.disk_bytes);
  write_file_atomic(work / "initrd", initrd);
  {
    const FileDescriptor memory(open(made.memory().c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    if (!memory || ftruncate(memory.get(), static_cast<off_t>(made.shape.memory_bytes)) != 0 ||
        (launcher.user != 0 && fchmod(memory.get(), 0666) != 0)) {
      fail_errno("create", made.memory().string());
    }
  }
  spdlog::info("building template {} ({} MiB, {})", made.key, made.shape.memory_bytes >> 20, made.shape.accelerator);
  boot_with_patience(made, work, kernel, work / "initrd", launcher);
  for (const fs::path& file : {made.memory(), made.devices(), made.folder / "disk"}) {
    sync_file(file);
  }
  write_file_atomic(made.folder / "manifest.json", manifest_of(made, recipe).dump(2) + "\n");
  make_folder(root);
  fs::rename(made.folder, root / made.key);
  sync_directory(root);
  fs::remove_all(work);
  return open_template(made.key, root, launcher.emulator);
}

Template open_template(const std::string& key, const fs::path& root, const Emulator& emulator) {
  Template out;
  out.key = key;
  out.folder = root / key;
  const fs::path path = out.folder / "manifest.json";
  if (!fs::exists(path)) {
    fail(ErrorCode::not_found, "template {}: no manifest at {}", key, path.string());
  }
  const Json manifest = Json::parse(read_file(path, kMiB), nullptr, false);
  if (!manifest.is_object() || manifest.value("version", 0) != kManifestVersion) {
    fail(ErrorCode::corrupt_data, "{}: not a template's manifest of version {}", path.string(), kManifestVersion);
  }
  try {
    out.shape = {manifest.at("accelerator"), manifest.at("memory_bytes"), manifest.at("disk_bytes")};
    out.emulator = manifest.at("emulator");
  } catch (const Json::exception& error) {
    fail(ErrorCode::corrupt_data, "{}: {}", path.string(), error.what());
  }
  if (out.emulator != emulator.version) {
    fail(ErrorCode::not_supported, "template {} was built with '{}', this host has '{}': its state would not fit", key,
         out.emulator, emulator.version);
  }
  struct stat info {};
  if (stat(out.memory().c_str(), &info) != 0 || static_cast<std::uint64_t>(info.st_size) != out.shape.memory_bytes) {
    fail(ErrorCode::corrupt_data, "{}: expected {} bytes", out.memory().string(), out.shape.memory_bytes);
  }
  if (sha256_hex(read_file(out.devices(), 64 * kMiB)) != manifest.value("devices_sha256", "")) {
    fail(ErrorCode::corrupt_data, "{}: its checksum does not match the manifest", out.devices().string());
  }
  return out;
}

}  // namespace tidelock::sandbox::vm

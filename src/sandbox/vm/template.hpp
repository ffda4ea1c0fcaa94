// Templates: guests booted once, whose memory, devices and disk every new sandbox starts from.
//
//   templates/KEY/   manifest.json  what it was made of, and checksums
//                    memory         the guest's memory, sparse; mapped by every copy
//                    devices        CPU and device state
//                    disk           the root file system (ext4), never written again
// KEY is the hash of all that went in: agent, kernel, root, sizes, emulator. Built beside its place and renamed into
// it.
#pragma once

#include <filesystem>
#include <string>

#include "sandbox/vm/machine.hpp"

namespace tidelock::sandbox::vm {

struct TemplateSpec {
  std::string image = "busybox";  // the built-in root, a folder that holds one, or an OCI image layout
  std::uint64_t memory_bytes = 256ULL << 20;
  std::uint64_t disk_bytes = 64ULL << 20;  // that the guest may write, beside what the root holds
  std::string accelerator = "auto";        // auto, kvm or tcg
};

struct Template {
  std::string key;
  std::filesystem::path folder;
  MachineShape shape;
  std::string emulator;  // its version
  std::filesystem::path memory() const { return folder / "memory"; }
  std::filesystem::path devices() const { return folder / "devices"; }
  DiskFile disk() const { return {"base", folder / "disk", true}; }
};

// KVM where the processor's own virtualization and /dev/kvm can be used, else emulation. A host that offers /dev/kvm
// without either flag of the processor is emulated: a guest was seen to hang there.
std::string choose_accelerator(const std::string& wanted);

// How a process may be called and whom it runs as, from the state directory.
struct Launcher {
  Emulator emulator;
  std::string directory_id;
  uid_t user = 0;
};

// The template for `spec` under `root`: an existing one, or built now (seconds). `work`: a folder for the build, on the
// same file system. Throws Error naming what is missing; a failed build leaves nothing but the console's log in its
// message.
Template ensure_template(const TemplateSpec& spec, const std::filesystem::path& root, const std::filesystem::path& work,
                         const Launcher& launcher);
// One that exists. Throws Error{not_found}, Error{corrupt_data}; Error{not_supported} for another version of QEMU,
// whose devices would not take the state.
Template open_template(const std::string& key, const std::filesystem::path& root, const Emulator& emulator);

}  // namespace tidelock::sandbox::vm

// One QEMU process: started, commanded, its state taken and given, ended.
//
// What a guest is made of (MachineShape) is fixed when its template is built; every copy is started with the same
// flags, or its device state would not fit. The process runs as a user of its own without privileges, in network, IPC
// and UTS namespaces of its own, with QEMU's own system-call filter; it is handed open files and opens none by path.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "sandbox/vm/memory.hpp"
#include "sandbox/vm/qmp.hpp"

namespace tidelock::sandbox::vm {

struct MachineShape {
  std::string accelerator;  // kvm or tcg
  std::uint64_t memory_bytes = 0, disk_bytes = 0;
};

// The QEMU program of this host and its version. Throws Error{not_supported} with the package to install.
struct Emulator {
  std::filesystem::path program;
  std::string version;
};
Emulator find_emulator();

struct ProcessId {
  pid_t pid = -1;
  std::uint64_t start = 0;  // clock ticks since boot: a pid alone may be another process by now
};
std::optional<ProcessId> identify(pid_t pid);
bool is_alive(const ProcessId& process);  // a zombie is not
// SIGKILL, and waits until it is gone. Nothing happens to a process that only has the same pid.
void end_process(const ProcessId& process);
// Processes started for this state directory, by the name that they were given.
std::vector<std::pair<std::string, ProcessId>> find_machines(const std::string& directory_id);

struct LaunchPlan {
  Emulator emulator;
  MachineShape shape;
  std::string name;              // tidelock-<directory id>-<token>: how find_machines knows it
  std::filesystem::path folder;  // of this process: sockets and log
  std::filesystem::path memory;  // the template's memory
  uid_t user = 0;                // 0: stays what we are (only when we are not root)
  bool copy = true;              // a copy of a template, waiting for its state; false: boots and writes `memory`
  std::filesystem::path kernel, initrd, disk;  // of a boot
};

// One disk of a chain.
struct DiskFile {
  std::string node;  // its name inside QEMU: a letter, then letters, digits and '-'
  std::filesystem::path path;
  bool raw = false;
};

class Machine {
 public:
  // Starts a process. Throws Error{io} with the log's last line.
  static std::unique_ptr<Machine> launch(const LaunchPlan& plan);
  // Takes charge of a living one.
  Machine(ProcessId process, std::filesystem::path folder, std::filesystem::path memory, std::uint64_t memory_bytes);
  // Connects to its monitor, if that was not done yet.
  Qmp& monitor();
  const ProcessId& process() const { return process_; }
  const std::filesystem::path& folder() const { return folder_; }
  bool alive() const { return is_alive(process_); }
  std::string agent_socket() const { return (folder_ / "agent").string(); }

  void stop() { monitor().execute("stop"); }
  void go_on() { monitor().execute("cont"); }
  std::string status();  // QEMU's word: running, paused, io-error, ...
  // What can be done before it is known which guest a copy will be: its lowest disk, read-only, and settings.
  void prepare(const DiskFile& base);
  // Adds one writable disk that stands alone.
  void add_writable(const DiskFile& disk) { monitor().execute("blockdev-add", describe_node(disk, nullptr, true)); }
  // Adds overlays on the node `below`, each on the one before; the last is writable.
  void add_disks(const std::string& below, const std::vector<DiskFile>& overlays);
  // Makes a node the guest's disk. Only in a copy that waits for its state.
  void attach(const std::string& node);
  // Freezes `top` and lets the guest write to `overlay`. Only while stopped.
  void overlay(const std::string& top, const DiskFile& overlay);
  std::string top_node();
  // CPU and devices, into a file that must not exist. Only while stopped.
  void save_devices(const std::filesystem::path& file);
  // The reverse; the guest stays stopped.
  void load_devices(const std::filesystem::path& file);
  GuestMemory memory() const { return {process_.pid, memory_, memory_bytes_}; }
  void end();

 private:
  void add_descriptor(int set, const std::filesystem::path& path, int flags);
  nlohmann::json describe_node(const DiskFile& disk, nlohmann::json backing, bool writable);
  [[noreturn]] void fail_dead(const std::string& step);
  ProcessId process_;
  std::filesystem::path folder_, memory_;
  std::uint64_t memory_bytes_;
  Qmp monitor_;
};

}  // namespace tidelock::sandbox::vm

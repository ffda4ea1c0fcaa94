#include "sandbox/vm/machine.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "base/error.hpp"

namespace tidelock::sandbox::vm {
namespace fs = std::filesystem;
using Json = nlohmann::json;
namespace {

constexpr std::chrono::seconds kLoadPatience{30};

}  // namespace

Machine::Machine(ProcessId process, fs::path folder, fs::path memory, std::uint64_t memory_bytes)
    : process_(process), folder_(std::move(folder)), memory_(std::move(memory)), memory_bytes_(memory_bytes) {}

std::string Machine::status() {
  return monitor().execute("query-status").value("status", "");
}

void Machine::add_descriptor(int set, const fs::path& path, int flags) {
  const FileDescriptor file(open(path.c_str(), flags | O_CLOEXEC, 0600));
  if (!file) {
    fail_errno("open", path.string());
  }
  monitor().execute("add-fd", {{"fdset-id", set}}, file.get());
}

// What blockdev-add takes, with what lies below inside it: a chain of any length is one command.
Json Machine::describe_node(const DiskFile& disk, Json backing, bool writable) {
  // A set of descriptors for the file, which QEMU opens as /dev/fdset/N: to read, and to write where it may. When a
  // writable disk becomes the lower part of another, QEMU opens it again to read.
  const int set =
      monitor()
          .execute("add-fd", Json::object(), FileDescriptor(open(disk.path.c_str(), O_RDONLY | O_CLOEXEC)).get())
          .value("fdset-id", 0);
  if (writable) {
    add_descriptor(set, disk.path, O_RDWR);
  }
  // Locks are the journal's business. What the guest syncs is made durable with the checkpoint that holds the memory
  // which goes with it, so QEMU does not sync.
  Json node{{"driver", disk.raw ? "raw" : "qcow2"},
            {"node-name", disk.node},
            {"read-only", !writable},
            {"cache", {{"no-flush", true}}},
            {"file",
             {{"driver", "file"},
              {"filename", fmt::format("/dev/fdset/{}", set)},
              {"locking", "off"},
              {"read-only", !writable},
              {"cache", {{"no-flush", true}}}}}};
  if (!disk.raw) {
    node["backing"] = std::move(backing);
  }
  return node;
}

void Machine::prepare(const DiskFile& base) {
  monitor().execute("migrate-set-capabilities",
                    {{"capabilities", Json::array({{{"capability", "events"}, {"state", true}}})}});
  monitor().execute("blockdev-add", describe_node(base, nullptr, false));
}

void Machine::add_disks(const std::string& below, const std::vector<DiskFile>& overlays) {
  Json node = below;
  for (std::size_t i = 0; i < overlays.size(); ++i) {
    node = describe_node(overlays[i], std::move(node), i + 1 == overlays.size());
  }
  monitor().execute("blockdev-add", node);
}

void Machine::attach(const std::string& node) {
  monitor().execute("qom-set", {{"path", "/machine/peripheral/disk"}, {"property", "drive"}, {"value", node}});
}

void Machine::overlay(const std::string& top, const DiskFile& overlay) {
  add_writable(overlay);
  monitor().execute("blockdev-snapshot", {{"node", top}, {"overlay", overlay.node}});
}

std::string Machine::top_node() {
  return monitor().execute("qom-get", {{"path", "/machine/peripheral/disk"}, {"property", "drive"}}).get<std::string>();
}

void Machine::save_devices(const fs::path& file) {
  const FileDescriptor out(open(file.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!out) {
    fail_errno("create", file.string());
  }
  const int set = monitor().execute("add-fd", Json::object(), out.get()).value("fdset-id", 0);
  // live=false: the disks stay ours to write.
  monitor().execute("xen-save-devices-state", {{"filename", fmt::format("/dev/fdset/{}", set)}, {"live", false}});
  monitor().execute("remove-fd", {{"fdset-id", set}});
  if (lseek(out.get(), 0, SEEK_END) <= 0) {
    fail(ErrorCode::io, "{}: QEMU wrote no device state", file.string());
  }
}

void Machine::load_devices(const fs::path& file) {
  const FileDescriptor in(open(file.c_str(), O_RDONLY | O_CLOEXEC));
  if (!in) {
    fail_errno("open", file.string());
  }
  monitor().execute("getfd", {{"fdname", "devices"}}, in.get());
  monitor().execute("migrate-incoming", {{"uri", "fd:devices"}});
  const auto deadline = std::chrono::steady_clock::now() + kLoadPatience;
  while (monitor().await_event("MIGRATION", std::chrono::duration_cast<std::chrono::milliseconds>(
                                                deadline - std::chrono::steady_clock::now()))) {
    const std::string state = monitor().execute("query-migrate").value("status", "");
    if (state == "completed") {
      return;
    }
    if (state == "failed") {
      break;
    }
  }
  fail(ErrorCode::io, "sandbox: QEMU does not take the device state {}; its log is in {}", file.string(),
       folder_.string());
}

void Machine::end() {
  end_process(process_);
}

}  // namespace tidelock::sandbox::vm

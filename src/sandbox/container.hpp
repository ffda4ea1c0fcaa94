// The program's side of the container runtime: one helper process, one socket to each container's init.
//
//   program --control socket--> helper --clone--> init (process 1 of a container) --fork--> commands
//      `---------------- one socket a container ------------^
//
// What a command finds: user `agent` (as root on the host a uid of its own above 2^30 for each container, shared only
// with its forks; otherwise uid 1000 of a user namespace), home /root, PATH with the usual folders, loopback only. What
// it writes anywhere lies in memory: `Limits::disk_bytes` for files (with /tmp and /dev/shm), `memory_bytes` beside it
// for processes. Files given by write_file belong to `agent`. A time-out ends the command's session; processes that
// left it stay until the sandbox ends. Without a writable cgroup `memory_bytes` holds for each process, not for their
// sum, and `cpus` is not enforced: Capabilities::isolation says so.
#pragma once

#include <chrono>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>

#include "sandbox/run_directory.hpp"
#include "sandbox/sandbox.hpp"
#include "sandbox/wire.hpp"

namespace tidelock::sandbox {

class OutputPipe;

// A connected pair; ours (the first) gives up after 30 s inside a message.
std::pair<FileDescriptor, FileDescriptor> make_socket_pair();

// Thread-safe. Shared by the runtime and its sandboxes, so that a sandbox may outlive the runtime object (its calls
// then fail, its destructor does nothing more).
class HelperProcess {
 public:
  HelperProcess(const ContainerOptions& options, const Features& features);
  ~HelperProcess() { shut_down(); }
  HelperProcess(const HelperProcess&) = delete;
  HelperProcess& operator=(const HelperProcess&) = delete;

  struct Birth {
    Created created;
    std::vector<FileDescriptor> freezer;
  };
  // Throws Error{io} when the helper is gone.
  Birth create(const CreateRequest& request, std::span<const int> descriptors);
  void destroy(const std::string& id) noexcept;
  std::string next_id();
  // The directory of an image; builds the built-in one at first use. Throws Error{not_found}.
  std::filesystem::path image_root(const std::string& image);
  const Welcome& welcome() const { return welcome_; }
  const std::filesystem::path& run_directory() const { return run_.path; }
  pid_t pid() const { return pid_; }
  // Ends every container and the helper, and waits for it. Idempotent.
  void shut_down() noexcept;

 private:
  void start(const std::filesystem::path& program);

  std::mutex mutex_, image_mutex_;
  RunDirectory run_;
  FileDescriptor control_;
  pid_t pid_ = -1;
  Welcome welcome_;
  std::uint64_t counter_ = 0;
};

class ContainerSandbox : public Sandbox {
 public:
  // Waits until the container is ready. `source`: the sandbox whose files it starts with, or null.
  ContainerSandbox(std::shared_ptr<HelperProcess> helper, const Spec& spec, const ContainerSandbox* source);
  ~ContainerSandbox() override;
  const std::string& id() const override { return id_; }
  ExecResult exec(const ExecRequest& request) override;
  void write_file(const std::string& path, std::string_view content, int mode) override;
  std::string read_file(const std::string& path, std::uint64_t limit) override;
  void freeze() override;
  void thaw() override;
  std::unique_ptr<Sandbox> fork_filesystem() override;
  Times times() const override;
  pid_t init_pid() const { return created_.pid; }

 private:
  using Clock = std::chrono::steady_clock;

  ExecResult run(const RunRequest& request, const ExecRequest& io);
  Exited pump(OutputPipe& output, OutputPipe& error, Clock::time_point deadline, bool& timed_out);
  ExecResult file_operation(const RunRequest& request, const ExecRequest& io);
  void send(MessageType type, std::string_view body = {}, std::span<const int> descriptors = {});
  void await_ready();
  void set_frozen(bool frozen);
  std::optional<Message> receive(Clock::time_point deadline);  // nothing: the deadline has passed
  [[noreturn]] void die(const std::string& why);
  void need_alive() const;

  std::shared_ptr<HelperProcess> helper_;
  Spec spec_;
  std::string id_;
  FileDescriptor socket_, gone_, upper_, freeze_control_, freeze_events_;
  Created created_;
  std::string dead_;  // why it can no longer be used; empty while it lives
  bool frozen_ = false;
  Clock::time_point born_, frozen_since_;
  double busy_ = 0, frozen_time_ = 0;
};

class ContainerRuntime : public Runtime {
 public:
  ContainerRuntime(const ContainerOptions& options, const Features& features);
  ~ContainerRuntime() override { helper_->shut_down(); }
  Capabilities capabilities() const override;
  std::unique_ptr<Sandbox> create(const Spec& spec) override;
  const HelperProcess& helper() const { return *helper_; }

 private:
  std::shared_ptr<HelperProcess> helper_;
};

}  // namespace tidelock::sandbox

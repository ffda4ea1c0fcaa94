// The runtime's face: sandboxes of a state directory behind the common interface.

#include <algorithm>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "sandbox/command.hpp"
#include "sandbox/guest.hpp"
#include "sandbox/vm/entries.hpp"
#include "sandbox/vm/process.hpp"
#include "sandbox/vm/store.hpp"
#include "sandbox/vm/watch.hpp"

namespace tidelock::sandbox {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds kFilePatience{60};

// Texts that travel with a zero byte behind each.
void append_text(std::string& out, const std::string& text, const char* what) {
  need_no_zero_byte(text, what);
  out.append(text).push_back('\0');
}

void need_size(WindowSize size) {
  if (size.rows == 0 || size.columns == 0) {
    fail(ErrorCode::invalid_argument, "a terminal of {} rows and {} columns; at least 1 each", size.rows, size.columns);
  }
}

class MicrovmSandbox : public Sandbox {
 public:
  MicrovmSandbox(std::shared_ptr<vm::Store> store, std::string id, bool kept)
      : store_(std::move(store)), id_(std::move(id)), kept_(kept), born_(Clock::now()) {}
  ~MicrovmSandbox() override {
    if (!kept_) {
      try {
        store_->remove(id_);
      } catch (const std::exception& error) {
        spdlog::warn("sandbox {}: {}", id_, error.what());
      }
    }
  }
  const std::string& id() const override { return id_; }

  ExecResult exec(const ExecRequest& request) override {
    if (request.argv.empty() || request.argv.front().empty()) {
      fail(ErrorCode::invalid_argument, "sandbox {}: exec without a command", id_);
    }
    if (request.timeout.count() < 0) {
      fail(ErrorCode::invalid_argument, "sandbox {}: a time-out of {} ms", id_, request.timeout.count());
    }
    const Defaults defaults = store_->guest(id_).defaults;
    vm::GuestRequest command = command_of(request, defaults);
    command.flags = defaults.root ? vm::kAsRoot : 0;
    return run(command, request);
  }

  void write_file(const std::string& path, std::string_view content, int mode) override {
    vm::GuestRequest guest;
    guest.kind = vm::GuestKind::write_file;
    guest.mode = static_cast<std::uint32_t>(mode);
    ExecRequest io;
    io.input = content;
    file_operation(guest, path, io);
  }

  std::string read_file(const std::string& path, std::uint64_t limit) override {
    vm::GuestRequest guest;
    guest.kind = vm::GuestKind::read_file;
    guest.limit = limit;
    ExecRequest io;
    io.output_limit = limit;
    return std::move(file_operation(guest, path, io).output);
  }

  std::shared_ptr<ProcessListener> start(const ProcessRequest& request) override {
    ExecRequest command;
    command.argv = request.argv;
    command.environment = request.environment;
    command.environment.insert({{"USER", request.root ? "root" : "user"}, {"LOGNAME", request.root ? "root" : "user"}});
    command.directory = request.directory;
    if (request.argv.empty() || request.argv.front().empty()) {
      fail(ErrorCode::invalid_argument, "sandbox {}: a process without a command", id_);
    }
    const vm::Guest own = store_->guest(id_);
    vm::GuestRequest guest = command_of(command, own.defaults);
    guest.kind = vm::GuestKind::process;
    guest.processes = static_cast<std::uint32_t>(own.processes);
    guest.flags = (request.root ? vm::kAsRoot : 0) | (request.open_input ? vm::kOpenInput : 0);
    guest.tag = request.tag;
    const std::shared_ptr<vm::Link> link = store_->link(id_);
    if (request.terminal) {
      need_size(*request.terminal);
      link->need_agent(vm::kAgentTerminals, "terminals");
      guest.flags |= vm::kTerminal;
      guest.mode = vm::pack_size(request.terminal->rows, request.terminal->columns);
    }
    return link->start_process(guest).listener;
  }
  std::shared_ptr<ProcessListener> attach(int pid) override { return process(pid)->listen(); }
  std::vector<ProcessInfo> processes() override { return store_->link(id_)->list_processes(); }
  void signal(int pid, int number) override { process(pid)->signal(number); }
  void write_input(int pid, std::string_view bytes) override { process(pid)->write(bytes); }
  void close_input(int pid) override { process(pid)->close_input(); }
  void resize(int pid, WindowSize size) override {
    need_size(size);
    process(pid)->resize(size);
  }
  std::vector<FileEntry> files(const FileCommand& command) override;
  std::unique_ptr<FileWatch> watch(const WatchRequest& request) override {
    need_no_zero_byte(request.path, "a path");
    if (request.path.empty() || request.path.front() != '/') {
      fail(ErrorCode::invalid_argument, "sandbox {}: '{}' is not an absolute path", id_, request.path);
    }
    const std::shared_ptr<vm::Link> link = store_->link(id_);
    link->need_agent(vm::kAgentWatches, "watches");
    return vm::start_watch(*link, request);
  }

  std::shared_ptr<PortConnection> connect_port(int port) override {
    const std::shared_ptr<vm::Link> link = store_->link(id_);
    link->need_agent(vm::kAgentPorts, "way to its ports");
    return link->connect_port(port);
  }

  void freeze() override {
    if (!frozen_) {
      store_->set_frozen(id_, true);
      frozen_ = true;
      frozen_since_ = Clock::now();
    }
  }
  void thaw() override {
    if (frozen_) {
      store_->set_frozen(id_, false);
      note_thawed();
    }
  }
  std::unique_ptr<Sandbox> fork_filesystem() override {
    fail(ErrorCode::not_supported, "sandbox {}: a microVM's files are copied with its memory; use fork", id_);
  }
  Times times() const override {
    return {seconds_since(born_), busy_, frozen_time_ + (frozen_ ? seconds_since(frozen_since_) : 0)};
  }
  void pause() override {
    if (!frozen_) {
      frozen_since_ = Clock::now();
    }
    store_->pause(id_);
    frozen_ = true;  // for the times: it does not run
  }
  void resume() override {
    store_->resume(id_);
    note_thawed();
  }
  void checkpoint() override { store_->checkpoint(id_); }
  std::vector<std::unique_ptr<Sandbox>> fork(int count) override {
    std::vector<std::unique_ptr<Sandbox>> out;
    for (const std::string& id : store_->fork(id_, count)) {
      out.push_back(std::make_unique<MicrovmSandbox>(store_, id, false));
    }
    return out;
  }
  void snapshot(const std::string& name) override { store_->snapshot(id_, name); }
  void revert(const std::string& snapshot) override {
    store_->revert(id_, snapshot);
    note_thawed();
  }
  Defaults defaults() override { return store_->guest(id_).defaults; }
  void set_defaults(const Defaults& defaults) override {
    for (const auto& [name, value] : defaults.environment) {
      if (name.empty() || (name + value).find('\0') != std::string::npos || name.find('=') != std::string::npos) {
        fail(ErrorCode::invalid_argument, "sandbox {}: '{}' is not a variable's name, or its value has a zero byte",
             id_, name.substr(0, 100));
      }
    }
    store_->set_defaults(id_, defaults);
  }
  void keep() override { kept_ = true; }
  void remove() override {
    store_->remove(id_);
    kept_ = true;  // nothing is left to end
  }

 private:
  void note_thawed() {
    if (frozen_) {
      frozen_time_ += seconds_since(frozen_since_);
      frozen_ = false;
    }
  }

  ExecResult run(const vm::GuestRequest& request, const ExecRequest& io) {
    const Clock::time_point start = Clock::now();
    note_thawed();
    try {
      ExecResult result = store_->run(id_, request, io);
      busy_ += seconds_since(start);
      return result;
    } catch (...) {
      busy_ += seconds_since(start);
      throw;
    }
  }

  vm::GuestRequest command_of(const ExecRequest& request, const Defaults& defaults) const {
    vm::GuestRequest guest;
    std::string directory;
    append_text(directory, request.directory, "the directory");
    guest.path = request.directory;
    for (const std::string& text : request.argv) {
      append_text(guest.arguments, text, "an argument");
    }
    ExecRequest whole = request;
    whole.environment.insert(defaults.environment.begin(), defaults.environment.end());  // what is asked for stays
    for (const std::string& variable : environment_of(id_, whole)) {
      append_text(guest.environment, variable, "the environment");
    }
    return guest;
  }

  std::shared_ptr<vm::Process> process(int pid) { return store_->link(id_)->find_process(pid); }

  ExecResult file_operation(vm::GuestRequest request, const std::string& path, ExecRequest io) {
    std::string checked;
    append_text(checked, path, "a path");
    if (path.empty() || path.back() == '/') {
      fail(ErrorCode::invalid_argument, "sandbox {}: '{}' does not name a file", id_, path);
    }
    request.path = path.front() == '/' ? path : "/root/" + path;
    return run_file_operation(request, std::move(io));
  }

  ExecResult run_file_operation(const vm::GuestRequest& request, ExecRequest io) {
    io.timeout = kFilePatience;
    ExecResult result = run(request, io);
    if (result.exit_code == static_cast<int>(FileExit::done)) {
      return result;
    }
    result.error.erase(result.error.find_last_not_of('\n') + 1);
    fail(vm::file_error(result.exit_code), "sandbox {}: {}", id_,
         result.timed_out ? request.path + " took too long" : result.error);
  }

  std::shared_ptr<vm::Store> store_;
  std::string id_;
  bool kept_;
  bool frozen_ = false;
  Clock::time_point born_, frozen_since_;
  double busy_ = 0, frozen_time_ = 0;
};

std::vector<FileEntry> MicrovmSandbox::files(const FileCommand& command) {
  using Operation = FileCommand::Operation;
  vm::GuestRequest guest;
  ExecRequest io;
  for (const std::string* path : {&command.path, &command.to}) {
    need_no_zero_byte(*path, "a path");
    if ((path == &command.path || command.operation == Operation::move) && (path->empty() || path->front() != '/')) {
      fail(ErrorCode::invalid_argument, "sandbox {}: '{}' is not an absolute path", id_, *path);
    }
  }
  if (command.operation == Operation::write) {
    guest.kind = vm::GuestKind::write_file;
    guest.mode = vm::kKeepMode;
    guest.limit = command.root ? vm::kAsRoot : 0;
    io.input = command.content;
    file_operation(guest, command.path, io);
    return files({.operation = Operation::stat, .path = command.path});
  }
  guest.kind = vm::GuestKind::file_tool;
  guest.flags = command.root ? vm::kAsRoot : 0;
  constexpr const char* kNames[] = {"stat", "list", "mkdir", "move", "remove"};
  append_text(guest.arguments, kNames[static_cast<int>(command.operation)], "an operation");
  append_text(guest.arguments, command.path, "a path");
  if (command.operation == Operation::move) {
    append_text(guest.arguments, command.to, "a path");
  } else if (command.operation == Operation::list) {
    append_text(guest.arguments, std::to_string(command.depth), "a depth");
  }
  io.output_limit = 8U << 20;
  const ExecResult result = run_file_operation(guest, io);
  const std::vector<std::string> fields = vm::split_texts(result.output);
  if (fields.size() % vm::kFileFields != 0) {
    fail(ErrorCode::io, "sandbox {}: what its agent told of {} cannot be read", id_, command.path);
  }
  std::vector<FileEntry> out;
  for (std::size_t at = 0; at < fields.size(); at += vm::kFileFields) {
    out.push_back(vm::entry_of(fields, at));
  }
  return out;
}

class MicrovmRuntime : public Runtime {
 public:
  explicit MicrovmRuntime(const MicrovmOptions& options) : store_(std::make_shared<vm::Store>(options)) {}
  Capabilities capabilities() const override {
    return {.freeze = true,
            .fork_filesystem = false,
            .fork_memory = true,
            .snapshot = true,
            .processes = true,
            .isolation = store_->isolation()};
  }
  std::unique_ptr<Sandbox> create(const Spec& spec) override {
    return std::make_unique<MicrovmSandbox>(store_, store_->create(spec), false);
  }
  std::unique_ptr<Sandbox> open(const std::string& id) override {
    store_->guest(id);
    return std::make_unique<MicrovmSandbox>(store_, id, true);
  }
  std::vector<Listing> list() override { return store_->list(); }
  void remove_snapshot(const std::string& name) override { store_->remove_snapshot(name); }
  Defaults snapshot_defaults(const std::string& name) override { return store_->snapshot_defaults(name); }
  void name_snapshot(const std::string& existing, const std::string& name) override {
    store_->name_snapshot(existing, name);
  }
  std::string build(const Spec& spec) override { return store_->template_of(spec).key; }
  std::vector<LogEntry> log(const std::string& id) override { return store_->log(id); }
  void note(const std::string& id, LogEntry entry) override { store_->note(id, std::move(entry)); }

 private:
  std::shared_ptr<vm::Store> store_;
};

}  // namespace

std::unique_ptr<Runtime> make_microvm_runtime(const MicrovmOptions& options) {
  return std::make_unique<MicrovmRuntime>(options);
}

}  // namespace tidelock::sandbox

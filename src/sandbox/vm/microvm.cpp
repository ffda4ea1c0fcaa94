// The runtime's face: sandboxes of a state directory behind the common interface.

#include <algorithm>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "sandbox/command.hpp"
#include "sandbox/guest.hpp"
#include "sandbox/vm/store.hpp"

namespace tidelock::sandbox {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds kFilePatience{60};

// Texts that travel with a zero byte behind each.
void append_text(std::string& out, const std::string& text, const char* what) {
  need_no_zero_byte(text, what);
  out.append(text).push_back('\0');
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
    vm::GuestRequest guest;
    std::string directory;
    append_text(directory, request.directory, "the directory");
    guest.path = request.directory;
    for (const std::string& text : request.argv) {
      append_text(guest.arguments, text, "an argument");
    }
    for (const std::string& variable : environment_of(id_, request)) {
      append_text(guest.environment, variable, "the environment");
    }
    return run(guest, request);
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

  ExecResult file_operation(vm::GuestRequest request, const std::string& path, ExecRequest io) {
    std::string checked;
    append_text(checked, path, "a path");
    if (path.empty() || path.back() == '/') {
      fail(ErrorCode::invalid_argument, "sandbox {}: '{}' does not name a file", id_, path);
    }
    request.path = path.front() == '/' ? path : "/root/" + path;
    io.timeout = kFilePatience;
    ExecResult result = run(request, io);
    ErrorCode code = ErrorCode::io;
    switch (static_cast<FileExit>(result.exit_code)) {
      case FileExit::done:
        return result;
      case FileExit::not_found:
        code = ErrorCode::not_found;
        break;
      case FileExit::invalid:
        code = ErrorCode::invalid_argument;
        break;
      case FileExit::exhausted:
        code = ErrorCode::exhausted;
        break;
      default:
        break;
    }
    result.error.erase(result.error.find_last_not_of('\n') + 1);
    fail(code, "sandbox {}: {}", id_, result.timed_out ? request.path + " took too long" : result.error);
  }

  std::shared_ptr<vm::Store> store_;
  std::string id_;
  bool kept_;
  bool frozen_ = false;
  Clock::time_point born_, frozen_since_;
  double busy_ = 0, frozen_time_ = 0;
};

class MicrovmRuntime : public Runtime {
 public:
  explicit MicrovmRuntime(const MicrovmOptions& options) : store_(std::make_shared<vm::Store>(options)) {}
  Capabilities capabilities() const override {
    return {.freeze = true,
            .fork_filesystem = false,
            .fork_memory = true,
            .snapshot = true,
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
  void build(const Spec& spec) override { store_->template_of(spec); }

 private:
  std::shared_ptr<vm::Store> store_;
};

}  // namespace

std::unique_ptr<Runtime> make_microvm_runtime(const MicrovmOptions& options) {
  return std::make_unique<MicrovmRuntime>(options);
}

}  // namespace tidelock::sandbox

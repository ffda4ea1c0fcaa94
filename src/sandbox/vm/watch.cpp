#include "sandbox/vm/watch.hpp"

#include <condition_variable>

#include "base/error.hpp"
#include "sandbox/vm/entries.hpp"
#include "sandbox/vm/process.hpp"

namespace tidelock::sandbox::vm {
namespace {

using Kind = ProcessEvent::Kind;
constexpr std::chrono::seconds kWatchPatience{30};  // for all folders to be watched
constexpr std::size_t kMaxComplaint = 4096;

class Watch : public FileWatch {
 public:
  Watch(Link::Started started, std::string path)
      : path_(std::move(path)), process_(std::move(started.process)), listener_(std::move(started.listener)) {}
  ~Watch() override {
    try {
      process_->close_input();  // it ends
    } catch (const Error&) {    // it has
    }
  }
  void await_ready() {
    const std::string ready(kWatchReady, std::char_traits<char>::length(kWatchReady) + 1);
    const auto deadline = std::chrono::steady_clock::now() + kWatchPatience;
    listener_->on_event([bell = bell_] {
      const std::lock_guard lock(bell->mutex);
      bell->rung = true;
      bell->changed.notify_one();
    });
    while (!bytes_.starts_with(ready)) {
      std::unique_lock lock(bell_->mutex);
      if (!bell_->changed.wait_until(lock, deadline, [this] { return bell_->rung; })) {
        fail(ErrorCode::io, "{}: it is not watched within {} s", path_, kWatchPatience.count());
      }
      bell_->rung = false;
      lock.unlock();
      while (hear()) {  // one bell may stand for several
      }
      if (over_ && !bytes_.starts_with(ready)) {
        throw *over_;
      }
    }
    bytes_.erase(0, ready.size());
  }
  std::optional<FileChange> take() override {
    FileChange change;
    while (!take_change(bytes_, change)) {
      if (!hear()) {
        if (over_) {
          throw *over_;
        }
        return std::nullopt;
      }
    }
    return change;
  }
  bool over() const override { return process_->over(); }
  void on_event(std::function<void()> wake) override { listener_->on_event(std::move(wake)); }

 private:
  // One event of the process, if there is one: what waits stays with it, where it is bounded.
  bool hear() {
    const std::optional<ProcessEvent> event = over_ ? std::nullopt : listener_->take();
    if (!event) {
      return false;
    }
    if (event->kind == Kind::output) {
      bytes_ += event->bytes;
    } else if (event->kind == Kind::error) {
      complaint_.append(event->bytes, 0, kMaxComplaint - std::min(complaint_.size(), kMaxComplaint));
    } else if (event->kind == Kind::lost) {
      over_ = Error(ErrorCode::io, fmt::format("{} is not watched any more: the sandbox was paused or ended", path_));
    } else {
      complaint_.erase(complaint_.find_last_not_of('\n') + 1);
      over_ = Error(
          file_error(event->exit_code),
          complaint_.empty() ? fmt::format("{} is not watched any more: its watch was ended", path_) : complaint_);
    }
    return true;
  }

  struct Bell {
    std::mutex mutex;
    std::condition_variable changed;
    bool rung = false;
  };
  std::string path_;
  std::shared_ptr<Bell> bell_ = std::make_shared<Bell>();
  std::shared_ptr<Process> process_;
  std::shared_ptr<ProcessListener> listener_;
  std::string bytes_, complaint_;
  std::optional<Error> over_;
};

}  // namespace

std::unique_ptr<FileWatch> start_watch(Link& link, const WatchRequest& request) {
  GuestRequest guest;
  guest.kind = GuestKind::watch;
  guest.path = request.path;
  guest.flags =
      (request.root ? kAsRoot : 0) | (request.recursive ? kRecursive : 0) | (request.entries ? kWithEntries : 0);
  auto out = std::make_unique<Watch>(link.start_process(guest, ErrorCode::exhausted), request.path);
  out->await_ready();
  return out;
}

}  // namespace tidelock::sandbox::vm

#include "cli/sandbox_shell.hpp"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/descriptor.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/thread_pool.hpp>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <exception>

#include "base/base.hpp"

namespace tidelock::cli {
namespace {

namespace asio = boost::asio;
using sandbox::ProcessEvent;
constexpr std::chrono::seconds kEndPatience{10};  // for a session that was told to end

// While it lives, the terminal hands over every key as it is typed and shows bytes as they are.
class RawTerminal {
 public:
  RawTerminal() {
    if (tcgetattr(STDIN_FILENO, &before_) != 0) fail_errno("look at", "the terminal");
    termios raw = before_;
    cfmakeraw(&raw);
    if (tcsetattr(STDIN_FILENO, TCSADRAIN, &raw) != 0) fail_errno("set up", "the terminal");
  }
  ~RawTerminal() { tcsetattr(STDIN_FILENO, TCSADRAIN, &before_); }
  RawTerminal(const RawTerminal&) = delete;
  RawTerminal& operator=(const RawTerminal&) = delete;

 private:
  termios before_{};
};

sandbox::WindowSize window_size() {
  winsize size{};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_row == 0 || size.ws_col == 0) return {};
  return {.rows = size.ws_row, .columns = size.ws_col};
}

void show(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t put = write(STDOUT_FILENO, bytes.data(), bytes.size());
    if (put < 0 && errno != EINTR) fail_errno("write to", "the terminal");
    bytes.remove_prefix(static_cast<std::size_t>(std::max<ssize_t>(put, 0)));
  }
}

// One loop; only what is typed is handed over elsewhere, because a command that does not read makes that wait.
class Shell {
 public:
  Shell(sandbox::Sandbox& box, const sandbox::ProcessRequest& request) : box_(box), listener_(box.start(request)) {}
  int run() {
    const RawTerminal raw;
    listener_->on_event([this] { asio::post(loop_, [this] { take_events(); }); });
    await_key();
    await_signal();
    try {
      loop_.run();
    } catch (...) {
      try {
        box_.signal(listener_->pid(), SIGKILL);  // nobody is left to end it
      } catch (const Error&) {                   // it has ended, or everything has
      }
      throw;
    }
    typing_.join();
    return code_;
  }

 private:
  void take_events() {
    while (const std::optional<ProcessEvent> event = listener_->take()) {
      if (event->kind == ProcessEvent::Kind::ended) {
        end(interrupted_ != 0 ? 128 + interrupted_ : event->exit_code);
      } else if (interrupted_ != 0 && event->kind != ProcessEvent::Kind::lost) {  // nobody may be there to be shown it
        continue;
      } else if (event->kind == ProcessEvent::Kind::lost) {
        fail(ErrorCode::io, "the sandbox was paused or ended");
      } else {
        show(event->bytes);
      }
    }
  }

  void await_key() {
    keys_.async_wait(asio::posix::descriptor::wait_read, [this](const boost::system::error_code& error) {
      char typed[4096];
      const ssize_t got = error ? 0 : read(keys_.native_handle(), typed, sizeof typed);
      if (got < 0 && (errno == EINTR || errno == EAGAIN)) return await_key();
      if (got <= 0) return interrupt(SIGHUP);  // the terminal is gone
      asio::post(typing_, [this, text = std::string(typed, static_cast<std::size_t>(got))] { hand_over(text); });
    });
  }

  // On the other thread. What no one reads is not typed: the terminal's bell tells.
  void hand_over(const std::string& text) {
    std::exception_ptr wrong;
    bool full = false;
    try {
      box_.write_input(listener_->pid(), text);
    } catch (const Error& error) {
      full = error.code() == ErrorCode::exhausted;
      if (!full && error.code() != ErrorCode::not_found) wrong = std::current_exception();
    }
    asio::post(loop_, [this, wrong, full] {
      if (wrong) std::rethrow_exception(wrong);
      if (full) show("\a");
      await_key();
    });
  }

  void await_signal() {
    signals_.async_wait([this](const boost::system::error_code& error, int number) {
      if (error) return;
      if (number != SIGWINCH) return interrupt(number);
      if (interrupted_ == 0) box_.resize(listener_->pid(), window_size());
      await_signal();
    });
  }

  // The session is over when this program ends: who told it to end may look.
  void interrupt(int number) {
    if (interrupted_ != 0) return;
    interrupted_ = number;
    try {
      box_.signal(listener_->pid(), SIGKILL);
    } catch (const Error& error) {  // it has just ended: that is told next
      if (error.code() != ErrorCode::not_found) throw;
    }
    patience_.expires_after(kEndPatience);
    patience_.async_wait([](const boost::system::error_code& error) {
      if (!error)
        fail(ErrorCode::io, "the sandbox did not end the session within {} s; it may go on", kEndPatience.count());
    });
    await_signal();
  }

  void end(int code) {
    code_ = code;
    loop_.stop();
  }

  sandbox::Sandbox& box_;
  asio::io_context loop_{1};
  // Opened anew: the loop reads without waiting, and that must not become so for whoever shares the terminal.
  asio::posix::stream_descriptor keys_{loop_, open("/proc/self/fd/0", O_RDONLY | O_NOCTTY | O_CLOEXEC)};
  asio::signal_set signals_{loop_, SIGWINCH, SIGTERM, SIGHUP};
  asio::steady_timer patience_{loop_};
  int interrupted_ = 0;  // the signal that told this program to end
  std::shared_ptr<sandbox::ProcessListener> listener_;
  asio::thread_pool typing_{1};
  int code_ = 0;
};

}  // namespace

int run_shell(sandbox::Sandbox& box, const std::vector<std::string>& command, bool root, const std::string& directory) {
  if (isatty(STDIN_FILENO) == 0 || isatty(STDOUT_FILENO) == 0)
    throw Error(ErrorCode::invalid_argument, "sandbox shell: standard input and output are not a terminal",
                "use `sandbox exec` for what no one types");
  sandbox::ProcessRequest request;
  request.argv = command;
  request.root = root;
  request.directory = directory;
  request.terminal = window_size();
  const char* kind = std::getenv("TERM");
  request.environment = {{"TERM", kind != nullptr ? kind : "xterm-256color"}, {"LANG", "C.UTF-8"}};
  return Shell(box, request).run();
}

}  // namespace tidelock::cli

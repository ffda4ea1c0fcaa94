// Drawing frames on the terminal.
#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>

#include "rl/view.hpp"

namespace tidelock::rl {
namespace {

constexpr std::array<int, 3> kSignals{SIGINT, SIGTERM, SIGHUP};
constexpr std::string_view kHide = "\x1b[?25l", kShow = "\x1b[?25h";

// A signal handler can only reach what is global.
std::atomic<bool> cursor_hidden{false};
std::array<struct sigaction, kSignals.size()> old_actions;

void write_all(std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(STDOUT_FILENO, text.data(), text.size());
    if (written <= 0) return;  // the terminal is gone; the run goes on without it
    text.remove_prefix(static_cast<std::size_t>(written));
  }
}

void show_cursor() {
  if (cursor_hidden.exchange(false)) write_all(kShow);
}

// Puts the terminal in order, then lets the signal do what it did before.
void on_signal(int signal) {
  const int kept = errno;
  show_cursor();
  for (std::size_t i = 0; i < kSignals.size(); ++i)
    if (kSignals.at(i) == signal) ::sigaction(signal, &old_actions.at(i), nullptr);
  ::raise(signal);
  errno = kept;
}

}  // namespace

struct Terminal::Impl {
  bool interactive = false, color = false;
  int columns = 0;
  std::vector<std::string> frame;
  std::int64_t last_step = -1;
  std::size_t last_evaluations = 0;

  std::string erased() const { return frame.empty() ? std::string() : fmt::format("\x1b[{}A\r\x1b[J", frame.size()); }

  void show(const std::string& before, std::vector<std::string> lines) {
    std::string text = before;
    // Lines are overwritten, not cleared first: no flicker.
    if (before.empty() && !frame.empty()) text += fmt::format("\x1b[{}A\r", frame.size());
    for (const std::string& line : lines) text += line + "\x1b[K\n";
    text += "\x1b[J";
    write_all(text);
    frame = std::move(lines);
  }
};

Terminal::Terminal() : impl_(std::make_unique<Impl>()) {
  const char* term = std::getenv("TERM");
  impl_->interactive = ::isatty(STDOUT_FILENO) == 1 && term != nullptr && std::strcmp(term, "dumb") != 0;
  const char* no_color = std::getenv("NO_COLOR");
  impl_->color = impl_->interactive && (no_color == nullptr || *no_color == '\0');
  if (!impl_->interactive) return;
  static const bool registered = std::atexit(show_cursor) == 0;
  (void)registered;
  cursor_hidden = true;
  write_all(kHide);
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    struct sigaction action {};
    action.sa_handler = on_signal;
    ::sigemptyset(&action.sa_mask);
    ::sigaction(kSignals.at(i), nullptr, &old_actions.at(i));
    if (old_actions.at(i).sa_handler != SIG_IGN) ::sigaction(kSignals.at(i), &action, nullptr);
  }
}

Terminal::~Terminal() {
  if (!impl_->interactive) return;
  show_cursor();
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    struct sigaction now {};
    ::sigaction(kSignals.at(i), nullptr, &now);
    // Somebody else's handler that came after ours stays.
    if (now.sa_handler == on_signal) ::sigaction(kSignals.at(i), &old_actions.at(i), nullptr);
  }
}

bool Terminal::interactive() const {
  return impl_->interactive;
}
bool Terminal::color() const {
  return impl_->color;
}

void Terminal::draw(const ViewState& state) {
  if (!impl_->interactive) {
    if (state.step == impl_->last_step && state.evaluations.size() == impl_->last_evaluations) return;
    if (impl_->last_step < 0 && state.step == 0 && state.evaluations.empty()) return;
    impl_->last_step = state.step;
    impl_->last_evaluations = state.evaluations.size();
    write_all(plain_line(state) + "\n");
    return;
  }
  struct winsize size {};
  const bool known = ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  const int columns = known ? size.ws_col : 80, rows = known && size.ws_row > 0 ? size.ws_row : 24;
  auto lines = render(state, columns, impl_->color);
  // One row stays for the cursor; a frame that scrolls could not be drawn over.
  if (static_cast<int>(lines.size()) > rows - 1) lines.resize(static_cast<std::size_t>(std::max(rows - 1, 1)));
  std::string before;
  // A narrower window has wrapped the old frame over an unknown number of rows.
  if (columns < impl_->columns) before = "\x1b[H\x1b[2J";
  impl_->columns = columns;
  impl_->show(before, std::move(lines));
}

void Terminal::note(const std::string& line) {
  if (!impl_->interactive) {
    write_all(line + "\n");
    return;
  }
  auto frame = impl_->frame;
  impl_->show(impl_->erased() + line + "\n", std::move(frame));
}

}  // namespace tidelock::rl

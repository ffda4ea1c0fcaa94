// One container, seen from the program.

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <thread>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "sandbox/command.hpp"
#include "sandbox/container.hpp"
#include "sandbox/exchange.hpp"
#include "sandbox/guest.hpp"

namespace tidelock::sandbox {
using namespace std::chrono_literals;
namespace {

constexpr auto kReadyPatience = 60s;    // for a container to come up on a crowded machine
constexpr auto kKillPatience = 10s;     // for init to report the end of a command that was killed
constexpr auto kRemovalPatience = 30s;  // for the kernel to take a container apart
constexpr auto kTransferPatience = 60s;
constexpr std::chrono::hours kLongest{24 * 365};  // of a command; keeps the clock's arithmetic in range
constexpr auto kFreezeLook = 50us;
constexpr auto kFreezePatience = 200ms;  // processes in the middle of a system call freeze at its end

// Adds the life of the object to `total`.
class Stopwatch {
 public:
  explicit Stopwatch(double& total) : total_(total), start_(std::chrono::steady_clock::now()) {}
  ~Stopwatch() { total_ += seconds_since(start_); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& total_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace

ContainerSandbox::ContainerSandbox(std::shared_ptr<HelperProcess> helper, const Spec& spec,
                                   const ContainerSandbox* source)
    : helper_(std::move(helper)), spec_(spec), id_(helper_->next_id()), born_(Clock::now()) {
  CreateRequest request{id_, helper_->image_root(spec.image).string(), spec.limits,
                        source != nullptr ? source->created_.uid : 0};
  auto [ours, theirs] = make_socket_pair();
  socket_ = std::move(ours);
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) {
    fail(ErrorCode::exhausted, "sandbox {}: cannot make a pipe: {}", id_, std::strerror(errno));
  }
  gone_.reset(ends[0]);
  FileDescriptor gone_end(ends[1]);
  std::vector<int> sent{theirs.get(), gone_end.get()};
  if (source != nullptr) {
    sent.push_back(source->upper_.get());
  }
  HelperProcess::Birth birth = helper_->create(request, sent);
  created_ = birth.created;
  if (birth.freezer.size() == 2) {
    freeze_control_ = std::move(birth.freezer[0]);
    freeze_events_ = std::move(birth.freezer[1]);
  }
  theirs.reset();
  gone_end.reset();
  try {
    await_ready();
  } catch (const Error&) {
    helper_->destroy(id_);
    wait_readable(gone_.get(), Clock::now() + kRemovalPatience);
    throw;
  }
}

void ContainerSandbox::await_ready() {
  std::optional<Message> message = receive(Clock::now() + kReadyPatience);
  if (!message) {
    die("did not come up in time");
  }
  if (message->type == MessageType::failed) {
    fail(ErrorCode::io, "sandbox {}: {}", id_, message->body);
  }
  if (message->type != MessageType::ready || message->descriptors.size() != 1) {
    die("its init answered out of order");
  }
  upper_ = std::move(message->descriptors[0]);
}

ContainerSandbox::~ContainerSandbox() {
  helper_->destroy(id_);
  socket_.reset();
  upper_.reset();
  try {
    if (!wait_readable(gone_.get(), Clock::now() + kRemovalPatience)) {
      spdlog::warn("sandbox {}: its processes have not ended after {} s", id_, kRemovalPatience.count());
    }
  } catch (const Error& error) {
    spdlog::warn("sandbox {}: {}", id_, error.what());
  }
}

void ContainerSandbox::die(const std::string& why) {
  dead_ = why;
  helper_->destroy(id_);
  fail(ErrorCode::io, "sandbox {}: {}; it cannot be used any more", id_, why);
}

void ContainerSandbox::need_alive() const {
  if (!dead_.empty()) {
    fail(ErrorCode::io, "sandbox {}: cannot be used any more: {}", id_, dead_);
  }
}

std::optional<Message> ContainerSandbox::receive(Clock::time_point deadline) {
  if (!wait_readable(socket_.get(), deadline)) {
    return std::nullopt;
  }
  std::optional<Message> message;
  try {
    message = receive_message(socket_.get());
  } catch (const Error& error) {
    die(error.what());
  }
  if (!message) {
    die("its init has ended");
  }
  return message;
}

void ContainerSandbox::send(MessageType type, std::string_view body, std::span<const int> descriptors) {
  try {
    send_message(socket_.get(), type, body, descriptors);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::invalid_argument) {
      throw;  // too large: nothing was sent
    }
    die(error.what());
  }
}

// Reads output until init reports the end of the command; kills it at the deadline or when on_output throws.
Exited ContainerSandbox::pump(OutputPipe& output, OutputPipe& error, Clock::time_point deadline, bool& timed_out) {
  bool killed = false;
  while (true) {
    pollfd entries[] = {{output.descriptor(), POLLIN, 0}, {error.descriptor(), POLLIN, 0}, {socket_.get(), POLLIN, 0}};
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    const int ready = poll(entries, 3, left > 0 ? static_cast<int>(std::min<long>(left, 1'000'000)) : 0);
    if (ready < 0 && errno != EINTR) {
      die(std::string("poll: ") + std::strerror(errno));
    }
    if (entries[0].revents != 0) {
      output.read_some();
    }
    if (entries[1].revents != 0) {
      error.read_some();
    }
    if (entries[2].revents != 0) {
      const std::optional<Message> message = receive(deadline);
      if (message && message->type == MessageType::failed) {
        fail(ErrorCode::exhausted, "sandbox {}: cannot start a process: {}", id_, message->body);
      }
      if (!message || message->type != MessageType::exited) {
        die("its init answered out of order");
      }
      output.drain();
      error.drain();
      return decode_exited(message->body);
    }
    const bool late = Clock::now() >= deadline;
    if (killed && late) {
      die("a command could not be ended");
    }
    if (!killed && (late || output.thrown() || error.thrown())) {
      killed = true;
      timed_out = late;
      deadline = Clock::now() + kKillPatience;
      send(MessageType::kill);
    }
  }
}

ExecResult ContainerSandbox::run(const RunRequest& request, const ExecRequest& io) {
  need_alive();
  thaw();
  const Stopwatch busy(busy_);
  const Clock::time_point start = Clock::now();
  OutputPipe output(Stream::standard_output, io), error(Stream::standard_error, io);
  {
    const FileDescriptor input = make_input(io.input);
    const int descriptors[] = {input.get(), output.command_end(), error.command_end()};
    send(MessageType::run, encode(request), descriptors);
  }
  output.close_command_end();
  error.close_command_end();
  ExecResult result;
  const Exited exited =
      pump(output, error, start + std::min<std::chrono::milliseconds>(io.timeout, kLongest), result.timed_out);
  result.exit_code = exited.exit_code;
  result.signal = exited.signal;
  // A process in the background still holds a pipe: init goes on emptying it, so that the process is not ended by
  // SIGPIPE or stopped by a full pipe.
  std::vector<FileDescriptor> held;
  std::vector<int> sent;
  for (OutputPipe* pipe : {&output, &error}) {
    if (pipe->descriptor() >= 0) {
      held.push_back(pipe->take());
      sent.push_back(held.back().get());
    }
  }
  if (!sent.empty()) {
    send(MessageType::adopt, {}, sent);
  }
  for (const OutputPipe* pipe : {&output, &error}) {
    if (pipe->thrown()) {
      std::rethrow_exception(pipe->thrown());
    }
  }
  result.truncated = output.truncated() || error.truncated();
  result.output = std::move(output.text());
  result.error = std::move(error.text());
  result.seconds = seconds_since(start);
  return result;
}

ExecResult ContainerSandbox::exec(const ExecRequest& request) {
  if (request.argv.empty() || request.argv.front().empty()) {
    fail(ErrorCode::invalid_argument, "sandbox {}: exec without a command", id_);
  }
  if (request.timeout.count() < 0) {
    fail(ErrorCode::invalid_argument, "sandbox {}: a time-out of {} ms", id_, request.timeout.count());
  }
  RunRequest run_request;
  run_request.argv = request.argv;
  run_request.path = request.directory;
  for (const std::string& text : request.argv) {
    need_no_zero_byte(text, "an argument");
  }
  need_no_zero_byte(request.directory, "the directory");
  run_request.environment = environment_of(id_, request);
  return run(run_request, request);
}

ExecResult ContainerSandbox::file_operation(const RunRequest& request, const ExecRequest& io) {
  need_no_zero_byte(request.path, "a path");
  if (request.path.empty() || request.path.back() == '/') {
    fail(ErrorCode::invalid_argument, "sandbox {}: '{}' does not name a file", id_, request.path);
  }
  RunRequest absolute = request;
  if (absolute.path.front() != '/') {
    absolute.path = "/root/" + absolute.path;
  }
  ExecResult result = run(absolute, io);
  if (result.exit_code == static_cast<int>(FileExit::done)) {
    return result;
  }
  if (result.error.empty()) {
    result.error = result.timed_out ? "took too long" : fmt::format("ended by signal {}", result.signal);
  }
  ErrorCode code = ErrorCode::io;
  switch (static_cast<FileExit>(result.exit_code)) {
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
  fail(code, "sandbox {}: {}", id_, result.error);
}

void ContainerSandbox::write_file(const std::string& path, std::string_view content, int mode) {
  RunRequest request;
  request.kind = RunKind::write_file;
  request.path = path;
  request.mode = static_cast<std::uint32_t>(mode);
  ExecRequest io;
  io.input = content;
  io.timeout = kTransferPatience;
  file_operation(request, io);
}

std::string ContainerSandbox::read_file(const std::string& path, std::uint64_t limit) {
  RunRequest request;
  request.kind = RunKind::read_file;
  request.path = path;
  request.limit = limit;
  ExecRequest io;
  io.timeout = kTransferPatience;
  io.output_limit = limit;
  return std::move(file_operation(request, io).output);
}

void ContainerSandbox::freeze() {
  need_alive();
  if (!frozen_) {
    set_frozen(true);
    frozen_ = true;
    frozen_since_ = Clock::now();
  }
}

void ContainerSandbox::thaw() {
  need_alive();
  if (frozen_) {
    set_frozen(false);
    frozen_ = false;
    frozen_time_ += seconds_since(frozen_since_);
  }
}

void ContainerSandbox::set_frozen(bool frozen) {
  const Freezer freezer = helper_->welcome().freezer;
  if (freezer == Freezer::signals) {
    send(frozen ? MessageType::stop : MessageType::resume);
    const std::optional<Message> answer = receive(Clock::now() + kKillPatience);
    if (!answer || answer->type != MessageType::done) {
      die("its init did not answer");
    }
    return;
  }
  const bool version2 = freezer == Freezer::version2;
  const std::string_view word = version2 ? (frozen ? "1" : "0") : (frozen ? "FROZEN" : "THAWED");
  if (pwrite(freeze_control_.get(), word.data(), word.size(), 0) != static_cast<ssize_t>(word.size())) {
    die(std::string("cannot be frozen or thawed: ") + std::strerror(errno));
  }
  // Freezing is complete when the last process has come out of the kernel. One that does not in time freezes later.
  const std::string_view expected = version2 ? "frozen 1" : "FROZEN\n";
  const Clock::time_point deadline = Clock::now() + kFreezePatience;
  char state[128];
  while (frozen) {
    const ssize_t got = pread(freeze_events_.get(), state, sizeof state, 0);
    if (got < 0 || std::string_view(state, static_cast<std::size_t>(got)).find(expected) != std::string_view::npos ||
        Clock::now() >= deadline) {
      return;
    }
    // The kernel reports the change at most every 10 ms, so we look ourselves.
    std::this_thread::sleep_for(kFreezeLook);
  }
}

std::unique_ptr<Sandbox> ContainerSandbox::fork_filesystem() {
  need_alive();
  const Stopwatch busy(busy_);
  const bool was_frozen = frozen_;
  freeze();  // so that no file changes while it is copied
  try {
    auto copy = std::make_unique<ContainerSandbox>(helper_, spec_, this);
    if (!was_frozen) {
      thaw();
    }
    return copy;
  } catch (const Error&) {
    if (!was_frozen && dead_.empty()) {
      thaw();
    }
    throw;
  }
}

Times ContainerSandbox::times() const {
  return {.alive = seconds_since(born_),
          .busy = busy_,
          .frozen = frozen_time_ + (frozen_ ? seconds_since(frozen_since_) : 0)};
}

}  // namespace tidelock::sandbox

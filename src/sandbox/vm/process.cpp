#include "sandbox/vm/process.hpp"

#include <signal.h>

#include <algorithm>
#include <cstring>

#include "base/error.hpp"
#include "sandbox/vm/entries.hpp"
#include "sandbox/vm/mailbox.hpp"

namespace tidelock::sandbox::vm {
using namespace std::chrono_literals;
namespace {

constexpr auto kAnswerPatience = 30s;  // for the agent's answers, which come at once unless the host is overloaded
constexpr auto kInputPatience = 10s;   // for a process to take its input

ProcessInfo describe(int pid, const GuestRequest& request) {
  ProcessInfo out;
  out.pid = pid;
  out.request.argv = split_texts(request.arguments);
  for (const std::string& variable : split_texts(request.environment)) {
    const std::size_t equals = std::min(variable.find('='), variable.size());
    out.request.environment[variable.substr(0, equals)] = variable.substr(std::min(equals + 1, variable.size()));
  }
  out.request.directory = request.path;
  out.request.root = (request.flags & kAsRoot) != 0;
  out.request.open_input = (request.flags & kOpenInput) != 0;
  out.request.tag = request.tag;
  if ((request.flags & kTerminal) != 0) {
    out.request.terminal =
        WindowSize{static_cast<std::uint16_t>(request.mode >> 16), static_cast<std::uint16_t>(request.mode)};
  }
  return out;
}

}  // namespace

// What waits for one listener. Apart from it, so that telling never holds the last of a listener, whose end takes the
// same lock.
struct Process::Queue {
  std::deque<ProcessEvent> events;
  std::size_t waiting = 0;  // bytes in events
  std::function<void()> wake;
};

class Process::Listener : public ProcessListener {
 public:
  Listener(std::shared_ptr<Process> process, std::shared_ptr<Queue> queue)
      : process_(std::move(process)), queue_(std::move(queue)) {}
  ~Listener() override {
    const std::lock_guard lock(process_->mutex_);
    process_->queues_.remove(queue_);
    process_->acknowledge();  // nobody may be left to wait for
  }
  int pid() const override { return process_->pid_; }
  std::optional<ProcessEvent> take() override {
    const std::lock_guard lock(process_->mutex_);
    if (queue_->events.empty()) {
      return std::nullopt;
    }
    ProcessEvent out = std::move(queue_->events.front());
    queue_->events.pop_front();
    queue_->waiting -= out.bytes.size();
    process_->acknowledge();
    return out;
  }
  void on_event(std::function<void()> wake) override {
    const std::lock_guard lock(process_->mutex_);
    queue_->wake = std::move(wake);
    if (!queue_->events.empty()) {
      queue_->wake();
    }
  }

 private:
  std::shared_ptr<Process> process_;
  std::shared_ptr<Queue> queue_;
};

void Process::await_start(std::uint32_t stream, ErrorCode refused) {
  std::unique_lock lock(mutex_);
  stream_ = stream;
  if (!changed_.wait_for(lock, kAnswerPatience, [this] { return started_ || over_ || !refusal_.empty(); })) {
    fail(ErrorCode::io, "the guest's agent does not answer within {} s", kAnswerPatience.count());
  }
  if (!refusal_.empty()) {
    fail(refused, "{}", refusal_);
  }
  if (!started_) {
    fail_gone();
  }
}

std::shared_ptr<ProcessListener> Process::listen() {
  const auto queue = std::make_shared<Queue>();
  auto out = std::make_shared<Listener>(shared_from_this(), queue);
  const std::lock_guard lock(mutex_);
  if (last_) {
    queue->events.push_back(*last_);
  } else {
    queues_.push_back(queue);
  }
  return out;
}

bool Process::over() const {
  const std::lock_guard lock(mutex_);
  return over_;
}

// Under mutex_.
void Process::tell(const ProcessEvent& event) {
  for (const std::shared_ptr<Queue>& queue : queues_) {
    queue->events.push_back(event);
    queue->waiting += event.bytes.size();
    if (queue->wake) {
      queue->wake();
    }
  }
}

// Under mutex_. In steps, so that a byte does not cost a frame.
void Process::acknowledge() {
  std::size_t waiting = 0;
  for (const std::shared_ptr<Queue>& queue : queues_) {
    waiting = std::max(waiting, queue->waiting);
  }
  const std::size_t taken = received_ - waiting - acknowledged_;
  const std::shared_ptr<Link> link = link_.lock();
  if (taken < kOutputWindow / 4 || over_ || link == nullptr) {
    return;
  }
  acknowledged_ += taken;
  std::string count;
  put_u32(count, static_cast<std::uint32_t>(taken));
  try {
    link->send_frame(FrameType::output_ack, stream_, count);
  } catch (const Error&) {  // the reader of the link finds out and tells everybody
  }
}

void Process::take(const Frame& frame) {
  std::unique_lock lock(mutex_);
  if (frame.type == FrameType::started && frame.payload.size() == 8) {
    pid_ = static_cast<int>(get_u32(frame.payload, 0));
    open_input_ = (get_u32(frame.payload, 4) & kOpenInput) != 0;
    ended_ = (get_u32(frame.payload, 4) & kHasEnded) != 0;
    terminal_ = (get_u32(frame.payload, 4) & kTerminal) != 0;
    started_ = true;
  } else if (frame.type == FrameType::failed) {
    refusal_ = frame.payload;
  } else if (frame.type == FrameType::input_ack && frame.payload.size() == 4) {
    input_under_way_ -= std::min<std::size_t>(input_under_way_, get_u32(frame.payload, 0));
  } else if (frame.type == FrameType::output || frame.type == FrameType::error) {
    using Kind = ProcessEvent::Kind;
    received_ += frame.payload.size();
    const Kind kind = terminal_ ? Kind::terminal : frame.type == FrameType::output ? Kind::output : Kind::error;
    tell({.kind = kind, .bytes = frame.payload});
    acknowledge();
  } else if (frame.type == FrameType::exited && frame.payload.size() == 8) {
    last_ = ProcessEvent{.kind = ProcessEvent::Kind::ended,
                         .bytes = {},
                         .exit_code = static_cast<int>(get_u32(frame.payload, 0)),
                         .signal = static_cast<int>(get_u32(frame.payload, 4))};
    over_ = true;
    tell(*last_);
  }
  changed_.notify_all();
  const bool over = over_;
  lock.unlock();
  if (const std::shared_ptr<Link> link = over ? link_.lock() : nullptr) {
    link->forget_process(pid_, frame.stream);
  }
}

void Process::lose() {
  const std::lock_guard lock(mutex_);
  if (!over_) {
    over_ = true;
    last_ = ProcessEvent{.kind = ProcessEvent::Kind::lost, .bytes = {}};
    tell(*last_);
  }
  changed_.notify_all();
}

void Process::signal(int number) {
  const std::shared_ptr<Link> link = link_.lock();
  {
    const std::lock_guard lock(mutex_);
    need_alive();
  }
  if (link == nullptr) {
    fail_gone();
  }
  if (number == SIGKILL) {
    link->send_frame(FrameType::kill, stream_);
    return;
  }
  std::string body;
  put_u32(body, static_cast<std::uint32_t>(number));
  link->send_frame(FrameType::signal, stream_, body);
}

void Process::need_alive() const {
  if (ended_ || over_) {
    fail(ErrorCode::not_found, "process {} has ended", pid_);
  }
}

void Process::need_input() const {
  need_alive();
  if (!open_input_) {
    fail(ErrorCode::invalid_argument, "process {}: its standard input is closed, or was not asked for at its start",
         pid_);
  }
}

void Process::write(std::string_view bytes) {
  const std::lock_guard order(writing_);  // one write after another
  const std::shared_ptr<Link> link = link_.lock();
  const auto deadline = std::chrono::steady_clock::now() + kInputPatience;
  while (!bytes.empty()) {
    std::size_t count = 0;
    {
      std::unique_lock lock(mutex_);
      need_input();
      if (!changed_.wait_until(lock, deadline, [this] { return over_ || input_under_way_ < kInputWindow; })) {
        fail(ErrorCode::exhausted, "process {} has not read its input for {} s; {} bytes were not given to it", pid_,
             kInputPatience.count(), bytes.size());
      }
      need_alive();
      if (link == nullptr) {
        fail_gone();
      }
      count = std::min({kMaxPayload, bytes.size(), kInputWindow - input_under_way_});
      input_under_way_ += count;
    }
    link->send_frame(FrameType::input, stream_, bytes.substr(0, count));
    bytes.remove_prefix(count);
  }
}

void Process::close_input() {
  const std::lock_guard order(writing_);
  {
    const std::lock_guard lock(mutex_);
    need_input();
    if (terminal_) {
      fail(ErrorCode::invalid_argument, "process {}: the input of a terminal ends by typing control-D", pid_);
    }
    open_input_ = false;
  }
  if (const std::shared_ptr<Link> link = link_.lock()) {
    link->send_frame(FrameType::input_end, stream_);
  }
}

void Process::resize(WindowSize size) {
  {
    const std::lock_guard lock(mutex_);
    need_alive();
    if (!terminal_) {
      fail(ErrorCode::invalid_argument, "process {} has no terminal", pid_);
    }
  }
  const std::shared_ptr<Link> link = link_.lock();
  if (link == nullptr) {
    fail_gone();
  }
  std::string body;
  put_u32(body, pack_size(size.rows, size.columns));
  link->send_frame(FrameType::resize, stream_, body);
}

// Opens a stream for the process, says what starts it or attaches to it, and waits for the answer.
void Link::begin(const std::shared_ptr<Process>& process, const std::function<void(std::uint32_t stream)>& say,
                 ErrorCode refused) {
  const std::uint32_t stream = open(process);
  try {
    say(stream);
    process->await_start(stream, refused);
  } catch (const Error&) {
    forget(stream);
    throw;
  }
  const std::lock_guard lock(mutex_);
  if (!process->over()) {
    processes_.insert_or_assign(process->pid(), process);
  }
}

Link::Started Link::start_process(const GuestRequest& request, ErrorCode refused) {
  const auto process = std::make_shared<Process>(weak_from_this());
  std::shared_ptr<ProcessListener> listener = process->listen();  // before it can say anything
  begin(
      process, [&](std::uint32_t stream) { send_request(stream, encode_request(request)); }, refused);
  return {process, listener};
}

std::shared_ptr<Process> Link::find_process(int pid) {
  const std::lock_guard one(attaching_);
  {
    const std::lock_guard lock(mutex_);
    const auto found = processes_.find(pid);
    if (found != processes_.end()) {
      return found->second;
    }
  }
  auto process = std::make_shared<Process>(weak_from_this());
  std::string body;
  put_u32(body, static_cast<std::uint32_t>(pid));
  begin(
      process, [&](std::uint32_t stream) { send_frame(FrameType::attach, stream, body); }, ErrorCode::not_found);
  return process;
}

void Link::forget_process(int pid, std::uint32_t stream) {
  const std::lock_guard lock(mutex_);
  sinks_.erase(stream);
  const auto found = processes_.find(pid);
  if (found != processes_.end() && found->second->stream() == stream) {
    processes_.erase(found);
  }
}

std::vector<ProcessInfo> Link::list_processes() {
  const Opened opened{*this};
  send_frame(FrameType::list, opened.stream);
  const auto deadline = std::chrono::steady_clock::now() + kAnswerPatience;
  std::string body;  // in as many frames as it needs
  for (Frame frame; frame.type != FrameType::listing_end; body += frame.payload) {
    if (!opened.mailbox->next(frame, deadline)) {
      fail(ErrorCode::io, "the guest's agent does not list its processes");
    }
  }
  std::vector<ProcessInfo> out;
  for (std::size_t at = 0; body.size() - at >= 8;) {
    const std::size_t length = get_u32(body, at + 4);
    GuestRequest request;
    if (length > body.size() - at - 8 || !decode_request(std::string_view(body).substr(at + 8, length), request)) {
      fail(ErrorCode::io, "the guest's agent sent a list of processes that cannot be read");
    }
    out.push_back(describe(static_cast<int>(get_u32(body, at)), request));
    at += 8 + length;
  }
  return out;
}

}  // namespace tidelock::sandbox::vm

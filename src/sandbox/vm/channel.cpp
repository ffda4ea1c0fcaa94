#include "sandbox/vm/channel.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <exception>
#include <optional>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/random.hpp"
#include "sandbox/vm/mailbox.hpp"
#include "sandbox/vm/process.hpp"
#include "sandbox/vm/qmp.hpp"

namespace tidelock::sandbox::vm {
using namespace std::chrono_literals;

void fail_gone() {
  fail(ErrorCode::io, "the guest's agent is gone: its machine ended or was paused");
}

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kKillPatience = 20s;  // for the agent to report the end of what was killed
constexpr std::chrono::hours kLongest{24 * 365};
constexpr std::size_t kMaxRest = 32U << 20;  // bytes that wait for a guest; windows and requests need far less

// One request under way.
struct Run {
  const ExecRequest& io;
  ExecResult result = {};
  std::size_t sent = 0, acknowledged = 0;  // of io.input
  bool input_ended = false, ended = false;
  std::size_t taken = 0;  // of output, not yet acknowledged
  std::exception_ptr thrown = nullptr;

  void keep(Stream stream, const std::string& bytes) {
    taken += bytes.size();
    std::string& text = stream == Stream::standard_output ? result.output : result.error;
    const std::size_t room = io.output_limit - std::min<std::uint64_t>(text.size(), io.output_limit);
    text.append(bytes, 0, std::min(room, bytes.size()));
    result.truncated = result.truncated || bytes.size() > room;
    if (io.on_output && !thrown) {
      try {
        io.on_output(stream, bytes);
      } catch (...) {
        thrown = std::current_exception();
      }
    }
  }

  void take(const Frame& frame) {
    if (frame.type == FrameType::output) {
      keep(Stream::standard_output, frame.payload);
    } else if (frame.type == FrameType::error) {
      keep(Stream::standard_error, frame.payload);
    } else if (frame.type == FrameType::failed) {
      fail(ErrorCode::exhausted, "cannot start a process: {}", frame.payload);
    } else if (frame.type == FrameType::input_ack) {
      acknowledged += frame.payload.size() == 4 ? get_u32(frame.payload, 0) : 0;
    } else if (frame.type == FrameType::exited && frame.payload.size() == 8) {
      result.exit_code = static_cast<int>(get_u32(frame.payload, 0));
      result.signal = static_cast<int>(get_u32(frame.payload, 4));
      ended = true;
    }
  }

  // What is to be said now: input that there is room for, and how much output was taken.
  void speak(std::uint32_t stream, std::string& out) {
    while (sent < io.input.size() && sent - std::min(sent, acknowledged) < kInputWindow) {
      const std::size_t count = std::min({kMaxPayload, io.input.size() - sent, kInputWindow - (sent - acknowledged)});
      append_frame(out, FrameType::input, stream, std::string_view(io.input).substr(sent, count));
      sent += count;
    }
    if (sent == io.input.size() && !input_ended) {
      append_frame(out, FrameType::input_end, stream);
      input_ended = true;
    }
    if (taken >= kOutputWindow / 4) {
      std::string count;
      put_u32(count, static_cast<std::uint32_t>(taken));
      append_frame(out, FrameType::output_ack, stream, count);
      taken = 0;
    }
  }
};

}  // namespace

Link::Link(FileDescriptor socket, FrameReader reader, std::uint32_t agent_version)
    : socket_(std::move(socket)), reader_(std::move(reader)), agent_version_(agent_version) {}

Link::~Link() {
  for (std::thread* thread : {&thread_, &writer_}) {
    if (thread->joinable()) {  // the channel that made it has closed it, and so ended the threads
      thread->detach();
    }
  }
}

void Link::start() {
  thread_ = std::thread([self = shared_from_this()] { self->read(); });
  writer_ = std::thread([self = shared_from_this()] { self->write_rest(); });
}

bool Link::broken() const {
  const std::lock_guard lock(mutex_);
  return broken_;
}

void Link::need_agent(std::uint32_t version, const char* what) const {
  if (agent_version_ < version) {
    throw Error(ErrorCode::not_supported,
                fmt::format("the agent in this sandbox is older than this program and has no {}", what),
                "use a sandbox that was made from its template anew");
  }
}

void Link::close() {
  shutdown(socket_.get(), SHUT_RDWR);  // the reader ends, and with it the writer
  for (std::thread* thread : {&thread_, &writer_}) {
    if (thread->joinable() && thread->get_id() != std::this_thread::get_id()) {
      thread->join();
    }
  }
}

void Link::drop() {
  shutdown(socket_.get(), SHUT_RDWR);
  {
    const std::lock_guard lock(sending_);
    ending_ = true;
    more_.notify_one();
  }
  std::map<std::uint32_t, std::shared_ptr<Sink>> sinks;
  {
    const std::lock_guard lock(mutex_);
    broken_ = true;
    sinks.swap(sinks_);
    processes_.clear();
  }
  for (const auto& [stream, sink] : sinks) {
    sink->lose();
  }
}

void Link::read() {
  char part[64U << 10];
  Frame frame;
  while (true) {
    while (reader_.next(frame)) {
      std::shared_ptr<Sink> sink;
      {
        const std::lock_guard lock(mutex_);
        const auto found = sinks_.find(frame.stream);
        sink = found == sinks_.end() ? nullptr : found->second;
      }
      if (sink != nullptr) {
        sink->take(frame);
      }
    }
    const ssize_t got = ::read(socket_.get(), part, sizeof part);
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got <= 0) {
      break;
    }
    reader_.feed({part, static_cast<std::size_t>(got)});
  }
  drop();
}

std::uint32_t Link::open(const std::shared_ptr<Sink>& sink) {
  const std::lock_guard lock(mutex_);
  if (broken_) {
    fail_gone();
  }
  sinks_.emplace(++stream_, sink);
  return stream_;
}

void Link::forget(std::uint32_t stream) {
  const std::lock_guard lock(mutex_);
  sinks_.erase(stream);
}

void Link::send(std::string_view bytes) {
  const std::lock_guard lock(sending_);
  while (!bytes.empty() && !writing_) {
    const ssize_t put = ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (put < 0 && errno == EAGAIN) {
      break;
    }
    if (put <= 0 && errno != EINTR) {
      const int error = errno;
      shutdown(socket_.get(), SHUT_RDWR);
      fail(ErrorCode::io, "the connection to the guest's agent broke: {}", std::strerror(error));
    }
    bytes.remove_prefix(static_cast<std::size_t>(std::max<ssize_t>(put, 0)));
  }
  if (bytes.empty()) {
    return;
  }
  if (ending_ || rest_.size() + bytes.size() > kMaxRest) {
    shutdown(socket_.get(), SHUT_RDWR);
    fail(ErrorCode::io, "the guest's agent does not take what is sent to it");
  }
  rest_ += bytes;
  writing_ = true;
  more_.notify_one();
}

void Link::write_rest() {
  std::unique_lock lock(sending_);
  while (true) {
    more_.wait(lock, [this] { return ending_ || !rest_.empty(); });
    if (ending_) {
      return;
    }
    std::string part;
    part.swap(rest_);
    lock.unlock();
    for (std::string_view left = part; !left.empty();) {
      const ssize_t put = ::send(socket_.get(), left.data(), left.size(), MSG_NOSIGNAL);
      if (put <= 0 && errno != EINTR) {
        shutdown(socket_.get(), SHUT_RDWR);
        break;
      }
      left.remove_prefix(static_cast<std::size_t>(std::max<ssize_t>(put, 0)));
    }
    lock.lock();
    writing_ = !rest_.empty();
  }
}

void Link::send_frame(FrameType type, std::uint32_t stream, std::string_view payload) {
  std::string bytes;
  append_frame(bytes, type, stream, payload);
  send(bytes);
}

void Link::send_request(std::uint32_t stream, const std::string& body) {
  if (body.size() > kMaxRequest) {
    fail(ErrorCode::invalid_argument, "sandbox: a command with {} bytes of arguments and environment, at most {}",
         body.size(), kMaxRequest);
  }
  std::string frames;
  std::size_t at = 0;
  do {
    const std::string_view part = std::string_view(body).substr(at, kMaxPayload);
    at += part.size();
    append_frame(frames, at == body.size() ? FrameType::request_end : FrameType::request, stream, part);
  } while (at < body.size());
  send(frames);
}

void Channel::close() {
  if (link_ != nullptr) {
    link_->close();
    link_.reset();
  }
}

// Says hello and `more` in one breath; done when the answer to hello and then a frame of type `last` has come.
void Channel::greet(const std::string& socket_path, const std::string& more, FrameType last,
                    std::chrono::milliseconds patience) {
  const Clock::time_point deadline = Clock::now() + patience;
  close();
  FileDescriptor socket = connect_socket(socket_path);
  const std::string nonce = random_bytes(kNonce);
  std::string hello(1, '\0');  // ends what an earlier connection left half sent
  std::string body = nonce;
  put_u32(body, 0);
  append_frame(hello, FrameType::hello, 0, body);
  hello += more;
  for (std::string_view left = hello; !left.empty();) {
    const ssize_t put = ::send(socket.get(), left.data(), left.size(), MSG_NOSIGNAL);
    if (put <= 0) {
      fail_errno("greet the agent at", socket_path);
    }
    left.remove_prefix(static_cast<std::size_t>(put));
  }
  FrameReader reader;
  Frame frame;
  std::optional<std::uint32_t> version;
  while (!version || frame.type != last) {
    while (!reader.next(frame)) {
      if (!wait_readable(socket.get(), deadline)) {
        fail(ErrorCode::io, "the guest's agent does not answer within {} ms", patience.count());
      }
      char part[64U << 10];
      const ssize_t got = read(socket.get(), part, sizeof part);
      if (got <= 0) {
        fail_gone();
      }
      reader.feed({part, static_cast<std::size_t>(got)});
    }
    if (frame.type == FrameType::welcome && frame.payload.size() == kNonce + 4 && frame.payload.starts_with(nonce)) {
      version = get_u32(frame.payload, kNonce);
    }
  }
  link_ = std::make_shared<Link>(std::move(socket), std::move(reader), *version);
  link_->start();
}

void Channel::open(const std::string& socket_path, std::chrono::milliseconds patience) {
  greet(socket_path, {}, FrameType::welcome, patience);
}

void Channel::wake(const std::string& socket_path, std::chrono::milliseconds patience) {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  std::string body, message;
  put_u64(body, static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(now.tv_nsec));
  body += random_bytes(64);
  append_frame(message, FrameType::clock, 0, body);
  greet(socket_path, message, FrameType::clock_set, patience);
}

ExecResult Channel::run(const GuestRequest& request, const ExecRequest& io) {
  const Clock::time_point start = Clock::now();
  Clock::time_point deadline = start + std::min<std::chrono::milliseconds>(io.timeout, kLongest);
  if (link_ == nullptr) {
    fail_gone();
  }
  Opened opened{*link_};
  link_->send_request(opened.stream, encode_request(request));
  Run run{io};
  bool killed = false;
  while (!run.ended) {
    std::string out;
    run.speak(opened.stream, out);
    if (!killed && (run.thrown || Clock::now() >= deadline)) {
      run.result.timed_out = !run.thrown;
      killed = true;
      deadline = Clock::now() + kKillPatience;
      append_frame(out, FrameType::kill, opened.stream);
    }
    link_->send(out);
    Frame frame;
    if (opened.mailbox->next(frame, deadline)) {
      run.take(frame);
    } else if (killed) {
      close();
      fail(ErrorCode::io, "a command could not be ended within {} s", kKillPatience.count());
    }
  }
  if (run.thrown) {
    std::rethrow_exception(run.thrown);
  }
  run.result.seconds = seconds_since(start);
  return std::move(run.result);
}

}  // namespace tidelock::sandbox::vm

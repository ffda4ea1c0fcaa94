#include "sandbox/vm/channel.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <exception>

#include "base/error.hpp"
#include "sandbox/vm/qmp.hpp"

namespace tidelock::sandbox::vm {
using namespace std::chrono_literals;
namespace {

constexpr auto kKillPatience = 20s;  // for the agent to report the end of what was killed
constexpr std::chrono::hours kLongest{24 * 365};

std::string random_bytes(std::size_t count) {
  std::string out(count, '\0');
  if (getrandom(out.data(), out.size(), 0) != static_cast<ssize_t>(count)) {
    fail(ErrorCode::io, "sandbox: no random bytes: {}", std::strerror(errno));
  }
  return out;
}

}  // namespace

// One request under way.
struct Channel::Run {
  const ExecRequest& io;
  ExecResult result;
  std::size_t sent = 0, acknowledged = 0;  // of io.input
  bool input_ended = false, ended = false;
  std::exception_ptr thrown;

  void keep(Stream stream, const std::string& bytes) {
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
};

void Channel::send(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t put = ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (put <= 0 && errno != EINTR) {
      const int error = errno;
      close();
      fail(ErrorCode::io, "the connection to the guest's agent broke: {}", std::strerror(error));
    }
    bytes.remove_prefix(static_cast<std::size_t>(std::max<ssize_t>(put, 0)));
  }
}

bool Channel::receive(Frame& frame, Clock::time_point deadline) {
  while (!reader_.next(frame)) {
    if (!wait_readable(socket_.get(), deadline)) {
      return false;
    }
    char part[64U << 10];
    const ssize_t got = read(socket_.get(), part, sizeof part);
    if (got <= 0) {
      close();
      fail(ErrorCode::io, "the guest's agent is gone: its machine ended or was paused");
    }
    reader_.feed({part, static_cast<std::size_t>(got)});
  }
  return true;
}

// Says hello and `more` in one breath; done when the answer to hello and then a frame of type `last` has come.
void Channel::greet(const std::string& socket_path, const std::string& more, FrameType last,
                    std::chrono::milliseconds patience) {
  const Clock::time_point deadline = Clock::now() + patience;
  socket_ = connect_socket(socket_path);
  reader_.forget();
  const std::string nonce = random_bytes(16);
  std::string hello(1, '\0');  // ends what an earlier connection left half sent
  append_frame(hello, FrameType::hello, 0, nonce);
  send(hello += more);
  Frame frame;
  for (bool welcome = false; !welcome || frame.type != last;) {
    if (!receive(frame, deadline)) {
      close();
      fail(ErrorCode::io, "the guest's agent does not answer within {} ms", patience.count());
    }
    welcome = welcome || (frame.type == FrameType::welcome && frame.payload == nonce);
  }
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

void Channel::send_request(std::uint32_t stream, const std::string& body) {
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

void Channel::take(Run& run, const Frame& frame) {
  switch (frame.type) {
    case FrameType::output:
      run.keep(Stream::standard_output, frame.payload);
      return;
    case FrameType::error:
      run.keep(Stream::standard_error, frame.payload);
      return;
    case FrameType::failed:
      fail(ErrorCode::exhausted, "cannot start a process: {}", frame.payload);
    case FrameType::input_ack:
      run.acknowledged += frame.payload.size() == 4 ? get_u32(frame.payload, 0) : 0;
      return;
    case FrameType::exited:
      if (frame.payload.size() == 8) {
        run.result.exit_code = static_cast<int>(get_u32(frame.payload, 0));
        run.result.signal = static_cast<int>(get_u32(frame.payload, 4));
        run.ended = true;
      }
      return;
    default:
      return;  // late news of an earlier request
  }
}

ExecResult Channel::run(const GuestRequest& request, const ExecRequest& io) {
  const Clock::time_point start = Clock::now();
  Clock::time_point deadline = start + std::min<std::chrono::milliseconds>(io.timeout, kLongest);
  const std::uint32_t stream = ++stream_;
  send_request(stream, encode_request(request));
  Run run{io, {}, 0, 0, false, false, nullptr};
  bool killed = false;
  while (!run.ended) {
    std::string out;
    while (run.sent < io.input.size() && run.sent - std::min(run.sent, run.acknowledged) < kInputWindow) {
      const std::size_t count =
          std::min({kMaxPayload, io.input.size() - run.sent, kInputWindow - (run.sent - run.acknowledged)});
      append_frame(out, FrameType::input, stream, std::string_view(io.input).substr(run.sent, count));
      run.sent += count;
    }
    if (run.sent == io.input.size() && !run.input_ended) {
      append_frame(out, FrameType::input_end, stream);
      run.input_ended = true;
    }
    if (!killed && (run.thrown || Clock::now() >= deadline)) {
      run.result.timed_out = !run.thrown;
      killed = true;
      deadline = Clock::now() + kKillPatience;
      append_frame(out, FrameType::kill, stream);
    }
    send(out);
    Frame frame;
    if (receive(frame, deadline)) {
      if (frame.stream == stream) {
        take(run, frame);
      }
    } else if (killed) {
      close();
      fail(ErrorCode::io, "a command could not be ended within {} s", kKillPatience.count());
    }
  }
  if (run.thrown) {
    std::rethrow_exception(run.thrown);
  }
  run.result.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  return std::move(run.result);
}

}  // namespace tidelock::sandbox::vm

// The agent's loop: never waits for anything but its one poll, never grows past fixed bounds.

#include <fcntl.h>
#include <linux/random.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <ctime>
#include <vector>

#include "sandbox/agent/agent.hpp"
#include "sandbox/agent/processes.hpp"

namespace tidelock::sandbox::agent {
using vm::Frame;
using vm::FrameType;
namespace {

class Agent {
 public:
  Agent(int port, int edges, int signals) : port_(port), edges_(edges), signals_(signals) {}

  [[noreturn]] void serve() {
    while (true) {
      wait();
      take_signals();
      receive();
      processes_.work();
      send();
    }
  }

 private:
  void wait() {
    std::vector<pollfd> entries;
    entries.push_back({edges_, POLLIN, 0});
    entries.push_back({signals_, POLLIN, 0});
    const int patience = processes_.add_polls(entries);
    poll(entries.data(), entries.size(), patience);
    epoll_event event{};
    if (epoll_wait(edges_, &event, 1, 0) == 1) {
      hung_up_ = (event.events & EPOLLHUP) != 0;
      if (hung_up_) {
        outbox_.bytes.clear();
        reader_.forget();
        forget_streams();
      }
    }
  }

  void take_signals() {
    signalfd_siginfo info{};
    while (read(signals_, &info, sizeof info) == sizeof info) {
    }
    processes_.reap();
  }

  void receive() {
    char part[16U << 10];
    for (ssize_t got = 0; (got = read(port_, part, sizeof part)) > 0;) {
      reader_.feed({part, static_cast<std::size_t>(got)});
      Frame frame;
      while (reader_.next(frame)) {
        handle(frame);
      }
    }
  }

  void handle(const Frame& frame) {
    switch (frame.type) {
      case FrameType::hello:
        outbox_.bytes.assign(1, '\0');  // ends what the other side may have half of
        forget_streams();
        outbox_.add(FrameType::welcome, 0, answer_to_hello(frame.payload));
        return;
      case FrameType::clock:
        set_clock(frame.payload);
        return;
      case FrameType::attach:
        processes_.attach(frame.stream, frame.payload);
        return;
      case FrameType::connect:
        processes_.connect(frame.stream, frame.payload);
        return;
      case FrameType::list:
        processes_.list(frame.stream);
        return;
      case FrameType::request:
      case FrameType::request_end:
        take_request(frame);
        return;
      default:
        processes_.take(frame);
    }
  }

  static std::string answer_to_hello(std::string payload) {
    if (payload.size() == vm::kNonce + 4) {  // earlier programs know of no versions
      payload.resize(vm::kNonce);
      vm::put_u32(payload, vm::kAgentVersion);
    }
    return payload;
  }

  void take_request(const Frame& frame) {
    if (request_stream_ != frame.stream) {
      request_.clear();
      request_stream_ = frame.stream;
    }
    if (request_.size() + frame.payload.size() > vm::kMaxRequest) {
      request_.clear();
      outbox_.refuse(frame.stream, "the request is too long");
    }
    request_ += frame.payload;
    if (frame.type == FrameType::request_end) {
      vm::GuestRequest request;
      if (vm::decode_request(request_, request)) {
        processes_.start(frame.stream, request, request_);
      } else {
        outbox_.refuse(frame.stream, "the request cannot be read");
      }
      request_.clear();
    }
  }

  void forget_streams() {
    processes_.forget_streams();
    request_.clear();
  }

  void set_clock(std::string_view payload) {
    if (payload.size() < 8) {
      return;
    }
    const std::uint64_t now = vm::get_u64(payload, 0);
    const timespec time{static_cast<time_t>(now / 1'000'000'000), static_cast<long>(now % 1'000'000'000)};
    clock_settime(CLOCK_REALTIME, &time);
    // What RNDADDENTROPY takes: bits of entropy, bytes, the bytes.
    struct {
      int bits = 0, size = 0;
      char bytes[64]{};
    } entropy;
    const std::size_t size = std::min(payload.size() - 8, sizeof entropy.bytes);
    payload.copy(entropy.bytes, size, 8);
    entropy.bits = static_cast<int>(size * 8);
    entropy.size = static_cast<int>(size);
    const int random = open("/dev/urandom", O_RDWR | O_CLOEXEC);
    ioctl(random, RNDADDENTROPY, &entropy);
    ioctl(random, RNDRESEEDCRNG);
    close(random);
    outbox_.add(FrameType::clock_set, 0);
  }

  void send() {
    std::string& bytes = outbox_.bytes;
    while (!bytes.empty() && !hung_up_) {
      const ssize_t put = write(port_, bytes.data(), std::min<std::size_t>(bytes.size(), 32U << 10));
      if (put <= 0) {
        return;
      }
      bytes.erase(0, static_cast<std::size_t>(put));
    }
  }

  int port_, edges_, signals_;
  bool hung_up_ = false;
  vm::FrameReader reader_;
  Outbox outbox_;
  Processes processes_{outbox_};
  std::string request_;
  std::uint32_t request_stream_ = 0;
};

}  // namespace

void serve(int port) {
  sigset_t watched;
  sigemptyset(&watched);
  sigaddset(&watched, SIGCHLD);
  sigprocmask(SIG_BLOCK, &watched, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
  const int signals = signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK);
  // A port whose other end nobody holds is "ready" all the time, which a plain poll would spin on. Its changes are
  // what counts: someone came, went, sent, or made room.
  const int edges = epoll_create1(EPOLL_CLOEXEC);
  epoll_event event{};
  event.events = EPOLLIN | EPOLLOUT | EPOLLET;
  if (signals < 0 || edges < 0 || epoll_ctl(edges, EPOLL_CTL_ADD, port, &event) != 0) {
    die("watch", "the port to the program");
  }
  Agent(port, edges, signals).serve();
}

}  // namespace tidelock::sandbox::agent

int main() {
  tidelock::sandbox::agent::boot();
  tidelock::sandbox::agent::serve(tidelock::sandbox::agent::open_port());
}

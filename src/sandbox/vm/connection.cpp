// A connection to a port of a guest, as the program sees it over one link.

#include <algorithm>
#include <condition_variable>

#include "base/error.hpp"
#include "sandbox/vm/channel.hpp"

namespace tidelock::sandbox::vm {
namespace {

constexpr std::chrono::seconds kConnectPatience{30};  // a server that accepts nothing lets a connection hang

// What hears of the stream. At most kOutputWindow bytes wait here, at most kInputWindow are on their way there.
struct PortStream : Sink {
  void take(const Frame& frame) override {
    const std::lock_guard lock(mutex);
    if (frame.type == FrameType::started) {
      started = true;
    } else if (frame.type == FrameType::failed) {
      refusal = frame.payload;
    } else if (frame.type == FrameType::output) {
      bytes += frame.payload;
    } else if (frame.type == FrameType::input_ack && frame.payload.size() == 4) {
      under_way -= std::min<std::size_t>(under_way, get_u32(frame.payload, 0));
    } else if (frame.type == FrameType::exited) {
      ended = true;
    }
    tell();
  }
  void lose() override {
    const std::lock_guard lock(mutex);
    lost = true;
    tell();
  }
  void tell() {
    changed.notify_all();
    if (wake) {
      wake();
    }
  }
  std::mutex mutex;
  std::condition_variable changed;
  bool started = false, ended = false, lost = false;
  std::string refusal, bytes;
  std::size_t under_way = 0, taken = 0;  // taken, and not yet acknowledged
  std::function<void()> wake;
};

class Port : public PortConnection {
 public:
  Port(std::shared_ptr<Link> link, int port) : link_(std::move(link)), stream_(link_->open(state_)) {
    std::string body;
    put_u32(body, static_cast<std::uint32_t>(port));
    say(FrameType::connect, body);
  }
  ~Port() override {
    {
      const std::lock_guard lock(state_->mutex);
      state_->wake = nullptr;
    }
    say(FrameType::kill);
    link_->forget(stream_);
  }
  Port(const Port&) = delete;
  Port& operator=(const Port&) = delete;

  void await_start(int port) {
    std::unique_lock lock(state_->mutex);
    const bool decided = state_->changed.wait_for(
        lock, kConnectPatience, [this] { return state_->started || state_->lost || !state_->refusal.empty(); });
    if (!decided) {
      fail(ErrorCode::not_found, "port {} accepts no connection within {} s", port, kConnectPatience.count());
    }
    if (!state_->refusal.empty()) {
      fail(state_->refusal == kPortClosed ? ErrorCode::not_found : ErrorCode::exhausted, "port {}: {}", port,
           state_->refusal);
    }
    if (!state_->started) {
      fail_gone();
    }
  }

  std::optional<std::string> take() override {
    std::string out;
    std::string count;
    {
      const std::lock_guard lock(state_->mutex);
      if (state_->lost && !state_->ended) {
        fail_gone();
      }
      out.swap(state_->bytes);
      state_->taken += out.size();
      if (state_->taken >= kOutputWindow / 4) {
        put_u32(count, static_cast<std::uint32_t>(state_->taken));
        state_->taken = 0;
      }
    }
    if (!count.empty()) {
      say(FrameType::output_ack, count);
    }
    return out.empty() ? std::nullopt : std::optional(std::move(out));
  }
  bool ended() const override {
    const std::lock_guard lock(state_->mutex);
    return state_->ended && state_->bytes.empty();
  }
  std::size_t give(std::string_view bytes) override {
    std::size_t count = 0;
    {
      const std::lock_guard lock(state_->mutex);
      count = std::min({kMaxPayload, bytes.size(), kInputWindow - state_->under_way});
      state_->under_way += count;
    }
    if (count > 0) {
      say(FrameType::input, bytes.substr(0, count));
    }
    return count;
  }
  void finish() override { say(FrameType::input_end); }
  void on_event(std::function<void()> wake) override {
    const std::lock_guard lock(state_->mutex);
    state_->wake = std::move(wake);
    state_->wake();
  }

 private:
  void say(FrameType type, std::string_view payload = {}) noexcept {
    try {
      link_->send_frame(type, stream_, payload);
    } catch (const std::exception&) {  // the reader of the link finds out, and take() tells
    }
  }
  std::shared_ptr<Link> link_;
  std::shared_ptr<PortStream> state_ = std::make_shared<PortStream>();
  std::uint32_t stream_;
};

}  // namespace

std::shared_ptr<PortConnection> Link::connect_port(int port) {
  auto out = std::make_shared<Port>(shared_from_this(), port);
  out->await_start(port);
  return out;
}

}  // namespace tidelock::sandbox::vm

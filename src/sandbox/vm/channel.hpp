// The program's end of the connection to a guest's agent.
#pragma once

#include <array>
#include <chrono>
#include <string>

#include "sandbox/sandbox.hpp"
#include "sandbox/vm/frame.hpp"
#include "sandbox/wire.hpp"

namespace tidelock::sandbox::vm {

class Channel {
 public:
  Channel() = default;
  bool connected() const { return static_cast<bool>(socket_); }
  void close() { socket_.reset(), reader_.forget(); }
  // Connects and greets; what the agent was doing for an earlier connection goes on without a listener. Throws
  // Error{io} when it does not answer within `patience`.
  void open(const std::string& socket_path, std::chrono::milliseconds patience);
  // The same for a guest that stood still: it also gets the time of day and fresh randomness.
  void wake(const std::string& socket_path, std::chrono::milliseconds patience);
  // Runs one request to its end: output as it comes, input as it is taken, killed at the time-out or when on_output
  // throws. Throws Error{exhausted} when the agent cannot start it; after Error{io} the connection is closed.
  ExecResult run(const GuestRequest& request, const ExecRequest& io);

 private:
  using Clock = std::chrono::steady_clock;
  struct Run;
  void greet(const std::string& socket_path, const std::string& more, FrameType last,
             std::chrono::milliseconds patience);
  bool receive(Frame& frame, Clock::time_point deadline);  // false: the deadline has passed
  void send(std::string_view bytes);
  void send_request(std::uint32_t stream, const std::string& body);
  void take(Run& run, const Frame& frame);
  FileDescriptor socket_;
  FrameReader reader_;
  std::uint32_t stream_ = 0;
};

}  // namespace tidelock::sandbox::vm

// The program's end of the connection to a guest's agent: many requests at once on one connection.
//
// A thread reads frames and hands each to the stream that it belongs to; whoever has something to say sends it, whole
// messages at a time. A guest that does not take what is sent keeps nobody waiting: another thread sends the rest. When
// the machine ends, is paused or the channel is closed, every stream is told so.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "sandbox/sandbox.hpp"
#include "sandbox/vm/frame.hpp"
#include "sandbox/wire.hpp"

namespace tidelock::sandbox::vm {

// Throws Error{io}: nothing answers behind the channel any more.
[[noreturn]] void fail_gone();

class Process;

// What hears of one stream. Called by the reading thread: must not wait for anything.
class Sink {
 public:
  virtual ~Sink() = default;
  virtual void take(const Frame& frame) = 0;
  virtual void lose() = 0;  // nothing more will come
};

// One greeted connection. Thread-safe.
class Link : public std::enable_shared_from_this<Link> {
 public:
  Link(FileDescriptor socket, FrameReader reader, std::uint32_t agent_version);
  ~Link();
  void start();  // reading
  bool broken() const;
  // Throws Error{not_supported} when the agent is older than `version`; `what` it then does not have.
  void need_agent(std::uint32_t version, const char* what) const;
  void close();  // every sink is told; the thread has ended when it returns
  // Registers a sink under a stream of its own, so that nothing of what `send` brings about is missed.
  std::uint32_t open(const std::shared_ptr<Sink>& sink);
  void forget(std::uint32_t stream);
  void send(std::string_view bytes);  // never waits; Error{io} breaks the link: it broke, or the guest takes nothing
  void send_request(std::uint32_t stream, const std::string& body);
  void send_frame(FrameType type, std::uint32_t stream, std::string_view payload = {});

  // process.cpp
  // `refused`: what it throws when the agent does not start it.
  struct Started {
    std::shared_ptr<Process> process;
    std::shared_ptr<ProcessListener> listener;
  };
  Started start_process(const GuestRequest& request, ErrorCode refused = ErrorCode::invalid_argument);
  // connection.cpp. Throws Error{not_found} when nothing listens there, Error{exhausted} for too many connections.
  std::shared_ptr<PortConnection> connect_port(int port);
  std::shared_ptr<Process> find_process(int pid);  // attaches when it was started over an earlier connection
  std::vector<ProcessInfo> list_processes();
  void forget_process(int pid, std::uint32_t stream);

 private:
  void read();
  void drop();
  void write_rest();
  void begin(const std::shared_ptr<Process>& process, const std::function<void(std::uint32_t stream)>& say,
             ErrorCode refused);  // process.cpp
  FileDescriptor socket_;
  FrameReader reader_;
  const std::uint32_t agent_version_;
  std::thread thread_, writer_;
  std::mutex sending_;  // what follows
  std::condition_variable more_;
  std::string rest_;      // behind what the writer is at
  bool writing_ = false;  // there is a rest, or the writer is at it
  bool ending_ = false;
  mutable std::mutex mutex_;  // what is below
  bool broken_ = false;
  std::uint32_t stream_ = 0;
  std::map<std::uint32_t, std::shared_ptr<Sink>> sinks_;
  std::mutex attaching_;
  std::map<int, std::shared_ptr<Process>> processes_;
};

// The connection as the owner of a machine has it. Not thread-safe; what it hands out is.
class Channel {
 public:
  Channel() = default;
  ~Channel() { close(); }
  Channel(Channel&& other) noexcept = default;
  Channel& operator=(Channel&& other) noexcept {
    close();
    link_ = std::move(other.link_);
    return *this;
  }
  bool connected() const { return link_ != nullptr && !link_->broken(); }
  void close();
  // Connects and greets; what the agent was doing for an earlier connection goes on without a listener. Throws
  // Error{io} when it does not answer within `patience`.
  void open(const std::string& socket_path, std::chrono::milliseconds patience);
  // The same for a guest that stood still: it also gets the time of day and fresh randomness.
  void wake(const std::string& socket_path, std::chrono::milliseconds patience);
  // Runs one request to its end: output as it comes, input as it is taken, killed at the time-out or when on_output
  // throws. Throws Error{exhausted} when the agent cannot start it; after Error{io} the connection is closed.
  ExecResult run(const GuestRequest& request, const ExecRequest& io);
  const std::shared_ptr<Link>& link() const { return link_; }  // null until opened

 private:
  void greet(const std::string& socket_path, const std::string& more, FrameType last,
             std::chrono::milliseconds patience);
  std::shared_ptr<Link> link_;
};

}  // namespace tidelock::sandbox::vm

// A process of a guest that outlives calls and connections, as the program sees it over one link.
//
// Its output goes to every listener. The agent sends no more than kOutputWindow bytes beyond what was acknowledged, and
// what is acknowledged is what the slowest listener has taken: a process whose listeners are slow waits, as it would
// for a pipe; without listeners its output is thrown away.
#pragma once

#include <condition_variable>
#include <deque>
#include <list>

#include "base/error.hpp"

#include "sandbox/vm/channel.hpp"

namespace tidelock::sandbox::vm {

class Process : public Sink, public std::enable_shared_from_this<Process> {
 public:
  explicit Process(std::weak_ptr<Link> link) : link_(std::move(link)) {}
  // Waits for `started` on the stream, which the caller has opened. Throws Error{not_found, exhausted, io}.
  void await_start(std::uint32_t stream, ErrorCode refused);
  int pid() const { return pid_; }
  std::uint32_t stream() const { return stream_; }
  std::shared_ptr<ProcessListener> listen();
  void signal(int number);
  // Throws Error{invalid_argument} when standard input is not open, Error{exhausted} when nobody reads it.
  void write(std::string_view bytes);
  void close_input();
  void resize(WindowSize size);  // Error{invalid_argument} when it has no terminal
  bool over() const;

  void take(const Frame& frame) override;
  void lose() override;

 private:
  class Listener;
  struct Queue;
  void tell(const ProcessEvent& event);
  void acknowledge();
  void need_alive() const;  // these two under mutex_
  void need_input() const;
  std::weak_ptr<Link> link_;
  std::uint32_t stream_ = 0;
  int pid_ = 0;  // both are set before anybody else sees the process
  std::mutex writing_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool started_ = false, open_input_ = false, terminal_ = false, ended_ = false, over_ = false;
  std::string refusal_;
  std::size_t input_under_way_ = 0;
  std::size_t received_ = 0, acknowledged_ = 0;  // bytes of output since the link knows the process
  std::optional<ProcessEvent> last_;             // for those who come to listen after the end
  std::list<std::shared_ptr<Queue>> queues_;     // one a listener, until it goes
};

}  // namespace tidelock::sandbox::vm

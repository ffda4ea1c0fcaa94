// The server of the E2B API: which request goes where, who is let in. Private to serve/e2b. Include from .cpp files
// only.
//
//   server.cpp   routes                          streams.cpp   processes and watched folders as streams
//   ports.cpp    a way to ports of sandboxes     watchers.cpp  folders that clients ask about
#pragma once

#include <atomic>
#include <boost/asio/thread_pool.hpp>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "serve/e2b/control.hpp"
#include "serve/e2b/e2b.hpp"
#include "serve/e2b/templates.hpp"
#include "serve/e2b/watchers.hpp"
#include "serve/http.hpp"
#include "serve/keys.hpp"

namespace tidelock::serve::e2b {

using Clock = std::chrono::steady_clock;

constexpr int kEnvdPort = 49983;

std::string header_of(const HttpRequest& request, std::string_view name);

// 1 to 65535; -1 for anything else.
int positive_number(std::string_view text);

// Where a request leads: a sandbox and a port of it, or nowhere: the control plane.
struct Target {
  std::string sandbox;
  int port = kEnvdPort;
};
Target target_of(const HttpRequest& request);
inline bool is_port(const Target& target) {
  return !target.sandbox.empty() && target.port != kEnvdPort;
}

class Server : public HttpHandler {
 public:
  Server(const E2bOptions& options, std::unique_ptr<Sandboxes> sandboxes, std::unique_ptr<Templates> templates)
      : HttpHandler(options),
        keys_(options.keys.empty() ? Keys() : Keys::load(options.keys)),
        sandboxes_(std::move(sandboxes)),
        templates_(std::move(templates)) {}
  void admit(const HttpRequest& header) override;
  asio::awaitable<bool> answer(Stream& stream, const HttpRequest& request) override;
  bool takes_over(const HttpRequest& header) override { return is_port(target_of(header)); }
  asio::awaitable<void> take_over(Stream& stream, beast::flat_buffer& read, HttpParser& parser) override;
  Reply refusal(const ApiError& error) override;
  void begin(asio::io_context& io) override;
  void end() override;
  void count_response(const HttpRequest&, int) override {}
  void count_connection(int change) override { connections_ += change; }
  int open_connections() const override { return connections_; }
  void count_refused_connection() override {}

 private:
  // One stream of events, as one connection sees it: of a process, or of a folder that is watched.
  struct Work {
    Stream& stream;
    const HttpRequest& request;
    std::string sandbox;
    std::shared_ptr<sandbox::ProcessListener> listener;
    std::unique_ptr<sandbox::FileWatch> watch = nullptr;
    std::shared_ptr<Bell> bell = nullptr;
    bool started_here = false;  // Start: its time-out ends the process
    std::optional<Clock::time_point> deadline = std::nullopt;
    std::chrono::seconds keepalive{0};
    std::exception_ptr error = nullptr;
    bool over = false;  // the process has ended, was lost, or is being ended
  };
  Reply answer_inside(const Target& target, const Request& request);
  Reply answer_envd(sandbox::Sandbox& box, const Request& request);
  asio::awaitable<void> on_pool(std::function<void()> act);
  asio::awaitable<void> watch_times();
  asio::awaitable<bool> stream_events(Stream& stream, const HttpRequest& request, Target target);
  void open_events(Work& work, const std::string& path);
  asio::awaitable<void> end_process(Work& work);
  asio::awaitable<void> mind(std::unique_ptr<Work> work);
  std::shared_ptr<sandbox::PortConnection> connect_port(const Target& target);  // on the pool
  static std::optional<RpcError> add_events(Work& work, std::string& text);
  asio::awaitable<void> pump(Work& work);
  asio::awaitable<void> produce(Work& work);
  asio::awaitable<void> end_stream(Work& work, const RpcError* error);

  Keys keys_;
  std::unique_ptr<Sandboxes> sandboxes_;
  std::unique_ptr<Templates> templates_;
  Watchers watchers_;
  std::atomic<int> connections_ = 0;
  asio::thread_pool pool_{24};  // requests that wait for sandboxes at once
};

}  // namespace tidelock::serve::e2b

// Listening, threads, signals.
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <csignal>
#include <thread>

#include "base/base.hpp"
#include "serve/http.hpp"

namespace tidelock::serve {
namespace {

using asio::use_awaitable;
using asio::ip::tcp;

tcp::acceptor listen(asio::io_context& io, const HttpOptions& options) {
  const std::string address = fmt::format("{}:{}", options.host, options.port);
  boost::system::error_code error;
  const auto host = asio::ip::make_address(options.host, error);
  if (error)
    throw Error(ErrorCode::invalid_argument, fmt::format("host {}: expected an IP address", options.host),
                "127.0.0.1 for this machine alone, 0.0.0.0 for all");
  tcp::acceptor acceptor(io);
  const tcp::endpoint endpoint(host, options.port);
  acceptor.open(endpoint.protocol(), error);
  if (!error) acceptor.set_option(tcp::acceptor::reuse_address(true), error);
  if (!error) acceptor.bind(endpoint, error);
  if (!error) acceptor.listen(asio::socket_base::max_listen_connections, error);
  if (error) fail(ErrorCode::io, "cannot listen on {}: {}", address, error.message());
  return acceptor;
}

// Too many connections: told so, and no more.
asio::awaitable<void> turn_away(HttpHandler& handler, Stream stream) {
  handler.count_refused_connection();
  try {
    HttpRequest none;
    none.version(11);
    const Reply reply = handler.refusal(ApiError(503, "too_many_connections", "try again later"));
    co_await send_reply(handler, stream, none, reply, true);
    co_await linger(stream);
  } catch (const boost::system::system_error&) {  // it went already
  }
}

asio::awaitable<void> accept_all(HttpHandler& handler, asio::io_context& io, tcp::acceptor& acceptor) {
  while (true) {
    boost::system::error_code error;
    // Each connection on a strand: its coroutine, its timers and the engine's wake-ups never run at once.
    const asio::any_io_executor strand = asio::make_strand(io);
    asio::basic_stream_socket<tcp, asio::any_io_executor> socket(strand);
    co_await acceptor.async_accept(socket, asio::redirect_error(use_awaitable, error));
    if (error == asio::error::operation_aborted) co_return;
    if (error) {  // out of descriptors, or a client that left at once
      spdlog::warn("accept: {}", error.message());
      asio::steady_timer pause(io, std::chrono::milliseconds(50));
      co_await pause.async_wait(use_awaitable);
      continue;
    }
    socket.set_option(tcp::no_delay(true), error);
    const bool full = handler.open_connections() >= handler.http_options.connections;
    asio::co_spawn(strand, (full ? turn_away : run_session)(handler, Stream(std::move(socket))), asio::detached);
  }
}

}  // namespace

void run_http_server(HttpHandler& handler) {
  const HttpOptions& options = handler.http_options;
  asio::io_context io;
  tcp::acceptor acceptor = listen(io, options);
  asio::signal_set signals(io, SIGINT, SIGTERM);
  signals.async_wait([&io](const boost::system::error_code&, int) { io.stop(); });
  handler.begin(io);
  asio::co_spawn(io, accept_all(handler, io, acceptor), asio::detached);
  if (options.listening) options.listening(acceptor.local_endpoint().port());
  std::vector<std::jthread> threads;
  for (int i = 1; i < options.http_threads; ++i) threads.emplace_back([&io] { io.run(); });
  io.run();
  threads.clear();
  handler.end();  // before `io` goes: what would be woken lives there
}

}  // namespace tidelock::serve

// An HTTP/1.1 server without an API: connections, limits, replies. Private to serve/. Include from .cpp files only: it
// brings Beast with it.
//
// A connection is a coroutine on a strand of one of a few threads. What a request means is the handler's business.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http.hpp>
#include <memory>
#include <string>

#include "serve/api_error.hpp"
#include "serve/http_options.hpp"
#include "serve/reply.hpp"

namespace tidelock::serve {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;

using Stream = beast::basic_stream<asio::ip::tcp, asio::any_io_executor>;
using HttpRequest = http::request<http::string_body>;
using HttpParser = http::request_parser<http::string_body>;

// An API behind the server. Lives as long as the server; called from its threads.
class HttpHandler {
 public:
  explicit HttpHandler(const HttpOptions& options) : http_options(options) {}
  virtual ~HttpHandler() = default;
  HttpHandler(const HttpHandler&) = delete;
  HttpHandler& operator=(const HttpHandler&) = delete;
  // Looks at a header before the body is read. Throws ApiError: the body is then never read.
  virtual void admit(const HttpRequest& header) = 0;
  // Answers a request to the last byte. False when the connection ends. What it throws before anything was sent is
  // answered with refusal().
  virtual asio::awaitable<bool> answer(Stream& stream, const HttpRequest& request) = 0;
  virtual Reply refusal(const ApiError& error) = 0;  // in the API's own form
  // Whether an admitted request's body is not to be read here: take_over() then reads it and answers, to the
  // connection's end. What it throws before anything was sent is answered with refusal().
  virtual bool takes_over(const HttpRequest& /*header*/) { return false; }
  virtual asio::awaitable<void> take_over(Stream& stream, beast::flat_buffer& read, HttpParser& parser);
  // Around the server's loop: before anything is accepted, and when it has stopped. After end() nothing may wake a
  // connection's coroutine.
  virtual void begin(asio::io_context& /*io*/) {}
  virtual void end() {}
  // For metrics. Thread-safe.
  virtual void count_response(const HttpRequest& request, int status) = 0;
  virtual void count_connection(int change) = 0;
  virtual int open_connections() const = 0;
  virtual void count_refused_connection() = 0;

  const HttpOptions& http_options;
};

// Listens until SIGINT or SIGTERM. Throws Error{invalid_argument, io} for an address that cannot be listened on.
void run_http_server(HttpHandler& handler);

// Reads requests and answers them until the connection ends. Never throws.
asio::awaitable<void> run_session(HttpHandler& handler, Stream stream);

// Sends a whole reply. `close`: tells the client that the connection ends behind it.
asio::awaitable<void> send_reply(HttpHandler& handler, Stream& stream, const HttpRequest& request, const Reply& reply,
                                 bool close);

// Streams: a header (the body is chunked), pieces of the body, its end.
asio::awaitable<void> send_stream_header(HttpHandler& handler, Stream& stream, const HttpRequest& request,
                                         const char* type);
asio::awaitable<void> send_chunk(HttpHandler& handler, Stream& stream, const std::string& text);
asio::awaitable<void> send_last_chunk(HttpHandler& handler, Stream& stream);

// Ends a connection whose client may still be sending: what it sends is read for a moment and dropped, since closing on
// unread bytes would take the reply away from it.
asio::awaitable<void> linger(Stream& stream);

// Returns when the client has closed its side. Bytes of a further request end the watching: what comes behind them
// cannot be seen.
asio::awaitable<void> watch(Stream& stream);

// The part of a target before '?'; what metrics and routes know it by.
std::string path_of(const HttpRequest& request);

// Lets a connection's coroutine sleep until another thread has something for it. All but notify() belongs to the
// connection's strand.
class Bell : public std::enable_shared_from_this<Bell> {
 public:
  explicit Bell(const asio::any_io_executor& executor) : timer_(executor) {}
  void notify();
  asio::awaitable<void> wait(
      std::chrono::steady_clock::time_point until = std::chrono::steady_clock::time_point::max());

 private:
  asio::steady_timer timer_;
  bool rung_ = false;
};

}  // namespace tidelock::serve

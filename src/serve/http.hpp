// What the HTTP side shares. Private to serve/. Include from .cpp files only: it brings Beast with it.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/strand.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http.hpp>
#include <string>

#include "serve/api_error.hpp"
#include "serve/engine_loop.hpp"
#include "serve/keys.hpp"
#include "serve/metrics.hpp"
#include "serve/request.hpp"
#include "serve/serve.hpp"

namespace tidelock::serve {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;

using Stream = beast::basic_stream<asio::ip::tcp, asio::any_io_executor>;
using HttpRequest = http::request<http::string_body>;

// All that answering a request needs. Lives as long as the server.
struct Service {
  const ServeOptions& options;
  RequestContext context;
  Keys keys;
  EngineLoop& engine;
  ServerMetrics& metrics;
  std::int64_t started = 0;  // seconds since 1970
};

// GCC 12 copies an aggregate that is made inside a co_await expression byte by byte and destroys it twice: what is
// passed to a coroutine has a name.
struct Reply {
  int status = 200;
  std::string body;
  const char* type = "application/json";
  std::string allow = {};  // of 405
};
Reply error_reply(const ApiError& error);

// Reads requests and answers them until the connection ends. Never throws.
asio::awaitable<void> run_session(Service& service, Stream stream);

// Sends a whole reply. `close`: tells the client that the connection ends behind it.
asio::awaitable<void> send_reply(Service& service, Stream& stream, const HttpRequest& request, const Reply& reply,
                                 bool close);

// Ends a connection whose client may still be sending: what it sends is read for a moment and dropped, since closing on
// unread bytes would take the reply away from it.
asio::awaitable<void> linger(Stream& stream);

// The part of a target before '?'; what metrics and routes know it by.
std::string path_of(const HttpRequest& request);
// The same for metrics: one name for all unknown ones.
std::string metric_path(const HttpRequest& request);
enum class Route { chat, completions, other };
Route route_of(const HttpRequest& request);
// Everything but generations. Throws ApiError.
Reply answer_simple(Service& service, const HttpRequest& request);

// A generation from its request to its last byte. False when the client went away. Throws ApiError before anything was
// sent. `tenant`: the key's name; states of sequences are reused within one tenant only.
asio::awaitable<bool> generate(Service& service, Stream& stream, const HttpRequest& request, bool chat,
                               const std::string& tenant);

}  // namespace tidelock::serve

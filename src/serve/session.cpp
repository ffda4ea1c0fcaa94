// One connection.
#include <sys/socket.h>

#include <array>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/flat_buffer.hpp>

#include "base/base.hpp"
#include "serve/http.hpp"

namespace tidelock::serve {

namespace {

using asio::use_awaitable;

// What the client did wrong before there was a request; nothing when it went away or took too long, for which Beast has
// closed the connection.
std::optional<ApiError> reading_fault(const boost::system::error_code& error, const HttpOptions& options) {
  if (error == http::error::header_limit)
    return ApiError(431, "header_too_large", fmt::format("the header is longer than {} bytes", options.header_bytes));
  if (error == http::error::body_limit)
    return ApiError(413, "body_too_large", fmt::format("the body is longer than {} bytes", options.body_bytes));
  if (error.category() == make_error_code(http::error::bad_method).category() && error != http::error::end_of_stream &&
      error != http::error::partial_message)
    return ApiError(400, "bad_request", fmt::format("not HTTP: {}", error.message()));
  return std::nullopt;
}

// Everything about one request behind its header. False when the connection ends.
asio::awaitable<bool> answer(HttpHandler& handler, Stream& stream, beast::flat_buffer& buffer,
                             http::request_parser<http::string_body>& parser) {
  const HttpOptions& options = handler.http_options;
  std::optional<ApiError> fault;
  try {
    handler.admit(parser.get());
  } catch (const ApiError& error) {
    fault = error;
  }
  if (!fault && handler.takes_over(parser.get())) {
    const HttpRequest header(parser.get().base());  // for what may have to be refused: the parser is taken over, too
    try {
      co_await handler.take_over(stream, buffer, parser);
      co_return false;
    } catch (const ApiError& wrong) {
      fault = wrong;
    }
    const Reply refusal = handler.refusal(*fault);
    co_await send_reply(handler, stream, header, refusal, true);
    co_await linger(stream);
    co_return false;
  }
  boost::system::error_code error;
  if (!fault && !parser.is_done()) {
    stream.expires_after(options.patience);
    if (beast::iequals(parser.get()[http::field::expect], "100-continue")) {
      const http::response<http::empty_body> go_on(http::status::continue_, 11);
      co_await http::async_write(stream, go_on, asio::redirect_error(use_awaitable, error));
    }
    if (!error) co_await http::async_read(stream, buffer, parser, asio::redirect_error(use_awaitable, error));
    if (error) {
      fault = reading_fault(error, options);
      if (!fault) co_return false;
    }
  }
  const HttpRequest request = parser.release();
  if (fault) {  // the rest of the request stays unread
    const Reply refusal = handler.refusal(*fault);
    co_await send_reply(handler, stream, request, refusal, true);
    co_await linger(stream);
    co_return false;
  }
  try {
    co_return co_await handler.answer(stream, request);
  } catch (const ApiError& wrong) {
    fault = wrong;
  } catch (const boost::system::system_error&) {
    co_return false;  // the connection broke while an answer was on its way
  } catch (const Error& wrong) {
    if (wrong.code() != ErrorCode::invalid_argument) spdlog::error("{}: {}", path_of(request), wrong.what());
    fault = to_api_error(wrong);
  } catch (const std::exception& wrong) {
    spdlog::error("{}: {}", path_of(request), wrong.what());
    fault = ApiError(500, "internal_error", "the server failed on this request; its log says why");
  }
  const Reply reply = handler.refusal(*fault);
  co_await send_reply(handler, stream, request, reply, false);
  co_return request.keep_alive();
}

asio::awaitable<void> session(HttpHandler& handler, Stream& stream) {
  beast::flat_buffer buffer;
  std::chrono::milliseconds patience = handler.http_options.patience;  // for the first request; later ones may be idle
  while (true) {
    http::request_parser<http::string_body> parser;
    parser.header_limit(handler.http_options.header_bytes);
    parser.body_limit(handler.http_options.body_bytes);
    boost::system::error_code error;
    stream.expires_after(patience);
    co_await http::async_read_header(stream, buffer, parser, asio::redirect_error(use_awaitable, error));
    if (error) {
      const auto fault = reading_fault(error, handler.http_options);
      if (!fault) co_return;
      const Reply refusal = handler.refusal(*fault);
      co_await send_reply(handler, stream, parser.get(), refusal, true);
      co_await linger(stream);
      co_return;
    }
    if (!co_await answer(handler, stream, buffer, parser)) co_return;
    patience = handler.http_options.idle;
  }
}

}  // namespace

asio::awaitable<void> HttpHandler::take_over(Stream& /*stream*/, beast::flat_buffer& /*read*/, HttpParser& /*parser*/) {
  co_return;
}

asio::awaitable<void> send_reply(HttpHandler& handler, Stream& stream, const HttpRequest& request, const Reply& reply,
                                 bool close) {
  http::response<http::string_body> response(static_cast<http::status>(reply.status), request.version());
  if (reply.status != 204) response.set(http::field::content_type, reply.type);
  if (!reply.allow.empty()) response.set(http::field::allow, reply.allow);
  if (reply.status == 429) response.set(http::field::retry_after, std::to_string(reply.retry_after));
  if (reply.status == 401) response.set(http::field::www_authenticate, "Bearer");
  for (const auto& [name, value] : reply.headers) response.set(name, value);
  response.keep_alive(request.keep_alive() && !close);
  response.body() = reply.body;
  response.prepare_payload();
  handler.count_response(request, reply.status);
  stream.expires_after(handler.http_options.patience);
  co_await http::async_write(stream, response, use_awaitable);
}

asio::awaitable<void> send_stream_header(HttpHandler& handler, Stream& stream, const HttpRequest& request,
                                         const char* type) {
  http::response<http::empty_body> response(http::status::ok, 11);
  response.set(http::field::content_type, type);
  response.set(http::field::cache_control, "no-cache");
  response.keep_alive(request.keep_alive());
  response.chunked(true);
  http::response_serializer<http::empty_body> serializer(response);
  stream.expires_after(handler.http_options.patience);
  co_await http::async_write_header(stream, serializer, use_awaitable);
}

asio::awaitable<void> send_chunk(HttpHandler& handler, Stream& stream, const std::string& text) {
  stream.expires_after(handler.http_options.patience);
  co_await asio::async_write(stream, http::make_chunk(asio::buffer(text)), use_awaitable);
  stream.expires_never();
}

asio::awaitable<void> send_last_chunk(HttpHandler& handler, Stream& stream) {
  stream.expires_after(handler.http_options.patience);
  co_await asio::async_write(stream, http::make_chunk_last(), use_awaitable);
}

asio::awaitable<void> watch(Stream& stream) {
  boost::system::error_code error;
  co_await stream.socket().async_wait(asio::ip::tcp::socket::wait_read, asio::redirect_error(use_awaitable, error));
  if (error) co_return;
  char byte = 0;
  const ssize_t n = ::recv(stream.socket().native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  if (n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) co_return;
  asio::steady_timer forever(co_await asio::this_coro::executor, asio::steady_timer::time_point::max());
  co_await forever.async_wait(asio::redirect_error(use_awaitable, error));
}

void Bell::notify() {
  asio::post(timer_.get_executor(), [self = shared_from_this()] {
    self->rung_ = true;
    self->timer_.cancel();
  });
}

asio::awaitable<void> Bell::wait(std::chrono::steady_clock::time_point until) {
  if (!rung_) {
    boost::system::error_code ignored;
    timer_.expires_at(until);
    co_await timer_.async_wait(asio::redirect_error(use_awaitable, ignored));
  }
  rung_ = false;
}

std::string path_of(const HttpRequest& request) {
  const std::string target(request.target());
  return target.substr(0, target.find('?'));
}

asio::awaitable<void> linger(Stream& stream) {
  boost::system::error_code error;
  stream.socket().shutdown(asio::ip::tcp::socket::shutdown_send, error);
  std::array<char, 16384> dropped{};
  const auto buffer = asio::buffer(dropped);
  stream.expires_after(std::chrono::seconds(1));
  for (int i = 0; i < 1024 && !error; ++i)
    co_await stream.async_read_some(buffer, asio::redirect_error(use_awaitable, error));
}

asio::awaitable<void> run_session(HttpHandler& handler, Stream stream) {
  handler.count_connection(1);
  try {
    co_await session(handler, stream);
  } catch (const boost::system::system_error& error) {
    spdlog::debug("connection: {}", error.what());
  } catch (const std::exception& error) {
    spdlog::error("connection: {}", error.what());
  }
  boost::system::error_code ignored;
  stream.socket().shutdown(asio::ip::tcp::socket::shutdown_both, ignored);
  handler.count_connection(-1);
}

}  // namespace tidelock::serve

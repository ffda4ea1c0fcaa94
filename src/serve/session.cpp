// One connection.
#include <array>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/beast/core/flat_buffer.hpp>

#include "base/base.hpp"
#include "serve/http.hpp"

namespace tidelock::serve {

namespace {

using asio::use_awaitable;

// What the client did wrong before there was a request; nothing when it went away or took too long, for which Beast has
// closed the connection.
std::optional<ApiError> reading_fault(const boost::system::error_code& error, const ServeOptions& options) {
  if (error == http::error::header_limit)
    return ApiError(431, "header_too_large", fmt::format("the header is longer than {} bytes", options.header_bytes));
  if (error == http::error::body_limit)
    return ApiError(413, "body_too_large", fmt::format("the body is longer than {} bytes", options.body_bytes));
  if (error.category() == make_error_code(http::error::bad_method).category() && error != http::error::end_of_stream &&
      error != http::error::partial_message)
    return ApiError(400, "bad_request", fmt::format("not HTTP: {}", error.message()));
  return std::nullopt;
}

void check_content_type(const HttpRequest& request) {
  if (request.method() != http::verb::post) return;
  const std::string type(request[http::field::content_type]);
  if (!type.starts_with("application/json"))
    throw ApiError(415, "unsupported_media_type",
                   fmt::format("the content type is \"{}\", expected application/json", type.substr(0, 80)));
}

// Everything about one request behind its header. False when the connection ends.
asio::awaitable<bool> answer(Service& service, Stream& stream, beast::flat_buffer& buffer,
                             http::request_parser<http::string_body>& parser) {
  // Without a key no body is read.
  std::optional<ApiError> fault;
  const std::string authorization(parser.get()[http::field::authorization]);
  try {
    if (path_of(parser.get()) != "/health") service.keys.check(authorization);
  } catch (const ApiError& error) {
    fault = error;
  }
  boost::system::error_code error;
  if (!fault && !parser.is_done()) {
    stream.expires_after(service.options.patience);
    if (beast::iequals(parser.get()[http::field::expect], "100-continue")) {
      const http::response<http::empty_body> go_on(http::status::continue_, 11);
      co_await http::async_write(stream, go_on, asio::redirect_error(use_awaitable, error));
    }
    if (!error) co_await http::async_read(stream, buffer, parser, asio::redirect_error(use_awaitable, error));
    if (error) {
      fault = reading_fault(error, service.options);
      if (!fault) co_return false;
    }
  }
  const HttpRequest request = parser.release();
  if (fault) {  // the rest of the request stays unread
    const Reply refusal = error_reply(*fault);
    co_await send_reply(service, stream, request, refusal, true);
    co_await linger(stream);
    co_return false;
  }
  Reply reply;
  bool failed = false;
  try {
    check_content_type(request);
    const Route route = route_of(request);
    if (route == Route::other) {
      reply = answer_simple(service, request);
    } else {
      const Keys::Ticket ticket = service.keys.enter(authorization);
      const bool there = co_await generate(service, stream, request, route == Route::chat, ticket.tenant());
      if (!there) service.metrics.count_response(metric_path(request), 499);  // nobody is told: the client is gone
      co_return there&& request.keep_alive();
    }
  } catch (const ApiError& wrong) {
    reply = error_reply(wrong);
  } catch (const boost::system::system_error&) {
    failed = true;  // the connection broke while an answer was on its way
  } catch (const Error& wrong) {
    if (wrong.code() != ErrorCode::invalid_argument) spdlog::error("{}: {}", path_of(request), wrong.what());
    reply = error_reply(to_api_error(wrong));
  } catch (const std::exception& wrong) {
    spdlog::error("{}: {}", path_of(request), wrong.what());
    reply = error_reply(ApiError(500, "internal_error", "the server failed on this request; its log says why"));
  }
  if (failed) co_return false;
  co_await send_reply(service, stream, request, reply, false);
  co_return request.keep_alive();
}

asio::awaitable<void> session(Service& service, Stream& stream) {
  beast::flat_buffer buffer;
  std::chrono::milliseconds patience = service.options.patience;  // for the first request; later ones may be idle
  while (true) {
    http::request_parser<http::string_body> parser;
    parser.header_limit(service.options.header_bytes);
    parser.body_limit(service.options.body_bytes);
    boost::system::error_code error;
    stream.expires_after(patience);
    co_await http::async_read_header(stream, buffer, parser, asio::redirect_error(use_awaitable, error));
    if (error) {
      const auto fault = reading_fault(error, service.options);
      if (!fault) co_return;
      const Reply refusal = error_reply(*fault);
      co_await send_reply(service, stream, parser.get(), refusal, true);
      co_await linger(stream);
      co_return;
    }
    if (!co_await answer(service, stream, buffer, parser)) co_return;
    patience = service.options.idle;
  }
}

}  // namespace

asio::awaitable<void> send_reply(Service& service, Stream& stream, const HttpRequest& request, const Reply& reply,
                                 bool close) {
  http::response<http::string_body> response(static_cast<http::status>(reply.status), request.version());
  response.set(http::field::content_type, reply.type);
  if (!reply.allow.empty()) response.set(http::field::allow, reply.allow);
  if (reply.status == 429) response.set(http::field::retry_after, "1");
  if (reply.status == 401) response.set(http::field::www_authenticate, "Bearer");
  response.keep_alive(request.keep_alive() && !close);
  response.body() = reply.body;
  response.prepare_payload();
  service.metrics.count_response(metric_path(request), reply.status);
  stream.expires_after(service.options.patience);
  co_await http::async_write(stream, response, use_awaitable);
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

asio::awaitable<void> run_session(Service& service, Stream stream) {
  service.metrics.connections(1);
  try {
    co_await session(service, stream);
  } catch (const boost::system::system_error& error) {
    spdlog::debug("connection: {}", error.what());
  } catch (const std::exception& error) {
    spdlog::error("connection: {}", error.what());
  }
  boost::system::error_code ignored;
  stream.socket().shutdown(asio::ip::tcp::socket::shutdown_both, ignored);
  service.metrics.connections(-1);
}

}  // namespace tidelock::serve

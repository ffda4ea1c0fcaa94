// HTTP and WebSocket to ports of sandboxes that have no network: through the agent, byte by byte.
#include <boost/asio/experimental/awaitable_operators.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <sstream>

#include "base/base.hpp"
#include "serve/e2b/proxy.hpp"
#include "serve/e2b/server.hpp"

namespace tidelock::serve::e2b {
namespace {

using asio::use_awaitable;
using BodyParser = http::request_parser<http::buffer_body>;

// One request on its way: two coroutines of one strand, one for each direction.
struct Passage {
  Stream& stream;
  beast::flat_buffer& read;
  BodyParser& parser;
  std::shared_ptr<sandbox::PortConnection> port;
  std::chrono::milliseconds patience;
  ProxyHead request = {};
  std::shared_ptr<Bell> room = nullptr, news = nullptr;  // of port: for each direction
  bool upgraded = false;                                 // the guest has agreed
  bool answered = false;                                 // something was sent to the client
  std::exception_ptr error = nullptr;
};

asio::awaitable<void> forever() {
  asio::steady_timer timer(co_await asio::this_coro::executor, asio::steady_timer::time_point::max());
  boost::system::error_code ignored;
  co_await timer.async_wait(asio::redirect_error(use_awaitable, ignored));
}

asio::awaitable<void> give(Passage& passage, std::string_view bytes) {
  while (!bytes.empty()) {
    bytes.remove_prefix(passage.port->give(bytes));
    if (!bytes.empty()) co_await passage.room->wait();
  }
}

// The request's body, in the framing that it came in. False when the client has gone.
asio::awaitable<bool> send_body(Passage& passage) {
  char part[32U << 10];
  while (!passage.parser.is_done()) {
    http::buffer_body::value_type& body = passage.parser.get().body();
    body.data = part, body.size = sizeof part;
    boost::system::error_code error;
    passage.stream.expires_after(passage.patience);
    co_await http::async_read_some(passage.stream, passage.read, passage.parser,
                                   asio::redirect_error(use_awaitable, error));
    if (error && error != http::error::need_buffer) co_return false;
    const std::string_view bytes(part, sizeof part - body.size);
    if (passage.request.chunked && !bytes.empty()) {
      const std::string size = fmt::format("{:x}\r\n", bytes.size());
      co_await give(passage, size);
    }
    co_await give(passage, bytes);
    if (passage.request.chunked && !bytes.empty()) co_await give(passage, "\r\n");
  }
  passage.stream.expires_never();
  if (passage.request.chunked) co_await give(passage, "0\r\n\r\n");
  co_return true;
}

// Bytes alone, until the client has ended its side.
asio::awaitable<void> send_bytes(Passage& passage) {
  const auto early = passage.read.data();
  const std::string first(static_cast<const char*>(early.data()), early.size());
  co_await give(passage, first);
  char part[32U << 10];
  while (true) {
    boost::system::error_code error;
    const auto space = asio::buffer(part);
    const std::size_t got = co_await passage.stream.async_read_some(space, asio::redirect_error(use_awaitable, error));
    if (error == asio::error::eof) {
      passage.port->finish();
      co_await forever();  // the guest may still have something to say
    }
    if (error) co_return;
    co_await give(passage, std::string_view(part, got));
  }
}

// Returns when the client has gone.
asio::awaitable<void> send_request(Passage& passage) {
  try {
    co_await give(passage, passage.request.text);
    if (!co_await send_body(passage)) co_return;
    while (passage.request.upgrade && !passage.upgraded) co_await passage.room->wait();
    if (passage.upgraded) {
      co_await send_bytes(passage);
    } else {
      co_await watch(passage.stream);
    }
  } catch (const std::exception& error) {
    spdlog::debug("port: {}", error.what());
  }
}

// Returns when the guest has ended its side.
asio::awaitable<void> send_answer(Passage& passage) {
  try {
    std::string bytes;
    while (true) {
      while (bytes.size() < (256U << 10)) {
        const std::optional<std::string> more = passage.port->take();
        if (!more) break;
        bytes += *more;
      }
      if (!passage.answered) {
        if (const auto answer = forward_answer(bytes, passage.request.upgrade)) {
          bytes.replace(0, answer->used, answer->head.text);
          passage.answered = true;
          passage.request.upgrade = passage.upgraded = answer->head.upgrade;
          passage.room->notify();
        } else if (passage.port->ended()) {
          throw ApiError(502, "", "the sandbox's server ended without an answer");
        }
      }
      if (passage.answered && !bytes.empty()) {
        const auto whole = asio::buffer(bytes);
        passage.stream.expires_after(passage.patience);
        co_await asio::async_write(passage.stream, whole, use_awaitable);
        passage.stream.expires_never();
        bytes.clear();
        continue;
      }
      if (passage.port->ended()) co_return;
      co_await passage.news->wait();
    }
  } catch (...) {
    passage.error = std::current_exception();
  }
}

// The same, and ends the other direction's reading.
asio::awaitable<void> send_whole_answer(Passage& passage) {
  co_await send_answer(passage);
  boost::system::error_code ignored;
  passage.stream.socket().cancel(ignored);
}

}  // namespace

std::shared_ptr<sandbox::PortConnection> Server::connect_port(const Target& target) {
  std::shared_ptr<sandbox::PortConnection> out;
  try {
    sandboxes_->use(target.sandbox,
                    [&](sandbox::Sandbox& box, const SandboxRecord&) { out = box.connect_port(target.port); });
  } catch (const Error& error) {
    const std::string port = std::to_string(target.port);
    if (error.code() == ErrorCode::not_found)
      throw ApiError(502, port, fmt::format("the sandbox is running but port {} is not open", port), target.sandbox);
    if (error.code() == ErrorCode::exhausted) throw ApiError(503, "", error.what());
    if (error.code() == ErrorCode::not_supported) throw ApiError(501, "", error.what());
    throw ApiError(502, "", error.what(), target.sandbox);
  }
  return out;
}

asio::awaitable<void> Server::take_over(Stream& stream, beast::flat_buffer& read, HttpParser& parser) {
  using namespace asio::experimental::awaitable_operators;
  const Target target = target_of(parser.get());
  const ProxyHead request = forward_request(parser.get());
  const bool asks_to_go_on = beast::iequals(parser.get()[http::field::expect], "100-continue");
  std::shared_ptr<sandbox::PortConnection> port;
  std::exception_ptr wrong;
  const std::function<void()> open = [&] {
    try {
      port = connect_port(target);
    } catch (...) {
      wrong = std::current_exception();
    }
  };
  stream.expires_never();
  co_await on_pool(open);
  if (wrong) std::rethrow_exception(wrong);
  if (asks_to_go_on) {
    const http::response<http::empty_body> go_on(http::status::continue_, 11);
    co_await http::async_write(stream, go_on, use_awaitable);
  }
  parser.body_limit(boost::none);  // it is never whole in memory
  BodyParser body(std::move(parser));
  Passage passage{stream, read, body, port, http_options.patience};
  passage.request = request;
  passage.room = std::make_shared<Bell>(stream.get_executor());
  passage.news = std::make_shared<Bell>(stream.get_executor());
  port->on_event([room = passage.room, news = passage.news] {
    room->notify();
    news->notify();
  });
  co_await (send_whole_answer(passage) || send_request(passage));
  if (passage.error && !passage.answered) {
    try {
      std::rethrow_exception(passage.error);
    } catch (const ApiError& error) {
      throw ApiError(502, std::to_string(target.port), error.what(), target.sandbox);
    } catch (const Error& error) {
      throw ApiError(502, "", error.what(), target.sandbox);
    }
  }
  if (passage.error) {  // cut off, and seen to be
    boost::system::error_code ignored;
    stream.socket().set_option(asio::socket_base::linger(true, 0), ignored);
    stream.socket().close(ignored);
  }
}

}  // namespace tidelock::serve::e2b

// A generation from its request to the last byte.
#include <sys/socket.h>

#include <boost/asio/experimental/awaitable_operators.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <chrono>
#include <exception>
#include <random>

#include "base/base.hpp"
#include "serve/answer.hpp"
#include "serve/http.hpp"

namespace tidelock::serve {
namespace {

using Clock = std::chrono::steady_clock;
using asio::use_awaitable;

// Lets the connection's coroutine sleep until the engine's thread has something for it. All but notify() belongs to the
// connection's strand.
class Bell : public std::enable_shared_from_this<Bell> {
 public:
  explicit Bell(const asio::any_io_executor& executor) : timer_(executor) {}

  void notify() {
    asio::post(timer_.get_executor(), [self = shared_from_this()] {
      self->rung_ = true;
      self->timer_.cancel();
    });
  }
  asio::awaitable<void> wait() {
    if (!rung_) {
      boost::system::error_code ignored;
      timer_.expires_at(Clock::time_point::max());
      co_await timer_.async_wait(asio::redirect_error(use_awaitable, ignored));
    }
    rung_ = false;
  }

 private:
  asio::steady_timer timer_;
  bool rung_ = false;
};

// A request's place in the engine: left on every way out.
class Lease {
 public:
  Lease(EngineLoop& engine, std::shared_ptr<Generation> generation)
      : engine_(engine), generation_(std::move(generation)) {
    engine_.submit(generation_);
  }
  ~Lease() {
    if (!done_) engine_.cancel(generation_);
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  void done() { done_ = true; }

 private:
  EngineLoop& engine_;
  std::shared_ptr<Generation> generation_;
  bool done_ = false;
};

std::string new_id(bool chat) {
  thread_local std::random_device device;
  return fmt::format("{}-{:08x}{:08x}{:08x}", chat ? "chatcmpl" : "cmpl", device(), device(), device());
}

std::int64_t unix_time() {
  return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// One generation's state on the connection's side.
struct Work {
  Service& service;
  Stream& stream;
  const HttpRequest& http_request;
  GenerateRequest request;
  Answer answer;
  std::shared_ptr<Bell> bell;
  std::shared_ptr<Generation> generation;
  Lease lease;
  Clock::time_point arrived = Clock::now();
  bool first = true, header_sent = false;
  std::exception_ptr error;

  Work(Service& s, Stream& st, const HttpRequest& http, GenerateRequest r)
      : service(s),
        stream(st),
        http_request(http),
        request(std::move(r)),
        answer(s.context, request, new_id(request.chat), unix_time()),
        bell(std::make_shared<Bell>(st.get_executor())),
        generation(std::make_shared<Generation>(
            request.prompt, request.choices, [b = bell] { b->notify(); }, request.cache_salt)),
        lease(s.engine, generation) {}
};

asio::awaitable<void> send_chunk(Work& work, const std::string& text) {
  work.stream.expires_after(work.service.options.patience);
  co_await asio::async_write(work.stream, http::make_chunk(asio::buffer(text)), use_awaitable);
}

asio::awaitable<void> send_header(Work& work) {
  http::response<http::empty_body> response(http::status::ok, 11);
  response.set(http::field::content_type, "text/event-stream; charset=utf-8");
  response.set(http::field::cache_control, "no-cache");
  response.keep_alive(work.http_request.keep_alive());
  response.chunked(true);
  http::response_serializer<http::empty_body> serializer(response);
  work.stream.expires_after(work.service.options.patience);
  work.header_sent = true;
  co_await http::async_write_header(work.stream, serializer, use_awaitable);
}

std::string event(const std::string& json) {
  return fmt::format("data: {}\n\n", json);
}

// Takes what the engine has and sends what comes of it. False when the engine gave up.
asio::awaitable<bool> pump(Work& work) {
  std::string text;
  for (const SampledToken& token : work.generation->take()) {
    if (std::exchange(work.first, false)) work.service.metrics.observe_first_token(seconds_since(work.arrived));
    const bool was_early = work.answer.ended_early(token.choice);
    if (const auto chunk = work.answer.feed(token)) text += event(*chunk);
    if (!was_early && work.answer.ended_early(token.choice)) work.service.engine.cancel(work.generation, token.choice);
  }
  if (!text.empty()) co_await send_chunk(work, text);
  co_return work.generation->failure().empty();
}

asio::awaitable<void> finish_stream(Work& work, bool whole) {
  work.service.metrics.count_response(metric_path(work.http_request), whole ? 200 : 500);
  std::string text;
  if (!whole) {
    text = event(ApiError(500, "internal_error", "the engine gave this request up; the server's log says why").json());
  } else if (work.request.include_usage) {
    text = event(work.answer.usage_chunk());
  }
  if (whole) text += "data: [DONE]\n\n";
  co_await send_chunk(work, text);
  work.stream.expires_after(work.service.options.patience);
  co_await asio::async_write(work.stream, http::make_chunk_last(), use_awaitable);
}

asio::awaitable<void> answer(Work& work) {
  if (work.request.stream) {
    co_await send_header(work);
    std::string text;
    for (const std::string& chunk : work.answer.begin()) text += event(chunk);
    if (!text.empty()) co_await send_chunk(work, text);
  }
  bool whole = true;
  while (whole && !work.answer.done()) {
    co_await work.bell->wait();
    whole = co_await pump(work);
  }
  if (work.answer.done()) work.lease.done();
  work.service.metrics.observe_request(seconds_since(work.arrived));
  if (work.request.stream) {
    co_await finish_stream(work, whole);
  } else {
    if (!whole) throw ApiError(500, "internal_error", "the engine gave this request up; the server's log says why");
    const Reply reply{200, work.answer.response()};
    co_await send_reply(work.service, work.stream, work.http_request, reply, false);
  }
}

// answer() for operator||, which waits for a success: what it throws is kept.
asio::awaitable<void> produce(Work& work) {
  try {
    co_await answer(work);
  } catch (...) {
    work.error = std::current_exception();
  }
}

// Returns when the client has closed its side. Bytes of a further request end the watching: what comes behind them
// cannot be seen.
asio::awaitable<void> watch(Stream& stream) {
  boost::system::error_code error;
  co_await stream.socket().async_wait(asio::ip::tcp::socket::wait_read, asio::redirect_error(use_awaitable, error));
  if (error) co_return;
  char byte = 0;
  const ssize_t n = ::recv(stream.socket().native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  if (n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) co_return;
  asio::steady_timer forever(co_await asio::this_coro::executor, Clock::time_point::max());
  co_await forever.async_wait(asio::redirect_error(use_awaitable, error));
}

}  // namespace

asio::awaitable<bool> generate(Service& service, Stream& stream, const HttpRequest& request, bool chat,
                               const std::string& tenant) {
  using namespace asio::experimental::awaitable_operators;
  GenerateRequest wanted = chat ? read_chat_request(request.body(), service.context)
                                : read_completion_request(request.body(), service.context);
  if (wanted.stream && request.version() < 11)
    throw ApiError(400, "unsupported_value", "streaming needs HTTP/1.1", "stream");
  wanted.cache_salt = fmt::format("{}:{}{}", tenant.size(), tenant, wanted.cache_salt);
  std::unique_ptr<Work> work;
  try {
    work = std::make_unique<Work>(service, stream, request, std::move(wanted));
  } catch (const Error& error) {
    throw to_api_error(error);
  }
  stream.expires_never();
  const auto ended = co_await (produce(*work) || watch(stream));
  if (ended.index() != 0) co_return false;
  // In the middle of a stream there is no other answer: the connection ends.
  if (work->error && work->header_sent) co_return false;
  if (work->error) std::rethrow_exception(work->error);
  co_return true;
}

}  // namespace tidelock::serve

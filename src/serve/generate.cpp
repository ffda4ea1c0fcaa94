// A generation from its request to the last byte.
#include <boost/asio/experimental/awaitable_operators.hpp>
#include <chrono>
#include <exception>
#include <random>

#include "base/base.hpp"
#include "serve/answer.hpp"
#include "serve/service.hpp"

namespace tidelock::serve {
namespace {

using Clock = std::chrono::steady_clock;

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
            Wanted{request.prompt, request.choices, request.cache_salt, request.priority, request.weights.adapter},
            [b = bell] { b->notify(); })),
        lease(s.engine, generation) {}
};

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
  if (!text.empty()) co_await send_chunk(work.service, work.stream, text);
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
  co_await send_chunk(work.service, work.stream, text);
  co_await send_last_chunk(work.service, work.stream);
}

// Waits until the engine has seen the request, where it may refuse it: a refusal has a status of its own.
asio::awaitable<void> be_seen(Work& work) {
  if (work.service.options.first_token_seconds <= 0) co_return;
  while (!work.generation->seen()) co_await work.bell->wait();
  if (work.generation->retry_after() == 0) co_return;
  ApiError error(429, "server_busy", work.generation->failure());
  error.retry_after = work.generation->retry_after();
  throw error;
}

asio::awaitable<void> answer(Work& work) {
  co_await be_seen(work);
  if (work.request.stream) {
    work.header_sent = true;
    co_await send_stream_header(work.service, work.stream, work.http_request, "text/event-stream; charset=utf-8");
    std::string text;
    for (const std::string& chunk : work.answer.begin()) text += event(chunk);
    if (!text.empty()) co_await send_chunk(work.service, work.stream, text);
  }
  bool whole = co_await pump(work);  // the bell may have rung for tokens already
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

}  // namespace

std::string tenant_salt(const std::string& tenant, const std::string& salt) {
  return fmt::format("{}:{}{}", tenant.size(), tenant, salt);
}

asio::awaitable<bool> generate(Service& service, Stream& stream, const HttpRequest& request, bool chat,
                               const std::string& tenant) {
  using namespace asio::experimental::awaitable_operators;
  GenerateRequest wanted = chat ? read_chat_request(request.body(), service.context)
                                : read_completion_request(request.body(), service.context);
  if (wanted.stream && request.version() < 11)
    throw ApiError(400, "unsupported_value", "streaming needs HTTP/1.1", "stream");
  wanted.cache_salt = tenant_salt(tenant, wanted.cache_salt);
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

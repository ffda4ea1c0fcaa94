// Streams of events: processes, and folders that are watched.
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/experimental/awaitable_operators.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <csignal>

#include "base/base.hpp"
#include "serve/e2b/server.hpp"

namespace tidelock::serve::e2b {
namespace {

constexpr std::size_t kBatch = 128U << 10;  // bytes of events sent at once

}  // namespace

// On the pool.
void Server::open_events(Work& work, const std::string& path) {
  const std::string timeout = header_of(work.request, "Connect-Timeout-Ms");
  const std::string ping = header_of(work.request, "Keepalive-Ping-Interval");
  if (const std::int64_t limit = parse_timeout(timeout); limit > 0)
    work.deadline = Clock::now() + std::chrono::milliseconds(limit);
  if (const int seconds = positive_number(ping); seconds > 0) work.keepalive = std::chrono::seconds(seconds);
  const Json message = open_envelope(work.request.body());
  const bool root = is_root_of(header_of(work.request, "Authorization"));
  work.started_here = path == "/process.Process/Start";
  const bool watches = path == "/filesystem.Filesystem/WatchDir";
  sandboxes_->use(work.sandbox, [&](sandbox::Sandbox& box, const SandboxRecord& record) {
    if (watches) {
      work.watch = box.watch(parse_watch(message, root));
    } else if (work.started_here) {
      const sandbox::ProcessRequest wanted = with_defaults(parse_start(message, record, root), box.defaults(),
                                                           header_of(work.request, "Authorization").empty());
      work.listener = box.start(wanted);
      sandboxes_->note(work.sandbox, "process started",
                       {{"pid", std::to_string(work.listener->pid())},
                        {"command", fmt::format("{}", fmt::join(wanted.argv, " "))},
                        {"user", wanted.root ? "root" : "user"}});
    } else {
      work.listener = box.attach(select_process(box, message));
    }
  });
}

asio::awaitable<void> Server::end_stream(Work& work, const RpcError* error) {
  Json last = Json::object();
  if (error != nullptr) last["error"] = error_json(*error);
  const std::string text = envelope(last, kEndOfStream);
  co_await send_chunk(*this, work.stream, text);
  co_await send_last_chunk(*this, work.stream);
}

asio::awaitable<void> Server::end_process(Work& work) {
  const std::function<void()> kill = [this, &work] {
    try {
      sandboxes_->use(work.sandbox,
                      [&](sandbox::Sandbox& box, const SandboxRecord&) { box.signal(work.listener->pid(), SIGKILL); });
    } catch (const std::exception& error) {  // it has just ended, or everything has
      spdlog::debug("process {}: {}", work.listener->pid(), error.what());
    }
  };
  co_await on_pool(kill);
}

// A process whose client went away before its time-out still has one. `work` refers to no connection any more.
asio::awaitable<void> Server::mind(std::unique_ptr<Work> work) {
  while (true) {
    while (const std::optional<sandbox::ProcessEvent> event = work->listener->take())
      if (event->kind == sandbox::ProcessEvent::Kind::ended || event->kind == sandbox::ProcessEvent::Kind::lost)
        co_return;
    if (Clock::now() >= *work->deadline) break;
    co_await work->bell->wait(*work->deadline);
  }
  co_await end_process(*work);
}

// Adds what there is, up to a batch; says how the stream ends when it does (with no code: well).
std::optional<RpcError> Server::add_events(Work& work, std::string& text) {
  using Kind = sandbox::ProcessEvent::Kind;
  try {
    while (text.size() < kBatch && work.watch) {
      const std::optional<sandbox::FileChange> change = work.watch->take();
      if (!change) return std::nullopt;
      text += envelope({{"filesystem", change_json(*change)}});
    }
  } catch (const Error& error) {
    return to_rpc_error(error);
  }
  while (text.size() < kBatch && work.listener) {
    const std::optional<sandbox::ProcessEvent> event = work.listener->take();
    if (!event) return std::nullopt;
    if (event->kind == Kind::lost)
      return RpcError("unavailable", "the sandbox was paused or ended while the process ran");
    text += envelope(process_event(*event));
    if (event->kind == Kind::ended) return RpcError("", "");
  }
  return std::nullopt;
}

asio::awaitable<void> Server::pump(Work& work) {
  std::string text = envelope(work.watch ? Json{{"start", Json::object()}} : start_event(work.listener->pid()));
  while (true) {
    const std::optional<RpcError> last = add_events(work, text);
    if (!text.empty()) co_await send_chunk(*this, work.stream, text);
    const bool more = text.size() >= kBatch;
    text.clear();
    if (last) {
      work.over = true;
      co_await end_stream(work, last->code().empty() ? nullptr : &*last);
      co_return;
    }
    if (work.deadline && Clock::now() >= *work.deadline) {
      if (work.started_here) co_await end_process(work);
      work.over = true;  // only now: a client that goes before leaves the process to mind()
      const RpcError late("deadline_exceeded", "the time-out of the request has passed");
      co_await end_stream(work, &late);
      co_return;
    }
    if (more) continue;
    const Clock::time_point ping =
        work.keepalive.count() > 0 ? Clock::now() + work.keepalive : Clock::time_point::max();
    co_await work.bell->wait(std::min(ping, work.deadline.value_or(Clock::time_point::max())));
    if (Clock::now() >= ping) text = envelope(work.watch ? Json{{"keepalive", Json::object()}} : keepalive_event());
  }
}

// pump() for operator||, which waits for a success: what it throws is kept.
asio::awaitable<void> Server::produce(Work& work) {
  try {
    co_await pump(work);
  } catch (...) {
    work.error = std::current_exception();
  }
}

// A process goes on when its client goes. False when the client went away.
asio::awaitable<bool> Server::stream_events(Stream& stream, const HttpRequest& request, Target target) {
  using namespace asio::experimental::awaitable_operators;
  if (request.version() < 11) throw ApiError(400, "", "streaming needs HTTP/1.1");
  auto work = std::make_unique<Work>(
      Work{.stream = stream, .request = request, .sandbox = target.sandbox, .listener = nullptr});
  work->bell = std::make_shared<Bell>(stream.get_executor());
  std::optional<RpcError> refused;
  std::exception_ptr wrong;
  const std::function<void()> open = [&] {
    try {
      open_events(*work, path_of(request));
    } catch (const RpcError& error) {
      refused = error;
    } catch (const Error& error) {
      refused = to_rpc_error(error);
    } catch (...) {
      wrong = std::current_exception();
    }
  };
  stream.expires_never();
  co_await on_pool(open);
  if (wrong) std::rethrow_exception(wrong);
  co_await send_stream_header(*this, stream, request, "application/connect+json");
  if (refused) {
    const RpcError error = *refused;
    co_await end_stream(*work, &error);
    co_return request.keep_alive();
  }
  const std::function<void()> ring = [bell = work->bell] { bell->notify(); };
  if (work->watch)
    work->watch->on_event(ring);
  else
    work->listener->on_event(ring);
  stream.expires_never();
  const auto ended = co_await (produce(*work) || watch(stream));
  const bool there = ended.index() == 0 && !work->error;
  if (!work->over && work->started_here && work->deadline)
    asio::co_spawn(stream.get_executor(), mind(std::move(work)), asio::detached);
  co_return there&& request.keep_alive();
}

}  // namespace tidelock::serve::e2b

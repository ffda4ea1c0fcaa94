// Which request goes where, who is let in, and streams of processes.
#include <algorithm>
#include <atomic>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/experimental/awaitable_operators.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/thread_pool.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <charconv>
#include <csignal>

#include "base/base.hpp"
#include "serve/e2b/control.hpp"
#include "serve/e2b/e2b.hpp"
#include "serve/e2b/text.hpp"
#include "serve/http.hpp"
#include "serve/keys.hpp"

namespace tidelock::serve::e2b {
namespace {

using Clock = std::chrono::steady_clock;
using asio::use_awaitable;

constexpr int kWaiting = 24;  // requests that wait for sandboxes at once
constexpr int kEnvdPort = 49983;
constexpr std::size_t kBatch = 128U << 10;       // bytes of events sent at once
constexpr std::chrono::milliseconds kTick{250};  // between looks at the time-outs

std::string header_of(const HttpRequest& request, std::string_view name) {
  const auto found = request.find(beast::string_view(name.data(), name.size()));
  return found == request.end() ? std::string() : std::string(found->value());
}

// Where a request leads: a sandbox and a port of it, or nowhere: the control plane.
struct Target {
  std::string sandbox;
  int port = kEnvdPort;
};

// 1 to 65535; -1 for anything else.
int positive_number(std::string_view text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size() && number > 0 && number < 65536 ? number : -1;
}

Target target_of(const HttpRequest& request) {
  Target out;
  out.sandbox = header_of(request, "E2b-Sandbox-Id");
  const std::string port = header_of(request, "E2b-Sandbox-Port");
  if (!out.sandbox.empty()) {
    if (!port.empty()) out.port = positive_number(port);
    return out;
  }
  const std::string host(request[http::field::host]);
  const std::size_t dash = host.find('-'), dot = host.find('.');
  if (dash != std::string::npos && dot != std::string::npos && dash < dot &&
      positive_number(host.substr(0, dash)) > 0) {
    out.port = positive_number(host.substr(0, dash));
    out.sandbox = host.substr(dash + 1, dot - dash - 1);
  }
  return out;
}

Request plain(const HttpRequest& from) {
  Request out;
  const std::string target(from.target());
  const std::size_t question = std::min(target.find('?'), target.size());
  out.method = std::string(from.method_string());
  out.path = target.substr(0, question);
  const auto query = parse_form(std::string_view(target).substr(std::min(question + 1, target.size())));
  if (!query) throw ApiError(400, "", "the query cannot be decoded");
  out.query = *query;
  out.content_type = std::string(from[http::field::content_type]);
  out.content_encoding = std::string(from[http::field::content_encoding]);
  out.authorization = std::string(from[http::field::authorization]);
  out.file_metadata = std::any_of(from.begin(), from.end(), [](const auto& field) {
    return beast::iequals(field.name_string().substr(0, 11), "X-Metadata-");
  });
  out.body = from.body();
  return out;
}

bool is_rpc(const std::string& path) {
  return path.starts_with("/process.Process/") || path.starts_with("/filesystem.Filesystem/");
}

class Server : public HttpHandler {
 public:
  Server(const E2bOptions& options, std::unique_ptr<Sandboxes> sandboxes)
      : HttpHandler(options),
        keys_(options.keys.empty() ? Keys() : Keys::load(options.keys)),
        sandboxes_(std::move(sandboxes)) {}
  void admit(const HttpRequest& header) override;
  asio::awaitable<bool> answer(Stream& stream, const HttpRequest& request) override;
  Reply refusal(const ApiError& error) override;
  void begin(asio::io_context& io) override { asio::co_spawn(io, watch_times(), asio::detached); }
  void end() override;
  void count_response(const HttpRequest&, int) override {}
  void count_connection(int change) override { connections_ += change; }
  int open_connections() const override { return connections_; }
  void count_refused_connection() override {}

 private:
  // One streamed process, as one connection sees it.
  struct Work {
    Stream& stream;
    const HttpRequest& request;
    std::string sandbox;
    std::shared_ptr<sandbox::ProcessListener> listener;
    std::shared_ptr<Bell> bell;
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
  asio::awaitable<bool> stream_process(Stream& stream, const HttpRequest& request, Target target);
  void open_process(Work& work, const std::string& path);
  asio::awaitable<void> end_process(Work& work);
  asio::awaitable<void> mind(std::unique_ptr<Work> work);
  asio::awaitable<void> pump(Work& work);
  asio::awaitable<void> produce(Work& work);
  asio::awaitable<void> end_stream(Work& work, const RpcError* error);

  Keys keys_;
  std::unique_ptr<Sandboxes> sandboxes_;
  std::atomic<int> connections_ = 0;
  asio::thread_pool pool_{kWaiting};
};

void Server::admit(const HttpRequest& header) {
  const Target target = target_of(header);
  if (path_of(header) == "/health") return;
  if (!target.sandbox.empty()) {
    const auto record = sandboxes_->find(target.sandbox);
    if (!record) throw ApiError(502, "", "the sandbox was not found: there is none with this id", target.sandbox);
    if (!record->token.empty() && !same_secret(header_of(header, "X-Access-Token"), record->token))
      throw ApiError(401, "", "X-Access-Token: expected the token that the sandbox was made with");
    return;
  }
  if (!keys_.required()) return;
  const auto [first, last] = header.equal_range("X-API-KEY");
  if (first == last) throw ApiError(401, "", "this server asks for a key: X-API-KEY");
  try {
    for (auto at = first; at != last; ++at) keys_.check("Bearer " + std::string(at->value()));  // every one
  } catch (const ApiError&) {
    throw ApiError(401, "", "X-API-KEY: the key is not one of this server's");
  }
}

Reply Server::refusal(const ApiError& error) {
  const int status = error.code() == "unsupported_parameter" ? 501 : error.status();
  Json out{{"code", status}, {"message", error.what()}};
  if (status == 502) out["sandboxId"] = error.param();
  return {status, out.dump(-1, ' ', false, Json::error_handler_t::replace)};
}

// Clients that go away before it is done change nothing: what was asked for is done.
asio::awaitable<void> Server::on_pool(std::function<void()> act) {
  const auto run = [](std::function<void()> what) -> asio::awaitable<void> {
    what();
    co_return;
  };
  co_await asio::co_spawn(pool_, run(std::move(act)), use_awaitable);
}

asio::awaitable<void> Server::watch_times() {
  asio::steady_timer timer(co_await asio::this_coro::executor);
  while (true) {
    timer.expires_after(kTick);
    co_await timer.async_wait(use_awaitable);
    const std::function<void()> look = [this] { sandboxes_->expire(); };
    co_await on_pool(look);
  }
}

void Server::end() {
  pool_.join();        // what is under way is done; its news reaches nobody
  sandboxes_.reset();  // and with it everything that could wake a connection
}

Reply Server::answer_envd(sandbox::Sandbox& box, const Request& request) {
  const std::string process = "/process.Process/", filesystem = "/filesystem.Filesystem/";
  if (request.path.starts_with(process)) return answer_process(box, request.path.substr(process.size()), request);
  if (request.path.starts_with(filesystem))
    return answer_filesystem(box, request.path.substr(filesystem.size()), request);
  if (request.path == "/health") return {204, ""};
  if (request.path == "/files") return answer_files(box, request);
  throw ApiError(501, "", fmt::format("{} is not built here; docs/e2b.md lists what is", request.path.substr(0, 100)));
}

// What goes wrong inside a sandbox, in the form of who asked: the protocol's for calls, HTTP's for files.
Reply Server::answer_inside(const Target& target, const Request& request) {
  if (target.port != kEnvdPort)
    throw ApiError(
        501, "",
        fmt::format("port {}: ports of sandboxes other than {} are not reachable here", target.port, kEnvdPort));
  Reply reply;
  try {
    sandboxes_->use(target.sandbox,
                    [&](sandbox::Sandbox& box, const SandboxRecord&) { reply = answer_envd(box, request); });
  } catch (const RpcError& error) {
    if (!is_rpc(request.path)) throw ApiError(error.status(), "", error.what());
    return rpc_refusal(error);
  } catch (const Error& error) {
    const RpcError told = to_rpc_error(error);
    if (is_rpc(request.path)) return rpc_refusal(told);
    throw ApiError(error.code() == ErrorCode::exhausted ? 507 : told.status(), "", error.what());
  }
  return reply;
}

asio::awaitable<bool> Server::answer(Stream& stream, const HttpRequest& request) {
  const Target target = target_of(request);
  const std::string path = path_of(request);
  const bool streams = path == "/process.Process/Start" || path == "/process.Process/Connect";
  if (!target.sandbox.empty() && target.port == kEnvdPort && streams && request.method() == http::verb::post)
    co_return co_await stream_process(stream, request, target);
  const Request asked = plain(request);
  Reply reply;
  std::exception_ptr wrong;
  const std::function<void()> act = [&] {
    try {
      reply = target.sandbox.empty() ? answer_control(*sandboxes_, asked) : answer_inside(target, asked);
    } catch (...) {
      wrong = std::current_exception();
    }
  };
  stream.expires_never();
  co_await on_pool(act);
  if (wrong) {
    try {
      std::rethrow_exception(wrong);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::exhausted) throw;
      throw ApiError(503, "", error.what());  // no room now: clients try again later
    }
  }
  co_await send_reply(*this, stream, request, reply, false);
  co_return request.keep_alive();
}

// On the pool.
void Server::open_process(Work& work, const std::string& path) {
  const std::string timeout = header_of(work.request, "Connect-Timeout-Ms");
  const std::string ping = header_of(work.request, "Keepalive-Ping-Interval");
  if (const std::int64_t limit = parse_timeout(timeout); limit > 0)
    work.deadline = Clock::now() + std::chrono::milliseconds(limit);
  if (const int seconds = positive_number(ping); seconds > 0) work.keepalive = std::chrono::seconds(seconds);
  const Json message = open_envelope(work.request.body());
  const bool root = is_root_of(header_of(work.request, "Authorization"));
  work.started_here = path == "/process.Process/Start";
  sandboxes_->use(work.sandbox, [&](sandbox::Sandbox& box, const SandboxRecord& record) {
    work.listener =
        work.started_here ? box.start(parse_start(message, record, root)) : box.attach(select_process(box, message));
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

asio::awaitable<void> Server::pump(Work& work) {
  using Kind = sandbox::ProcessEvent::Kind;
  std::string text = envelope(start_event(work.listener->pid()));
  while (true) {
    std::optional<Kind> last;
    while (text.size() < kBatch && !last) {
      const std::optional<sandbox::ProcessEvent> event = work.listener->take();
      if (!event) break;
      if (event->kind == Kind::ended || event->kind == Kind::lost) last = event->kind;
      if (event->kind != Kind::lost) text += envelope(process_event(*event));
    }
    if (!text.empty()) co_await send_chunk(*this, work.stream, text);
    const bool more = text.size() >= kBatch;
    text.clear();
    if (last) {
      work.over = true;
      const RpcError lost("unavailable", "the sandbox was paused or ended while the process ran");
      co_await end_stream(work, *last == Kind::lost ? &lost : nullptr);
      co_return;
    }
    if (work.deadline && Clock::now() >= *work.deadline) {
      work.over = true;
      if (work.started_here) co_await end_process(work);
      const RpcError late("deadline_exceeded", "the time-out of the request has passed");
      co_await end_stream(work, &late);
      co_return;
    }
    if (more) continue;
    const Clock::time_point ping =
        work.keepalive.count() > 0 ? Clock::now() + work.keepalive : Clock::time_point::max();
    co_await work.bell->wait(std::min(ping, work.deadline.value_or(Clock::time_point::max())));
    if (Clock::now() >= ping) text = envelope(keepalive_event());
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
asio::awaitable<bool> Server::stream_process(Stream& stream, const HttpRequest& request, Target target) {
  using namespace asio::experimental::awaitable_operators;
  if (request.version() < 11) throw ApiError(400, "", "streaming needs HTTP/1.1");
  auto work = std::make_unique<Work>(
      Work{stream, request, target.sandbox, nullptr, std::make_shared<Bell>(stream.get_executor())});
  std::optional<RpcError> refused;
  std::exception_ptr wrong;
  const std::function<void()> open = [&] {
    try {
      open_process(*work, path_of(request));
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
  work->listener->on_event([bell = work->bell] { bell->notify(); });
  stream.expires_never();
  const auto ended = co_await (produce(*work) || watch(stream));
  const bool there = ended.index() == 0 && !work->error;
  if (!work->over && work->started_here && work->deadline)
    asio::co_spawn(stream.get_executor(), mind(std::move(work)), asio::detached);
  co_return there&& request.keep_alive();
}

}  // namespace

void serve_e2b(std::unique_ptr<sandbox::Runtime> runtime, const E2bOptions& options) {
  const sandbox::Capabilities can = runtime->capabilities();
  if (!can.snapshot || !can.processes)
    fail(ErrorCode::not_supported, "the E2B API needs a runtime that keeps sandboxes and runs processes beside calls");
  SandboxesOptions inner;
  inner.directory = options.directory;
  inner.templates = options.templates;
  inner.memory_mib = options.memory_mib, inner.disk_mib = options.disk_mib, inner.processes = options.processes;
  inner.now = [] {
    return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch())
        .count();
  };
  Server server(options, std::make_unique<Sandboxes>(std::move(runtime), inner));
  run_http_server(server);
}

}  // namespace tidelock::serve::e2b

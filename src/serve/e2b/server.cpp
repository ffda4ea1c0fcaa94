// Which request goes where, and who is let in.
#include "serve/e2b/server.hpp"

#include <algorithm>
#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <charconv>

#include "base/base.hpp"
#include "serve/e2b/text.hpp"

namespace tidelock::serve::e2b {

using asio::use_awaitable;

namespace {

constexpr std::chrono::milliseconds kTick{250};  // between looks at the time-outs

Request plain(const HttpRequest& from) {
  Request out;
  const std::string target(from.target());
  const std::size_t question = std::min(target.find('?'), target.size());
  out.method = std::string(from.method_string());
  out.path = target.substr(0, question);
  const auto query = parse_form(std::string_view(target).substr(std::min(question + 1, target.size())));
  if (!query) throw ApiError(400, "", "the query cannot be decoded");
  out.query = *query;
  out.host = std::string(from[http::field::host]);
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

}  // namespace

std::string header_of(const HttpRequest& request, std::string_view name) {
  const auto found = request.find(beast::string_view(name.data(), name.size()));
  return found == request.end() ? std::string() : std::string(found->value());
}

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

void Server::admit(const HttpRequest& header) {
  const Target target = target_of(header);
  if (path_of(header) == "/health" && !is_port(target)) return;
  if (!target.sandbox.empty()) {
    const auto record = sandboxes_->find(target.sandbox);
    if (!record) throw ApiError(502, "", "the sandbox was not found: there is none with this id", target.sandbox);
    if (target.port < 0) throw ApiError(400, "", "E2b-Sandbox-Port: expected 1 to 65535");
    if (!is_port(target) && !record->token.empty() &&
        !same_secret(header_of(header, "X-Access-Token"), record->token) &&
        !(path_of(header) == "/files" && is_signed(plain(header).query, std::string(header.method_string()),
                                                   record->token, sandboxes_->seconds_now())))
      throw ApiError(401, "", "X-Access-Token: expected the token that the sandbox was made with");
    return;
  }
  if (!keys_.required() || Templates::is_upload(path_of(header))) return;
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
  if (status == 502 && positive_number(error.code()) > 0) out["port"] = positive_number(error.code());
  return json_reply(status, out);
}

// Clients that go away before it is done change nothing: what was asked for is done.
asio::awaitable<void> Server::on_pool(std::function<void()> act) {
  const auto run = [](std::function<void()> what) -> asio::awaitable<void> {
    what();
    co_return;
  };
  // Without the caller's cancellation: a coroutine that ends on the pool while it is cancelled takes the program with
  // it.
  co_await asio::co_spawn(pool_, run(std::move(act)),
                          asio::bind_cancellation_slot(asio::cancellation_slot(), use_awaitable));
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

void Server::begin(asio::io_context& io) {
  asio::co_spawn(io, watch_times(), asio::detached);
}

void Server::end() {
  pool_.join();        // what is under way is done; its news reaches nobody
  templates_.reset();  // a build that is under way is given up
  sandboxes_.reset();  // and with it everything that could wake a connection
}

Reply Server::answer_envd(sandbox::Sandbox& box, const Request& request) {
  const std::string process = "/process.Process/", filesystem = "/filesystem.Filesystem/";
  if (request.path.starts_with(process)) return answer_process(box, request.path.substr(process.size()), request);
  if (request.path.starts_with(filesystem)) {
    const std::string method = request.path.substr(filesystem.size());
    if (auto reply = watchers_.answer(box, method, request)) return *reply;
    return answer_filesystem(box, method, request);
  }
  if (request.path == "/health") return {204, ""};
  if (request.path == "/files") return answer_files(box, request);
  throw ApiError(501, "", fmt::format("{} is not built here; docs/e2b.md lists what is", request.path.substr(0, 100)));
}

// What goes wrong inside a sandbox, in the form of who asked: the protocol's for calls, HTTP's for files.
Reply Server::answer_inside(const Target& target, const Request& request) {
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
  const bool streams = path == "/process.Process/Start" || path == "/process.Process/Connect" ||
                       path == "/filesystem.Filesystem/WatchDir";
  if (!target.sandbox.empty() && target.port == kEnvdPort && streams && request.method() == http::verb::post)
    co_return co_await stream_events(stream, request, target);
  const Request asked = plain(request);
  Reply reply;
  std::exception_ptr wrong;
  const std::function<void()> act = [&] {
    try {
      reply = !target.sandbox.empty()          ? answer_inside(target, asked)
              : Templates::answers(asked.path) ? templates_->answer(asked)
                                               : answer_control(*sandboxes_, asked);
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
  inner.images = options.images;
  auto sandboxes = std::make_unique<Sandboxes>(std::move(runtime), inner);
  auto templates = std::make_unique<Templates>(*sandboxes, inner);
  Server server(options, std::move(sandboxes), std::move(templates));
  run_http_server(server);
}

}  // namespace tidelock::serve::e2b

#include "serve/serve.hpp"

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <csignal>
#include <thread>

#include "base/base.hpp"
#include "model/chat.hpp"
#include "serve/http.hpp"

namespace tidelock::serve {
namespace {

using asio::use_awaitable;
using asio::ip::tcp;

tcp::acceptor listen(asio::io_context& io, const ServeOptions& options) {
  const std::string address = fmt::format("{}:{}", options.host, options.port);
  boost::system::error_code error;
  const auto host = asio::ip::make_address(options.host, error);
  if (error)
    throw Error(ErrorCode::invalid_argument, fmt::format("host {}: expected an IP address", options.host),
                "127.0.0.1 for this machine alone, 0.0.0.0 for all");
  tcp::acceptor acceptor(io);
  const tcp::endpoint endpoint(host, options.port);
  acceptor.open(endpoint.protocol(), error);
  if (!error) acceptor.set_option(tcp::acceptor::reuse_address(true), error);
  if (!error) acceptor.bind(endpoint, error);
  if (!error) acceptor.listen(asio::socket_base::max_listen_connections, error);
  if (error) fail(ErrorCode::io, "cannot listen on {}: {}", address, error.message());
  return acceptor;
}

// Too many connections: told so, and no more.
asio::awaitable<void> turn_away(Service& service, Stream stream) {
  service.metrics.count_refused_connection();
  try {
    HttpRequest none;
    none.version(11);
    const Reply reply = error_reply(ApiError(503, "too_many_connections", "try again later"));
    co_await send_reply(service, stream, none, reply, true);
    co_await linger(stream);
  } catch (const boost::system::system_error&) {  // it went already
  }
}

asio::awaitable<void> accept_all(Service& service, asio::io_context& io, tcp::acceptor& acceptor) {
  while (true) {
    boost::system::error_code error;
    // Each connection on a strand: its coroutine, its timers and the engine's wake-ups never run at once.
    const asio::any_io_executor strand = asio::make_strand(io);
    asio::basic_stream_socket<tcp, asio::any_io_executor> socket(strand);
    co_await acceptor.async_accept(socket, asio::redirect_error(use_awaitable, error));
    if (error == asio::error::operation_aborted) co_return;
    if (error) {  // out of descriptors, or a client that left at once
      spdlog::warn("accept: {}", error.message());
      asio::steady_timer pause(io, std::chrono::milliseconds(50));
      co_await pause.async_wait(use_awaitable);
      continue;
    }
    socket.set_option(tcp::no_delay(true), error);
    const bool full = service.metrics.open_connections() >= service.options.connections;
    asio::co_spawn(strand, (full ? turn_away : run_session)(service, Stream(std::move(socket))), asio::detached);
  }
}

RequestContext context_of(const model::Model& model, const model::Tokenizer& tokenizer, const ServeOptions& options,
                          std::int64_t longest) {
  RequestContext context{tokenizer, options.model_id};
  context.context = longest;
  if (longest < model.config().max_context)
    spdlog::warn("state memory of {} holds sequences of {} tokens; the model could take {}",
                 bytes_text(options.state_bytes), longest, model.config().max_context);
  context.vocab = model.config().vocab;
  context.end_tokens = model.config().end_tokens;
  context.reasoning_effort = options.reasoning_effort;
  if (options.reasoning_effort != "none" && !model::can_think(tokenizer))
    fail(ErrorCode::invalid_argument, "reasoning effort {}: {} has no tokens for reasoning", options.reasoning_effort,
         tokenizer.name());
  return context;
}

}  // namespace

void serve(const model::Model& model, const model::Tokenizer& tokenizer, std::shared_ptr<const model::Adapter> adapter,
           Team& team, const ServeOptions& options) {
  ServerMetrics metrics;
  EngineLoop engine(model, team, std::move(adapter),
                    {options.sequences, options.queue, options.state_bytes, options.reuse});
  if (engine.longest_sequence() < 1)
    fail(ErrorCode::invalid_argument, "state memory of {} holds no sequence of this model",
         bytes_text(options.state_bytes));
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  Service service{options,
                  context_of(model, tokenizer, options, engine.longest_sequence()),
                  options.keys.empty() ? Keys() : Keys::load(options.keys),
                  engine,
                  metrics,
                  std::chrono::duration_cast<std::chrono::seconds>(now).count()};
  asio::io_context io;
  tcp::acceptor acceptor = listen(io, options);
  asio::signal_set signals(io, SIGINT, SIGTERM);
  signals.async_wait([&io](const boost::system::error_code&, int) { io.stop(); });
  asio::co_spawn(io, accept_all(service, io, acceptor), asio::detached);
  if (options.listening) options.listening(acceptor.local_endpoint().port());
  std::vector<std::jthread> threads;
  for (int i = 1; i < options.http_threads; ++i) threads.emplace_back([&io] { io.run(); });
  io.run();
  threads.clear();
  engine.stop();  // before `io` goes: what it would wake lives there
}

}  // namespace tidelock::serve

#include "serve/serve.hpp"

#include "base/base.hpp"
#include "model/chat.hpp"
#include "serve/service.hpp"

namespace tidelock::serve {
namespace {

void check_content_type(const HttpRequest& request) {
  if (request.method() != http::verb::post) return;
  const std::string type(request[http::field::content_type]);
  if (!type.starts_with("application/json"))
    throw ApiError(415, "unsupported_media_type",
                   fmt::format("the content type is \"{}\", expected application/json", type.substr(0, 80)));
}

RequestContext context_of(const model::Model& model, const model::Tokenizer& tokenizer, const Adapters& adapters,
                          const ServeOptions& options, std::int64_t longest) {
  RequestContext context{tokenizer, adapters};
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

// Without a key no body is read.
void Service::admit(const HttpRequest& header) {
  if (path_of(header) == "/health") return;
  const std::string authorization(header[http::field::authorization]);
  if (!is_administration(header)) return keys.check(authorization);
  if (!admin_keys.required())
    throw ApiError(403, "administration_off",
                   "this server is not administered: it was started without --admin-keys FILE");
  admin_keys.check(authorization);
}

asio::awaitable<bool> Service::answer(Stream& stream, const HttpRequest& request) {
  check_content_type(request);
  const Route route = route_of(request);
  if (route == Route::other) {
    const Reply reply = answer_simple(*this, request);
    co_await send_reply(*this, stream, request, reply, false);
    co_return request.keep_alive();
  }
  const Keys::Ticket ticket = keys.enter(std::string(request[http::field::authorization]));
  const bool there = co_await generate(*this, stream, request, route == Route::chat, ticket.tenant());
  if (!there) metrics.count_response(metric_path(request), 499);  // nobody is told: the client is gone
  co_return there&& request.keep_alive();
}

Reply Service::refusal(const ApiError& error) {
  return error_reply(error);
}

void Service::count_response(const HttpRequest& request, int status) {
  metrics.count_response(metric_path(request), status);
}

void serve(const model::Model& model, const model::Tokenizer& tokenizer, std::shared_ptr<const model::Adapter> adapter,
           Team& team, const ServeOptions& options) {
  ServerMetrics metrics;
  Adapters adapters(model, options.model_id, std::move(adapter), options.adapters);
  EngineLoop engine(model, team,
                    {.running = options.sequences,
                     .waiting = options.queue,
                     .engine = {.step_seconds = options.step_seconds,
                                .state_limit = options.state_bytes,
                                .reuse = options.reuse,
                                .disk_folder = options.state_folder,
                                .disk_limit = options.state_disk_bytes},
                     .first_token_seconds = options.first_token_seconds,
                     .events = options.event_log.empty() ? nullptr : std::make_shared<EventLog>(options.event_log)});
  if (engine.longest_sequence() < 1)
    fail(ErrorCode::invalid_argument, "state memory of {} holds no sequence of this model",
         bytes_text(options.state_bytes));
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  Service service(options, context_of(model, tokenizer, adapters, options, engine.longest_sequence()), adapters, engine,
                  metrics, std::chrono::duration_cast<std::chrono::seconds>(now).count());
  run_http_server(service);
}

}  // namespace tidelock::serve

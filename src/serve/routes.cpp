// Which path does what, but for generations.
#include "model/json.hpp"
#include "serve/fields.hpp"
#include "serve/service.hpp"

namespace tidelock::serve {
namespace {

using model::Json;

Json model_entry(const Service& service, const std::string& name, const Weights& weights) {
  Json entry = {{"id", name},
                {"object", "model"},
                {"created", service.started},
                {"owned_by", "tidelock"},
                {"max_model_len", service.context.context},
                {"weight_version", weights.version}};
  if (name != service.adapters.base()) entry["parent"] = service.adapters.base();
  if (!weights.sha256.empty()) entry["adapter_sha256"] = weights.sha256;
  return entry;
}

Reply list_models(Service& service, const HttpRequest&) {
  Json data = Json::array();
  for (const std::string& name : service.adapters.names())
    if (const auto weights = service.adapters.find(name)) data.push_back(model_entry(service, name, *weights));
  return {200, Json{{"object", "list"}, {"data", data}}.dump()};
}
Reply health(Service&, const HttpRequest&) {
  return {200, R"({"status":"ok"})"};
}
Reply metrics(Service& service, const HttpRequest&) {
  return {200, service.metrics.text(service.engine.counters()), "text/plain; version=0.0.4; charset=utf-8"};
}
Reply tokenize_route(Service& service, const HttpRequest& request) {
  return {200, tokenize(request.body(), service.context)};
}
Reply detokenize_route(Service& service, const HttpRequest& request) {
  return {200, detokenize(request.body(), service.context)};
}

// The body is that of the request to come.
Reply prefetch_route(Service& service, const HttpRequest& request) {
  const Keys::Ticket ticket = service.keys.enter(std::string(request[http::field::authorization]));
  const bool chat = parse_body(request.body()).contains("messages");
  GenerateRequest coming = chat ? read_chat_request(request.body(), service.context)
                                : read_completion_request(request.body(), service.context);
  Wanted wanted{
      std::move(coming.prompt), {}, tenant_salt(ticket.tenant(), coming.cache_salt), 0, coming.weights.adapter};
  const std::int64_t tokens = std::ssize(wanted.prompt);
  const auto found = service.engine.prefetch(std::move(wanted));
  return {200, Json{{"object", "prefetch"},
                    {"prompt_tokens", tokens},
                    {"ready_tokens", found.ready},
                    {"coming_tokens", found.coming}}
                   .dump()};
}

struct RouteEntry {
  const char* path;
  http::verb verb;
  Reply (*answer)(Service&, const HttpRequest&);  // null: a generation
  bool administration = false;
};
constexpr RouteEntry kRoutes[] = {
    {"/v1/chat/completions", http::verb::post, nullptr},
    {"/v1/completions", http::verb::post, nullptr},
    {"/v1/models", http::verb::get, list_models},
    {"/v1/prefetch", http::verb::post, prefetch_route},
    {"/health", http::verb::get, health},
    {"/metrics", http::verb::get, metrics},
    {"/tokenize", http::verb::post, tokenize_route},
    {"/detokenize", http::verb::post, detokenize_route},
    {"/v1/load_lora_adapter", http::verb::post, load_adapter_route, true},
    {"/v1/unload_lora_adapter", http::verb::post, unload_adapter_route, true},
    {"/pause", http::verb::post, pause_route, true},
    {"/pause", http::verb::get, pause_status_route, true},
    {"/resume", http::verb::post, resume_route, true},
    {"/sleep", http::verb::post, sleep_route, true},
    {"/wake_up", http::verb::post, resume_route, true},
    {"/is_sleeping", http::verb::get, sleep_status_route, true},
    {"/reset_prefix_cache", http::verb::post, forget_route, true},
};

// With this verb, if there is one.
const RouteEntry* find(const std::string& path, http::verb verb) {
  const RouteEntry* other = nullptr;
  for (const RouteEntry& route : kRoutes) {
    if (path != route.path) continue;
    if (route.verb == verb) return &route;
    other = &route;
  }
  return other;
}

}  // namespace

Reply error_reply(const ApiError& error) {
  Reply reply{error.status(), error.json()};
  reply.retry_after = error.retry_after;
  return reply;
}

// What a path is called in the metrics: unknown ones share a name, so that nobody can fill the table.
std::string metric_path(const HttpRequest& request) {
  const std::string path = path_of(request);
  if (path.starts_with("/v1/models/")) return "/v1/models/{id}";
  return find(path, request.method()) != nullptr ? path : "other";
}

bool is_administration(const HttpRequest& request) {
  const RouteEntry* route = find(path_of(request), request.method());
  return route != nullptr && route->administration;
}

Route route_of(const HttpRequest& request) {
  const std::string path = path_of(request);
  if (request.method() != http::verb::post) return Route::other;
  return path == "/v1/chat/completions" ? Route::chat : path == "/v1/completions" ? Route::completions : Route::other;
}

Reply answer_simple(Service& service, const HttpRequest& request) {
  const std::string path = path_of(request);
  const std::string model_prefix = "/v1/models/";
  if (path.starts_with(model_prefix) && request.method() == http::verb::get) {
    const std::string name = path.substr(model_prefix.size());
    const auto weights = service.adapters.find(name);
    if (!weights)
      throw ApiError(404, "model_not_found", "this server has the model " + service.adapters.base(), "model");
    return {200, model_entry(service, name, *weights).dump()};
  }
  const RouteEntry* route = find(path, request.method());
  if (route == nullptr) {
    std::string known;
    for (const RouteEntry& entry : kRoutes)
      if (!entry.administration) known += fmt::format("{}{}", known.empty() ? "" : ", ", entry.path);
    throw ApiError(404, "not_found", fmt::format("there is no such path; this server has {}", known));
  }
  if (route->verb != request.method()) {
    const std::string verb(http::to_string(route->verb));
    Reply reply = error_reply(ApiError(405, "method_not_allowed", fmt::format("{} takes {} alone", path, verb)));
    reply.allow = verb;
    return reply;
  }
  return route->answer(service, request);
}

}  // namespace tidelock::serve

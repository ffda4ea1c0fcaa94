// Which path does what, but for generations.
#include "model/json.hpp"
#include "serve/service.hpp"

namespace tidelock::serve {
namespace {

using model::Json;

Json model_entry(const Service& service) {
  return {{"id", service.context.model_id},
          {"object", "model"},
          {"created", service.started},
          {"owned_by", "tidelock"},
          {"max_model_len", service.context.context}};
}

Reply list_models(Service& service, const HttpRequest&) {
  return {200, Json{{"object", "list"}, {"data", Json::array({model_entry(service)})}}.dump()};
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

struct RouteEntry {
  const char* path;
  http::verb verb;
  Reply (*answer)(Service&, const HttpRequest&);  // null: a generation
};
constexpr RouteEntry kRoutes[] = {
    {"/v1/chat/completions", http::verb::post, nullptr},
    {"/v1/completions", http::verb::post, nullptr},
    {"/v1/models", http::verb::get, list_models},
    {"/health", http::verb::get, health},
    {"/metrics", http::verb::get, metrics},
    {"/tokenize", http::verb::post, tokenize_route},
    {"/detokenize", http::verb::post, detokenize_route},
};

const RouteEntry* find(const std::string& path) {
  for (const RouteEntry& route : kRoutes)
    if (path == route.path) return &route;
  return nullptr;
}

}  // namespace

Reply error_reply(const ApiError& error) {
  return {error.status(), error.json()};
}

// What a path is called in the metrics: unknown ones share a name, so that nobody can fill the table.
std::string metric_path(const HttpRequest& request) {
  const std::string path = path_of(request);
  if (path.starts_with("/v1/models/")) return "/v1/models/{id}";
  return find(path) != nullptr ? path : "other";
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
    if (path.substr(model_prefix.size()) != service.context.model_id)
      throw ApiError(404, "model_not_found", "this server has the model " + service.context.model_id, "model");
    return {200, model_entry(service).dump()};
  }
  const RouteEntry* route = find(path);
  if (route == nullptr) {
    std::string known;
    for (const RouteEntry& entry : kRoutes) known += fmt::format("{}{}", known.empty() ? "" : ", ", entry.path);
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

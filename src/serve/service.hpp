// What the routes of the OpenAI API share. Private to serve/. Include from .cpp files only, as http.hpp.
#pragma once

#include "serve/adapters.hpp"
#include "serve/engine_loop.hpp"
#include "serve/http.hpp"
#include "serve/keys.hpp"
#include "serve/metrics.hpp"
#include "serve/request.hpp"
#include "serve/serve.hpp"

namespace tidelock::serve {

// All that answering a request needs. Lives as long as the server.
struct Service : HttpHandler {
  Service(const ServeOptions& o, RequestContext c, Adapters& a, EngineLoop& e, ServerMetrics& m, std::int64_t now)
      : HttpHandler(o), options(o), context(std::move(c)), adapters(a), engine(e), metrics(m), started(now) {
    if (!o.keys.empty()) keys = Keys::load(o.keys);
    if (!o.admin_keys.empty()) admin_keys = Keys::load(o.admin_keys);
  }
  void admit(const HttpRequest& header) override;
  asio::awaitable<bool> answer(Stream& stream, const HttpRequest& request) override;
  Reply refusal(const ApiError& error) override;
  void end() override { engine.stop(); }
  void count_response(const HttpRequest& request, int status) override;
  void count_connection(int change) override { metrics.connections(change); }
  int open_connections() const override { return metrics.open_connections(); }
  void count_refused_connection() override { metrics.count_refused_connection(); }

  const ServeOptions& options;
  RequestContext context;
  Keys keys;
  Keys admin_keys;  // none required: administration is off
  Adapters& adapters;
  EngineLoop& engine;
  ServerMetrics& metrics;
  std::int64_t started = 0;  // seconds since 1970
};

Reply error_reply(const ApiError& error);

// As path_of, for metrics: one name for all unknown paths.
std::string metric_path(const HttpRequest& request);
enum class Route { chat, completions, other };
Route route_of(const HttpRequest& request);
// Everything but generations. Throws ApiError.
Reply answer_simple(Service& service, const HttpRequest& request);

// administration.cpp
Reply load_adapter_route(Service& service, const HttpRequest& request);
Reply unload_adapter_route(Service& service, const HttpRequest& request);
Reply pause_route(Service& service, const HttpRequest& request);
Reply pause_status_route(Service& service, const HttpRequest& request);
Reply resume_route(Service& service, const HttpRequest& request);
Reply sleep_route(Service& service, const HttpRequest& request);
Reply sleep_status_route(Service& service, const HttpRequest& request);
Reply forget_route(Service& service, const HttpRequest& request);
bool is_administration(const HttpRequest& request);

// What keeps a tenant's states apart from those of others, and its own salts apart from each other.
std::string tenant_salt(const std::string& tenant, const std::string& salt);

// A generation from its request to its last byte. False when the client went away. Throws ApiError before anything was
// sent. `tenant`: the key's name; states of sequences are reused within one tenant only.
asio::awaitable<bool> generate(Service& service, Stream& stream, const HttpRequest& request, bool chat,
                               const std::string& tenant);

}  // namespace tidelock::serve

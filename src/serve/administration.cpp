// What an administrator asks for: adapters, pauses, a clean slate.
#include "serve/fields.hpp"
#include "serve/service.hpp"

namespace tidelock::serve {
namespace {

Reply pause_status(Service& service) {
  const EngineLoopCounters counters = service.engine.counters();
  return {200, Json{{"paused", counters.paused}, {"running", counters.running}, {"waiting", counters.waiting}}.dump()};
}

}  // namespace

Reply load_adapter_route(Service& service, const HttpRequest& request) {
  const Json body = parse_body(request.body());
  Fields fields(body, "");
  const std::string name = fields.require_text("lora_name"), path = fields.text("lora_path").value_or(name);
  fields.finish();
  const Weights weights = service.adapters.load(name, path);
  return {200, Json{{"id", name}, {"weight_version", weights.version}, {"sha256", weights.sha256}}.dump()};
}

Reply unload_adapter_route(Service& service, const HttpRequest& request) {
  const Json body = parse_body(request.body());
  Fields fields(body, "");
  const std::string name = fields.require_text("lora_name");
  fields.finish();
  service.adapters.unload(name);
  return {200, Json{{"id", name}}.dump()};
}

Reply pause_route(Service& service, const HttpRequest& request) {
  const Json body = request.body().empty() ? Json::object() : parse_body(request.body());
  Fields fields(body, "");
  const std::string mode = fields.choice("mode", {"abort", "wait", "keep"}).value_or("wait");
  fields.finish();
  service.engine.pause(mode == "abort" ? Pause::abort : mode == "keep" ? Pause::keep : Pause::wait);
  return pause_status(service);
}

Reply pause_status_route(Service& service, const HttpRequest&) {
  return pause_status(service);
}

Reply resume_route(Service& service, const HttpRequest&) {
  service.engine.resume();
  return pause_status(service);
}

Reply sleep_route(Service& service, const HttpRequest& request) {
  const Json body = request.body().empty() ? Json::object() : parse_body(request.body());
  Fields fields(body, "");
  const std::string mode = fields.choice("mode", {"abort", "wait"}).value_or("wait");
  fields.finish();
  service.engine.sleep(mode == "abort" ? Pause::abort : Pause::wait);
  return sleep_status_route(service, request);
}

Reply sleep_status_route(Service& service, const HttpRequest&) {
  const EngineLoopCounters counters = service.engine.counters();
  return {200,
          Json{{"is_sleeping", counters.asleep}, {"running", counters.running}, {"waiting", counters.waiting}}.dump()};
}

Reply forget_route(Service& service, const HttpRequest&) {
  service.engine.forget();
  return {200, R"({"status":"ok"})"};
}

}  // namespace tidelock::serve

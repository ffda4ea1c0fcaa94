#include "serve/e2b/connect.hpp"

#include <charconv>
#include <cstring>
#include <map>

#include "model/json.hpp"
#include "serve/api_error.hpp"
#include "serve/e2b/text.hpp"

namespace tidelock::serve::e2b {

int RpcError::status() const {
  static const std::map<std::string, int> statuses{
      {"canceled", 499},       {"invalid_argument", 400},    {"deadline_exceeded", 504}, {"not_found", 404},
      {"already_exists", 409}, {"permission_denied", 403},   {"unauthenticated", 401},   {"resource_exhausted", 429},
      {"unimplemented", 501},  {"failed_precondition", 400}, {"unavailable", 503}};
  const auto found = statuses.find(code_);
  return found == statuses.end() ? 500 : found->second;
}

RpcError to_rpc_error(const Error& error) {
  switch (error.code()) {
    case ErrorCode::invalid_argument:
      return {"invalid_argument", error.what()};
    case ErrorCode::not_found:
      return {"not_found", error.what()};
    case ErrorCode::not_supported:
      return {"unimplemented", error.what()};
    case ErrorCode::exhausted:
      return {"resource_exhausted", error.what()};
    case ErrorCode::mismatch:
      return {"already_exists", error.what()};
    case ErrorCode::io:
      return {"unavailable", error.what()};
    default:
      return {"internal", error.what()};
  }
}

Json error_json(const RpcError& error) {
  return {{"code", error.code()}, {"message", error.what()}};
}

Reply rpc_refusal(const RpcError& error) {
  return json_reply(error.status(), error_json(error));
}

Reply json_reply(int status, const Json& json) {
  return {status, json.dump(-1, ' ', false, Json::error_handler_t::replace)};
}

Json parse_object(const std::string& body, std::size_t most_bytes) {
  try {
    Json out = model::parse_json(body, "the body", {.bytes = most_bytes, .depth = 16});
    if (out.is_object()) return out;
  } catch (const Error& error) {
    throw ApiError(400, "", error.what());
  }
  throw ApiError(400, "", "the body is not a JSON object");
}

Json parse_message(std::string_view body) {
  Json out;
  try {
    out = model::parse_json(body, "the message", {.bytes = std::size_t{256} << 20, .depth = 32});
  } catch (const Error& error) {
    throw RpcError("invalid_argument", error.what());
  }
  if (!out.is_object()) throw RpcError("invalid_argument", "the message is not a JSON object");
  return out;
}

std::string envelope(const Json& message, char flags) {
  const std::string body = message.dump(-1, ' ', false, Json::error_handler_t::replace);
  std::string out(1, flags);
  for (int shift = 24; shift >= 0; shift -= 8) out.push_back(static_cast<char>(body.size() >> shift));
  return out + body;
}

Json open_envelope(std::string_view body) {
  std::size_t length = 0;
  for (std::size_t i = 1; i < 5 && i < body.size(); ++i) length = length << 8 | static_cast<unsigned char>(body[i]);
  if (body.size() < 5 || body.size() - 5 != length)
    throw RpcError("invalid_argument", fmt::format("expected one envelope, found {} bytes that are not", body.size()));
  if (body[0] != 0)
    throw RpcError("unimplemented", fmt::format("an envelope with flags {}; only uncompressed ones are read",
                                                static_cast<int>(body[0])));
  return parse_message(body.substr(5));
}

std::int64_t parse_timeout(std::string_view text) {
  std::int64_t out = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  if (text.empty()) return 0;
  if (error != std::errc() || end != text.data() + text.size() || out < 0 || text.size() > 10)
    throw RpcError("invalid_argument", "Connect-Timeout-Ms: expected up to ten digits");
  return out;
}

Json start_event(int pid) {
  return {{"event", {{"start", {{"pid", pid}}}}}};
}

Json keepalive_event() {
  return {{"event", {{"keepalive", Json::object()}}}};
}

Json process_event(const sandbox::ProcessEvent& event) {
  using Kind = sandbox::ProcessEvent::Kind;
  if (event.kind != Kind::ended) {
    const char* from = event.kind == Kind::output ? "stdout" : event.kind == Kind::error ? "stderr" : "pty";
    return {{"event", {{"data", {{from, base64(event.bytes)}}}}}};
  }
  const bool by_signal = event.signal != 0;
  const std::string status =
      by_signal ? fmt::format("signal: {}", strsignal(event.signal)) : fmt::format("exit status {}", event.exit_code);
  Json end{{"exitCode", by_signal ? -1 : event.exit_code}, {"exited", !by_signal}, {"status", status}};
  if (by_signal || event.exit_code != 0) end["error"] = status;
  return {{"event", {{"end", end}}}};
}

}  // namespace tidelock::serve::e2b

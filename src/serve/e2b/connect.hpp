// The Connect protocol as envd's clients speak it: JSON, unary or as a stream of envelopes. Pure. Private to serve/e2b.
#pragma once

#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>

#include "base/error.hpp"
#include "sandbox/sandbox.hpp"
#include "serve/reply.hpp"

namespace tidelock::serve::e2b {

using Json = nlohmann::json;

// What a call fails with: a code of the protocol ("not_found", ...) and a message.
class RpcError : public std::runtime_error {
 public:
  RpcError(std::string code, const std::string& message) : std::runtime_error(message), code_(std::move(code)) {}
  const std::string& code() const { return code_; }
  int status() const;  // of a unary answer

 private:
  std::string code_;
};
RpcError to_rpc_error(const Error& error);

Json error_json(const RpcError& error);
Reply rpc_refusal(const RpcError& error);  // of a unary call

Reply json_reply(int status, const Json& json);

// The object that a body of the control plane must be. Throws ApiError{400}.
Json parse_object(const std::string& body, std::size_t most_bytes);
// The object that a call's body must be. Throws RpcError{invalid_argument}.
Json parse_message(std::string_view body);

// An envelope: one byte of flags, the length in four bytes (big-endian), JSON.
constexpr char kEndOfStream = 2;
std::string envelope(const Json& message, char flags = 0);
// The one message of a request. Throws RpcError{invalid_argument} for anything else.
Json open_envelope(std::string_view body);

// "Connect-Timeout-Ms": milliseconds, 0 when there is none. Throws RpcError{invalid_argument}.
std::int64_t parse_timeout(std::string_view text);

// Process events as messages of the streams Start and Connect.
Json start_event(int pid);
Json keepalive_event();
Json process_event(const sandbox::ProcessEvent& event);  // not of lost

}  // namespace tidelock::serve::e2b

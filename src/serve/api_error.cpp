#include "serve/api_error.hpp"

#include "model/json.hpp"

namespace tidelock::serve {

std::string ApiError::json() const {
  const char* type = status_ == 401   ? "authentication_error"
                     : status_ == 429 ? "rate_limit_error"
                     : status_ >= 500 ? "server_error"
                                      : "invalid_request_error";
  model::Json error = {{"message", what()}, {"type", type}, {"param", nullptr}, {"code", code_}};
  if (!param_.empty()) error["param"] = param_;
  return model::Json{{"error", error}}.dump(-1, ' ', false, model::Json::error_handler_t::replace);
}

ApiError to_api_error(const Error& error, const std::string& param) {
  switch (error.code()) {
    case ErrorCode::invalid_argument:
      return {400, "invalid_value", error.what(), param};
    case ErrorCode::not_supported:
      return {400, "unsupported_value", error.what(), param};
    case ErrorCode::not_found:
      return {404, "not_found", error.what(), param};
    case ErrorCode::exhausted:
      return {429, "server_busy", error.what(), param};
    default:
      return {500, "internal_error", "the server failed on this request; its log says why"};
  }
}

}  // namespace tidelock::serve

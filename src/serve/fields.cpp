#include "serve/fields.hpp"

namespace tidelock::serve {

std::string shown(const Json& value) {
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (text.size() > 80) text = text.substr(0, 77) + "...";
  return text;
}

Json parse_body(std::string_view body) {
  try {
    return model::parse_json(body, "the body", {.code = ErrorCode::invalid_argument});
  } catch (const Error& error) {
    throw ApiError(400, "invalid_json", error.what());
  }
}

Fields::Fields(const Json& object, std::string path) : object_(object), path_(std::move(path)) {
  if (!object.is_object())
    throw ApiError(400, "invalid_type",
                   fmt::format("{} is {}, expected a JSON object", path_.empty() ? "the body" : path_, shown(object)),
                   path_);
}

std::string Fields::path_of(std::string_view name) const {
  return path_.empty() ? std::string(name) : fmt::format("{}.{}", path_, name);
}

void Fields::refuse(std::string_view name, const std::string& expected, const Json& found) const {
  throw ApiError(400, "invalid_value", fmt::format("{} is {}, expected {}", path_of(name), shown(found), expected),
                 path_of(name));
}

const Json* Fields::find(std::string_view name) {
  known_.insert(std::string(name));
  const auto found = object_.find(name);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

const Json& Fields::require(std::string_view name) {
  const Json* value = find(name);
  if (value == nullptr)
    throw ApiError(400, "missing_required_parameter", fmt::format("{} is missing", path_of(name)), path_of(name));
  return *value;
}

std::optional<bool> Fields::flag(std::string_view name) {
  const Json* value = find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_boolean()) refuse(name, "true or false", *value);
  return value->get<bool>();
}

std::optional<std::string> Fields::text(std::string_view name) {
  const Json* value = find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string()) refuse(name, "a string", *value);
  return value->get<std::string>();
}

std::string Fields::require_text(std::string_view name) {
  require(name);
  return *text(name);
}

std::optional<std::int64_t> Fields::integer(std::string_view name, std::int64_t low, std::int64_t high) {
  const Json* value = find(name);
  if (value == nullptr) return std::nullopt;
  const bool small =
      value->is_number_integer() &&
      (!value->is_number_unsigned() || value->get<std::uint64_t>() <= static_cast<std::uint64_t>(INT64_MAX));
  if (!small || value->get<std::int64_t>() < low || value->get<std::int64_t>() > high)
    refuse(name, fmt::format("a whole number from {} to {}", low, high), *value);
  return value->get<std::int64_t>();
}

std::optional<double> Fields::number(std::string_view name, double low, double high) {
  const Json* value = find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number() || !(value->get<double>() >= low) || !(value->get<double>() <= high))
    refuse(name, fmt::format("a number from {} to {}", low, high), *value);
  return value->get<double>();
}

std::optional<std::string> Fields::choice(std::string_view name, const std::vector<std::string>& allowed) {
  const Json* value = find(name);
  if (value == nullptr) return std::nullopt;
  std::string list;
  for (const std::string& one : allowed) {
    if (*value == one) return one;
    list += fmt::format("{}\"{}\"", list.empty() ? "" : ", ", one);
  }
  refuse(name, "one of " + list, *value);
}

void Fields::only(std::string_view name, const Json& neutral, const std::string& why) {
  const Json* value = find(name);
  if (value == nullptr || *value == neutral) return;
  throw ApiError(400, "unsupported_parameter",
                 fmt::format("{} is {}: {}; only {} is accepted", path_of(name), shown(*value), why, neutral.dump()),
                 path_of(name));
}

void Fields::finish() const {
  for (const auto& [name, value] : object_.items())
    if (!value.is_null() && !known_.contains(name))
      throw ApiError(400, "unsupported_parameter", fmt::format("{} is not supported", path_of(name)), path_of(name));
}

}  // namespace tidelock::serve

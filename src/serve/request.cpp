#include "serve/request.hpp"

#include <algorithm>
#include <random>

#include "base/base.hpp"
#include "serve/messages.hpp"
#include "serve/text_stream.hpp"

namespace tidelock::serve {
namespace {

constexpr std::size_t kStopStrings = 16, kStopBytes = 256, kLongestSalt = 256;

// The weights that the request names.
Weights read_model(Fields& fields, const RequestContext& context, std::string* named = nullptr) {
  const std::string name = fields.require_text("model");
  const auto weights = context.adapters.find(name);
  if (!weights) {
    std::string known;
    for (const std::string& other : context.adapters.names()) known += (known.empty() ? "" : ", ") + shown(other);
    throw ApiError(404, "model_not_found", fmt::format("model is {}, and this server has {}", shown(name), known),
                   "model");
  }
  if (named != nullptr) *named = name;
  return *weights;
}

std::vector<std::string> read_stop(Fields& fields) {
  const Json* value = fields.find("stop");
  if (value == nullptr) return {};
  const Json list = value->is_array() ? *value : Json::array({*value});
  std::vector<std::string> stops;
  for (const Json& stop : list) {
    if (!stop.is_string() || stop.get_ref<const std::string&>().empty() ||
        stop.get_ref<const std::string&>().size() > kStopBytes)
      fields.refuse("stop", fmt::format("a string or a list of strings of 1 to {} bytes", kStopBytes), *value);
    stops.push_back(stop.get<std::string>());
  }
  if (stops.size() > kStopStrings) fields.refuse("stop", fmt::format("at most {} strings", kStopStrings), *value);
  return stops;
}

std::vector<std::int32_t> read_ids(const Fields& fields, std::string_view name, const Json& list, std::int64_t vocab) {
  std::vector<std::int32_t> ids;
  for (const Json& id : list) {
    const bool good = id.is_number_integer() && id >= 0 && id < vocab;
    if (!good) fields.refuse(name, fmt::format("token ids from 0 to {}", vocab - 1), id);
    ids.push_back(id.get<std::int32_t>());
  }
  return ids;
}

// Two requests without a seed must not say the same.
std::uint64_t fresh_seed() {
  thread_local std::random_device device;
  return (static_cast<std::uint64_t>(device()) << 32) | device();
}

// What both kinds of request share, but for the prompt and max_tokens' name.
void read_sampling(Fields& fields, const RequestContext& context, std::optional<std::int64_t> max_tokens,
                   GenerateRequest& request) {
  const auto size = static_cast<std::int64_t>(request.prompt.size());
  if (size >= context.context)
    throw ApiError(400, "context_length_exceeded",
                   fmt::format("the prompt has {} tokens, and the model's context is {}", size, context.context),
                   request.chat ? "messages" : "prompt");
  if (max_tokens && size + *max_tokens > context.context)
    throw ApiError(400, "context_length_exceeded",
                   fmt::format("the prompt's {} tokens and max_tokens {} are more than the model's context of {}", size,
                               *max_tokens, context.context),
                   "max_tokens");
  engine::SamplingParams params;
  params.max_tokens = max_tokens.value_or(context.context - size);
  params.temperature = static_cast<float>(fields.number("temperature", 0, 2).value_or(1));
  const Json* top_p = fields.find("top_p");
  params.top_p = static_cast<float>(fields.number("top_p", 0, 1).value_or(1));
  if (!(params.top_p > 0)) fields.refuse("top_p", "a number above 0, at most 1", *top_p);
  params.top_k = static_cast<int>(fields.integer("top_k", 0, INT32_MAX).value_or(0));
  params.top_logprobs = request.top_logprobs;
  params.stop_tokens = context.end_tokens;
  if (request.chat) params.stop_tokens.push_back(model::end_of_turn(context.tokenizer));
  if (const Json* ids = fields.find("stop_token_ids"); ids != nullptr) {
    if (!ids->is_array() || ids->size() > 64) fields.refuse("stop_token_ids", "a list of at most 64 token ids", *ids);
    const auto more = read_ids(fields, "stop_token_ids", *ids, context.vocab);
    params.stop_tokens.insert(params.stop_tokens.end(), more.begin(), more.end());
  }
  const auto seed = fields.integer("seed", INT64_MIN, INT64_MAX);
  const std::uint64_t first = seed ? static_cast<std::uint64_t>(*seed) : fresh_seed();
  const auto n = fields.integer("n", 1, static_cast<std::int64_t>(context.max_choices)).value_or(1);
  for (std::int64_t i = 0; i < n; ++i) {
    params.seed = i == 0 ? first : mix_seed(first, static_cast<std::uint64_t>(i));
    request.choices.push_back(params);
  }
  request.stop = read_stop(fields);
  if (!request.stop.empty() && !context.tokenizer.has_text())
    fields.refuse("stop", "stop_token_ids: this model has no tokenizer", *fields.find("stop"));
  request.stream = fields.flag("stream").value_or(false);
  if (const Json* options = fields.find("stream_options"); options != nullptr) {
    if (!request.stream) fields.refuse("stream_options", "nothing unless stream is true", *options);
    Fields inner(*options, "stream_options");
    request.include_usage = inner.flag("include_usage").value_or(false);
    inner.only("include_obfuscation", false, "chunks are not padded");
    inner.finish();
  }
  request.token_ids = fields.flag("return_token_ids").value_or(false);
  if (const auto salt = fields.text("cache_salt"); salt) {
    if (salt->size() > kLongestSalt) fields.refuse("cache_salt", "at most 256 bytes", *fields.find("cache_salt"));
    request.cache_salt = *salt;
  }
  request.priority = static_cast<int>(fields.integer("priority", -1000, 1000).value_or(0));
  fields.only("frequency_penalty", 0, "there are no penalties");
  fields.only("presence_penalty", 0, "there are no penalties");
  fields.only("logit_bias", Json::object(), "there is no bias");
}

std::vector<std::int32_t> read_prompt(Fields& fields, const RequestContext& context) {
  const Json* prompt = &fields.require("prompt");
  // A list of prompts with one in it is that one.
  if (prompt->is_array() && prompt->size() == 1 && ((*prompt)[0].is_string() || (*prompt)[0].is_array()))
    prompt = &(*prompt)[0];
  std::vector<std::int32_t> ids;
  if (prompt->is_string()) {
    ids = context.tokenizer.encode_text(prompt->get_ref<const std::string&>());
  } else if (prompt->is_array() && (prompt->empty() || (*prompt)[0].is_number())) {
    ids = read_ids(fields, "prompt", *prompt, context.vocab);
  } else {
    fields.refuse("prompt", "a string or a list of token ids; one prompt in each request", *prompt);
  }
  if (ids.empty()) fields.refuse("prompt", "one token or more", *prompt);
  return ids;
}

template <typename Body>
auto telling_errors(Body&& body) {
  try {
    return body();
  } catch (const Error& error) {
    throw to_api_error(error);
  }
}

}  // namespace

GenerateRequest read_chat_request(std::string_view body, const RequestContext& context) {
  return telling_errors([&] {
    const Json document = parse_body(body);
    Fields fields(document, "");
    GenerateRequest request;
    request.weights = read_model(fields, context, &request.model);
    request.chat = true;
    const ChatPrompt chat = read_chat_prompt(fields, body, context);
    request.thinking = chat.options.thinking;
    request.prompt = model::render_chat(context.tokenizer, chat.messages, chat.tools, chat.options, true);
    request.logprobs = fields.flag("logprobs").value_or(false);
    request.top_logprobs = static_cast<int>(fields.integer("top_logprobs", 0, 20).value_or(0));
    if (request.top_logprobs > 0 && !request.logprobs)
      fields.refuse("top_logprobs", "0 unless logprobs is true", request.top_logprobs);
    auto max_tokens = fields.integer("max_completion_tokens", 1, INT32_MAX);
    const auto older = fields.integer("max_tokens", 1, INT32_MAX);
    if (max_tokens && older)
      fields.refuse("max_tokens", "one of max_tokens and max_completion_tokens, which mean the same", *older);
    if (!max_tokens) max_tokens = older;
    read_sampling(fields, context, max_tokens, request);
    fields.finish();
    for (engine::SamplingParams& choice : request.choices)
      choice.constraint = context.grammars->constrain(chat.format, chat.calls, chat.options.thinking, context.vocab);
    return request;
  });
}

GenerateRequest read_completion_request(std::string_view body, const RequestContext& context) {
  return telling_errors([&] {
    const Json document = parse_body(body);
    Fields fields(document, "");
    GenerateRequest request;
    request.weights = read_model(fields, context, &request.model);
    request.prompt = read_prompt(fields, context);
    const auto logprobs = fields.integer("logprobs", 0, 20);
    request.logprobs = logprobs.has_value();
    request.top_logprobs = static_cast<int>(logprobs.value_or(0));
    fields.only("echo", false, "the prompt is not repeated");
    fields.only("best_of", 1, "every choice is returned");
    read_sampling(fields, context, fields.integer("max_tokens", 1, INT32_MAX), request);
    fields.finish();
    return request;
  });
}

std::string tokenize(std::string_view body, const RequestContext& context) {
  return telling_errors([&] {
    const Json document = parse_body(body);
    Fields fields(document, "");
    if (fields.find("model") != nullptr) read_model(fields, context);
    std::vector<std::int32_t> ids;
    if (fields.find("messages") != nullptr) {
      if (const Json* prompt = fields.find("prompt"); prompt != nullptr)
        fields.refuse("prompt", "either prompt or messages", *prompt);
      const ChatPrompt chat = read_chat_prompt(fields, body, context);
      ids = model::render_chat(context.tokenizer, chat.messages, chat.tools, chat.options,
                               fields.flag("add_generation_prompt").value_or(true));
    } else {
      ids = context.tokenizer.encode_text(fields.require_text("prompt"));
      fields.only("add_special_tokens", false, "text never becomes a special token");
    }
    fields.finish();
    return Json{{"count", ids.size()}, {"max_model_len", context.context}, {"tokens", ids}}.dump();
  });
}

std::string detokenize(std::string_view body, const RequestContext& context) {
  return telling_errors([&] {
    const Json document = parse_body(body);
    Fields fields(document, "");
    if (fields.find("model") != nullptr) read_model(fields, context);
    const Json& list = fields.require("tokens");
    if (!list.is_array()) fields.refuse("tokens", "a list of token ids", list);
    const auto ids = read_ids(fields, "tokens", list, context.tokenizer.vocab_size());
    fields.finish();
    Utf8Stream text;
    std::string prompt = text.feed(context.tokenizer.decode(ids));
    prompt += text.finish();
    return Json{{"prompt", prompt}}.dump();
  });
}

}  // namespace tidelock::serve

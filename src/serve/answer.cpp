#include "serve/answer.hpp"

#include <algorithm>

#include "base/base.hpp"
#include "model/json.hpp"

namespace tidelock::serve {
namespace {

using model::Json;

std::string dump(const Json& value) {
  return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string as_text(std::string_view bytes) {
  Utf8Stream stream;
  std::string text = stream.feed(bytes);
  return text + stream.finish();
}

// A token without text (no tokenizer) is shown by its id.
std::string bytes_of(const model::Tokenizer& tokenizer, std::int32_t token) {
  if (!tokenizer.has_text() || token >= tokenizer.vocab_size()) return fmt::format("token_id:{}", token);
  return std::string(tokenizer.token_bytes(token));
}

}  // namespace

// ---- one choice ----------------------------------------------------------------------------------------------------

ChoiceReader::ChoiceReader(const RequestContext& context, const GenerateRequest& request)
    : tokenizer_(context.tokenizer), end_tokens_(context.end_tokens), stops_(request.stop) {
  if (request.chat) parser_.emplace(context.tokenizer, request.thinking);
}

Piece ChoiceReader::feed(const SampledToken& token) {
  Piece piece;
  if (ended()) return piece;
  const bool stopped = token.status == engine::Status::stopped;
  if (parser_) {
    read_chat(token, piece);
  } else if (!stopped && tokenizer_.has_text() && token.token < tokenizer_.vocab_size()) {
    piece.content = stops_.feed(content_.feed(tokenizer_.token_bytes(token.token)));
  }
  if (stops_.found()) {
    end("stop", piece);
  } else if (!malformed_.empty()) {
    end(parser_->turn().calls.empty() ? "stop" : "tool_calls", piece);
  } else if (stopped) {
    end(parser_ && !parser_->turn().calls.empty() ? "tool_calls" : "stop", piece);
  } else if (token.status == engine::Status::length) {
    end("length", piece);
  }
  return piece;
}

void ChoiceReader::read_chat(const SampledToken& token, Piece& piece) {
  const auto event = parser_->feed(token.token);
  if (!event) return;
  using Kind = model::TurnEvent::Kind;
  switch (event->kind) {
    case Kind::content:
      piece.content = stops_.feed(content_.feed(event->text));
      break;
    case Kind::reasoning:
      piece.reasoning = reasoning_.feed(event->text);
      break;
    case Kind::call_end:
      piece.calls.push_back(parser_->turn().calls.back());
      break;
    case Kind::malformed:
      // A stop token of the client's own is where the turn was to end, whatever the protocol says of it.
      if (token.status != engine::Status::stopped || own_end(token.token)) malformed_ = event->text;
      break;
    default:
      break;  // calls are passed on when they are complete
  }
}

bool ChoiceReader::own_end(std::int32_t token) const {
  return token == model::end_of_turn(tokenizer_) ||
         std::find(end_tokens_.begin(), end_tokens_.end(), token) != end_tokens_.end();
}

void ChoiceReader::end(const std::string& reason, Piece& piece) {
  if (!stops_.found()) {
    piece.content += stops_.feed(content_.finish());
    piece.content += stops_.finish();
  }
  piece.reasoning += reasoning_.finish();
  finish_reason_ = reason;
}

// ---- the whole answer ----------------------------------------------------------------------------------------------

struct Answer::Choice {
  ChoiceReader reader;
  Piece whole;
  Json logprobs;  // content entries of a chat; the four lists of a completion
  std::vector<std::int32_t> tokens;
  std::int64_t text_size = 0;  // characters of a completion's text so far, for text_offset
  bool engine_done = false;

  Choice(const RequestContext& context, const GenerateRequest& request) : reader(context, request) {}
};

Answer::Answer(const RequestContext& context, const GenerateRequest& request, std::string id, std::int64_t created)
    : context_(context), request_(request), id_(std::move(id)), created_(created) {
  for (std::size_t i = 0; i < request.choices.size(); ++i)
    choices_.push_back(std::make_unique<Choice>(context, request));
}
Answer::~Answer() = default;

namespace {

Json chat_logprob(const model::Tokenizer& tokenizer, std::int32_t token, float logprob) {
  const std::string bytes = bytes_of(tokenizer, token);
  Json numbers = Json::array();
  for (const char c : bytes) numbers.push_back(static_cast<unsigned char>(c));
  return {{"token", as_text(bytes)}, {"logprob", logprob}, {"bytes", numbers}};
}

Json chat_logprobs(const model::Tokenizer& tokenizer, const SampledToken& token) {
  Json entry = chat_logprob(tokenizer, token.token, token.logprob);
  entry["top_logprobs"] = Json::array();
  for (const auto& top : token.top) entry["top_logprobs"].push_back(chat_logprob(tokenizer, top.token, top.logprob));
  return {{"content", Json::array({entry})}, {"refusal", nullptr}};
}

Json completion_logprobs(const model::Tokenizer& tokenizer, const SampledToken& token, std::int64_t offset) {
  Json top = Json::object();
  for (const auto& t : token.top) top[as_text(bytes_of(tokenizer, t.token))] = t.logprob;
  return {{"tokens", {as_text(bytes_of(tokenizer, token.token))}},
          {"token_logprobs", {token.logprob}},
          {"top_logprobs", Json::array({top})},
          {"text_offset", {offset}}};
}

// Adds one token's logprobs to those before it: list to list.
void append_logprobs(Json& whole, const Json& more) {
  if (whole.is_null()) {
    whole = more;
    return;
  }
  for (const auto& [name, list] : more.items())
    if (list.is_array()) whole[name].insert(whole[name].end(), list.begin(), list.end());
}

std::int64_t characters(std::string_view text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
}

// `first`: the number of the first of these calls in its turn. Streamed calls carry it, whole ones do not.
Json call_list(const std::vector<model::ToolCall>& calls, const std::string& response_id, std::size_t first,
               bool streamed) {
  Json list = Json::array();
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const model::ToolCall& call = calls[i];
    // K3's tokens carry no id: its "call_1" would stand in every turn.
    const bool own = call.id == fmt::format("call_{}", first + i + 1);
    const std::string id =
        own ? fmt::format("{}_{}", call.id, response_id.substr(response_id.rfind('-') + 1)) : call.id;
    const bool blank = call.arguments_json.find_first_not_of(" \t\r\n") == std::string::npos;
    Json entry = {{"id", id},
                  {"type", "function"},
                  {"function", {{"name", call.name}, {"arguments", blank ? "{}" : call.arguments_json}}}};
    if (streamed) entry["index"] = first + i;
    list.push_back(std::move(entry));
  }
  return list;
}

Json envelope(const GenerateRequest& request, const std::string& id, std::int64_t created, bool chunk) {
  const char* object = !request.chat ? "text_completion" : chunk ? "chat.completion.chunk" : "chat.completion";
  return {{"id", id},
          {"object", object},
          {"created", created},
          {"model", request.model},
          {"weight_version", request.weights.version},
          {"system_fingerprint", numerics::kContractName},
          {"choices", Json::array()}};
}

}  // namespace

std::vector<std::string> Answer::begin() {
  std::vector<std::string> chunks;
  if (!request_.chat) return chunks;
  for (std::size_t i = 0; i < choices_.size(); ++i) {
    Json chunk = envelope(request_, id_, created_, true);
    Json choice = {{"index", i},
                   {"delta", {{"role", "assistant"}, {"content", ""}}},
                   {"logprobs", nullptr},
                   {"finish_reason", nullptr}};
    if (request_.token_ids) chunk["prompt_token_ids"] = request_.prompt;
    chunk["choices"].push_back(std::move(choice));
    chunks.push_back(dump(chunk));
  }
  return chunks;
}

std::optional<std::string> Answer::feed(const SampledToken& token) {
  Choice& choice = *choices_.at(token.choice);
  if (choice.reader.ended()) return std::nullopt;
  const std::size_t calls_before = choice.whole.calls.size();
  const bool first = choice.tokens.empty();
  Piece piece = choice.reader.feed(token);
  choice.engine_done = token.status == engine::Status::stopped || token.status == engine::Status::length;
  choice.tokens.push_back(token.token);
  cached_ = std::max(cached_, token.cached);
  Json logprobs;
  if (request_.logprobs) {
    logprobs = request_.chat ? chat_logprobs(context_.tokenizer, token)
                             : completion_logprobs(context_.tokenizer, token, choice.text_size);
    append_logprobs(choice.logprobs, logprobs);
  }
  choice.text_size += characters(piece.content);
  choice.whole.content += piece.content;
  choice.whole.reasoning += piece.reasoning;
  choice.whole.calls.insert(choice.whole.calls.end(), piece.calls.begin(), piece.calls.end());
  const bool ended = choice.reader.ended();
  const bool nothing = piece.content.empty() && piece.reasoning.empty() && piece.calls.empty();
  if (!request_.stream || (nothing && !ended && !request_.logprobs && !request_.token_ids)) return std::nullopt;

  Json chunk = envelope(request_, id_, created_, true);
  Json entry = {{"index", token.choice}, {"logprobs", logprobs}, {"finish_reason", nullptr}};
  if (ended) entry["finish_reason"] = choice.reader.finish_reason();
  if (!choice.reader.malformed().empty()) entry["malformed"] = choice.reader.malformed();
  if (request_.token_ids) entry["token_ids"] = {token.token};
  if (request_.chat) {
    Json delta = Json::object();
    if (!piece.content.empty()) delta["content"] = piece.content;
    if (!piece.reasoning.empty()) delta["reasoning_content"] = piece.reasoning;
    if (!piece.calls.empty()) delta["tool_calls"] = call_list(piece.calls, id_, calls_before, true);
    entry["delta"] = std::move(delta);
  } else {
    entry["text"] = piece.content;
    if (request_.token_ids && first) chunk["prompt_token_ids"] = request_.prompt;
  }
  chunk["choices"].push_back(std::move(entry));
  return dump(chunk);
}

bool Answer::ended_early(std::size_t choice) const {
  return choices_.at(choice)->reader.ended() && !choices_.at(choice)->engine_done;
}

bool Answer::done() const {
  return std::all_of(choices_.begin(), choices_.end(), [](const auto& c) { return c->reader.ended(); });
}

namespace {

Json usage(std::size_t prompt, std::size_t completion, std::int64_t cached) {
  return {{"prompt_tokens", prompt},
          {"completion_tokens", completion},
          {"total_tokens", prompt + completion},
          {"prompt_tokens_details", {{"cached_tokens", cached}}}};
}

}  // namespace

std::string Answer::usage_chunk() const {
  Json chunk = envelope(request_, id_, created_, true);
  std::size_t completion = 0;
  for (const auto& choice : choices_) completion += choice->tokens.size();
  chunk["usage"] = usage(request_.prompt.size(), completion, cached_);
  return dump(chunk);
}

std::string Answer::response() const {
  Json body = envelope(request_, id_, created_, false);
  std::size_t completion = 0;
  for (std::size_t i = 0; i < choices_.size(); ++i) {
    const Choice& choice = *choices_[i];
    completion += choice.tokens.size();
    Json entry = {{"index", i}, {"logprobs", choice.logprobs}, {"finish_reason", choice.reader.finish_reason()}};
    if (!choice.reader.malformed().empty()) entry["malformed"] = choice.reader.malformed();
    if (request_.token_ids) entry["token_ids"] = choice.tokens;
    if (request_.chat) {
      Json message = {{"role", "assistant"}, {"content", choice.whole.content}, {"refusal", nullptr}};
      if (choice.whole.content.empty() && !choice.whole.calls.empty()) message["content"] = nullptr;
      if (request_.thinking) message["reasoning_content"] = choice.whole.reasoning;
      if (!choice.whole.calls.empty()) message["tool_calls"] = call_list(choice.whole.calls, id_, 0, false);
      entry["message"] = std::move(message);
    } else {
      entry["text"] = choice.whole.content;
    }
    body["choices"].push_back(std::move(entry));
  }
  if (request_.token_ids) body["prompt_token_ids"] = request_.prompt;
  body["usage"] = usage(request_.prompt.size(), completion, cached_);
  return dump(body);
}

}  // namespace tidelock::serve

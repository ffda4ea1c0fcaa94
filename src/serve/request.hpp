// Requests for generation: JSON of the OpenAI API to prompt tokens and sampling parameters. Pure functions. Private to
// serve/.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/engine.hpp"
#include "model/chat.hpp"
#include "model/tokenizer.hpp"
#include "serve/adapters.hpp"
#include "serve/answer_format.hpp"

namespace tidelock::serve {

// What requests are read against; shared by all threads.
struct RequestContext {
  const model::Tokenizer& tokenizer;
  const Adapters& adapters;                   // by the names that "model" may have
  std::int64_t context = 0;                   // tokens of prompt and answer
  std::int64_t vocab = 0;                     // ids that the model knows
  std::vector<std::int32_t> end_tokens = {};  // of the model
  std::string reasoning_effort = "none";      // of chats that do not say one
  std::size_t max_choices = 16;               // n at most
  std::shared_ptr<AnswerGrammars> grammars = std::make_shared<AnswerGrammars>(tokenizer);
};

struct GenerateRequest {
  bool chat = false;
  std::string model;  // as asked for
  Weights weights;    // that it stands for
  std::vector<std::int32_t> prompt;
  std::vector<engine::SamplingParams> choices;  // n of them
  bool thinking = false;                        // of the chat's generation prompt
  std::vector<std::string> stop;
  bool stream = false, include_usage = false;
  bool logprobs = false;
  int top_logprobs = 0;
  bool token_ids = false;  // report prompt and answer as ids too
  std::string cache_salt;  // states are reused among requests with the same one only
  int priority = 0;        // a lower one goes first
};

// POST /v1/chat/completions and /v1/completions. Throw ApiError naming the field: every field that is not supported is
// refused, whatever its value, unless null or a value that says what is done anyway.
GenerateRequest read_chat_request(std::string_view body, const RequestContext& context);
GenerateRequest read_completion_request(std::string_view body, const RequestContext& context);

// POST /tokenize {"prompt": TEXT} or {"messages": [...]} and POST /detokenize {"tokens": [...]}: the response's JSON.
std::string tokenize(std::string_view body, const RequestContext& context);
std::string detokenize(std::string_view body, const RequestContext& context);

}  // namespace tidelock::serve

// Requests: what is supported is read, all else is refused by name.
#include "serve/request.hpp"

#include <gtest/gtest.h>

#include "model/json.hpp"
#include "serve/api_error.hpp"
#include "serve/support.hpp"

namespace tidelock::serve {
namespace request_test {

using model::Json;
using testing::k2_context;
using testing::k3_context;

const Json chat{{"model", "m"}, {"messages", {{{"role", "user"}, {"content", "12*34?"}}}}};
const Json completion{{"model", "m"}, {"prompt", "1+1"}};

Json with(Json request, const Json& more) {
  request.update(more);
  return request;
}

// The field and status of the refusal; empty when the request was accepted.
std::string refusal(const Json& request, const RequestContext& context = k3_context()) {
  try {
    if (request.contains("prompt")) {
      read_completion_request(request.dump(), context);
    } else {
      read_chat_request(request.dump(), context);
    }
  } catch (const ApiError& error) {
    const Json body = Json::parse(error.json()).at("error");
    EXPECT_TRUE(body.at("message").is_string() && body.at("type").is_string() && body.contains("code"));
    if (!error.param().empty()) {
      EXPECT_NE(std::string(error.what()).find(error.param()), std::string::npos) << error.what();
    }
    return fmt::format("{} {}", error.status(), error.param());
  }
  return "";
}

TEST(ChatRequest, IsRenderedInTheProtocolOfTheVocabulary) {
  const auto request = read_chat_request(chat.dump(), k3_context());
  model::ChatOptions quiet;
  quiet.thinking = false;
  const std::vector<model::Message> messages{{.role = "user", .content = "12*34?"}};
  EXPECT_EQ(request.prompt, model::render_chat(testing::nano_tokenizer(), messages, {}, quiet, true));
  ASSERT_EQ(request.choices.size(), 1U);
  EXPECT_EQ(request.choices[0].max_tokens, 4096 - static_cast<std::int64_t>(request.prompt.size()));
  EXPECT_EQ(request.choices[0].stop_tokens, (std::vector{model::end_of_turn(testing::nano_tokenizer())}));
  const auto k2 = read_chat_request(chat.dump(), k2_context());
  EXPECT_EQ(k2.prompt, model::render_chat(k2_context().tokenizer, messages, {}, quiet, true));
  const auto thinking = read_chat_request(with(chat, {{"reasoning_effort", "max"}}).dump(), k3_context());
  EXPECT_EQ(thinking.prompt, model::render_chat(testing::nano_tokenizer(), messages, {}, {}, true));
  EXPECT_TRUE(thinking.thinking);
}

TEST(ChatRequest, ReadsAWholeConversation) {
  const Json messages = Json::parse(R"([
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "ann"},
    {"role": "assistant", "content": null, "refusal": null, "audio": null, "reasoning_content": "hm",
     "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "2"}])");
  const Json tools =
      Json::parse(R"([{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": 2}}}])");
  const std::string body =
      R"({"model": "m", "messages": )" + messages.dump() +
      R"(, "tools": [{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": 2}}}],
    "max_completion_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": -5, "n": 3, "stop": ["x", "yy"],
    "stop_token_ids": [1, 2], "logprobs": true, "top_logprobs": 2, "return_token_ids": true, "stream": true,
    "stream_options": {"include_usage": true}, "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {},
    "parallel_tool_calls": true, "response_format": {"type": "text"}, "tool_choice": "auto", "user": null})";
  const auto request = read_chat_request(body, k2_context(false));
  const std::vector<model::Message> expected{
      {.role = "system", .content = "Be brief."},
      {.role = "user", .content = "ab", .name = "ann"},
      {.role = "assistant", .reasoning = "hm", .tool_calls = {{"c1", "f", "{\"x\": 1}"}}},
      {.role = "tool", .content = "2", .tool_call_id = "c1"}};
  const std::vector<model::ToolSpec> specs{
      {R"({"type":"function","function":{"name":"f","parameters":{"b":1,"a":2}}})"}};  // keys in the client's order
  model::ChatOptions quiet;
  quiet.thinking = false;
  EXPECT_EQ(request.prompt, model::render_chat(k2_context(false).tokenizer, expected, specs, quiet, true));
  ASSERT_EQ(request.choices.size(), 3U);
  EXPECT_EQ(request.choices[0].seed, static_cast<std::uint64_t>(-5));
  EXPECT_NE(request.choices[1].seed, request.choices[2].seed);
  EXPECT_EQ(request.choices[2].max_tokens, 7);
  EXPECT_EQ(request.choices[2].temperature, 0.5F);
  EXPECT_EQ(request.choices[2].top_k, 3);
  EXPECT_EQ(request.choices[2].top_logprobs, 2);
  EXPECT_EQ(request.choices[2].stop_tokens.size(), 3U);
  EXPECT_EQ(request.stop, (std::vector<std::string>{"x", "yy"}));
  EXPECT_TRUE(request.stream && request.include_usage && request.logprobs && request.token_ids && request.chat);
}

TEST(ChatRequest, EveryUnsupportedFieldIsNamed) {
  EXPECT_EQ(refusal(chat), "");
  for (const char* field : {"audio", "function_call", "functions", "metadata", "modalities", "prediction", "store",
                            "user", "service_tier", "web_search_options", "verbosity", "min_p", "repetition_penalty",
                            "echo", "prompt_cache_key", "safety_identifier", "anything"}) {
    for (const Json& value : {Json("x"), Json(false), Json(0), Json::object(), Json::array()})
      EXPECT_EQ(refusal(with(chat, {{field, value}})), fmt::format("400 {}", field));
    EXPECT_EQ(refusal(with(chat, {{field, nullptr}})), "");
  }
  const std::vector<std::pair<std::string, Json>> wrong{{"temperature", 2.1},
                                                        {"temperature", "1"},
                                                        {"temperature", -0.1},
                                                        {"top_p", 0},
                                                        {"top_p", 1.1},
                                                        {"top_k", -1},
                                                        {"n", 0},
                                                        {"n", 17},
                                                        {"n", 1.5},
                                                        {"seed", 1.5},
                                                        {"seed", 18446744073709551615ULL},
                                                        {"max_tokens", 0},
                                                        {"max_tokens", 99999},
                                                        {"stop", ""},
                                                        {"stop", Json::array({1})},
                                                        {"stop", 5},
                                                        {"stop", Json(std::vector<std::string>(17, "x"))},
                                                        {"stop_token_ids", Json::array({-1})},
                                                        {"stop_token_ids", Json::array({455})},
                                                        {"stream", "yes"},
                                                        {"logprobs", 3},
                                                        {"top_logprobs", 3},
                                                        {"stream_options", Json{{"include_usage", true}}},
                                                        {"frequency_penalty", 0.5},
                                                        {"presence_penalty", -1},
                                                        {"logit_bias", Json{{"5", 1}}},
                                                        {"parallel_tool_calls", 0},
                                                        {"tools", 5},
                                                        {"tool_choice", "maybe"},
                                                        {"tool_choice", "required"},
                                                        {"reasoning_effort", "medium"},
                                                        {"return_token_ids", 1},
                                                        {"messages", 5},
                                                        {"messages", Json::array()},
                                                        {"messages", nullptr},
                                                        {"model", nullptr}};
  for (const auto& [field, value] : wrong)
    EXPECT_EQ(refusal(with(chat, {{field, value}})), fmt::format("400 {}", field)) << value;
  EXPECT_EQ(refusal(with(chat, {{"model", "other"}})), "404 model");
  EXPECT_EQ(refusal(with(chat, {{"max_tokens", 5}, {"max_completion_tokens", 5}})), "400 max_tokens");
  EXPECT_EQ(refusal(with(chat, {{"response_format", {{"type", "xml"}}}})), "400 response_format.type");
  EXPECT_EQ(refusal(with(chat, {{"response_format", {{"type", "json_schema"}}}})), "400 response_format.json_schema");
  EXPECT_EQ(refusal(with(chat, {{"response_format", {{"type", "json_object"}, {"schema", 1}}}})),
            "400 response_format.schema");
  EXPECT_EQ(refusal(with(chat, {{"stream", true}, {"stream_options", {{"x", 1}}}})), "400 stream_options.x");
  for (const std::string body : {"", "{", "[]", "5", R"({"model":"m","model":"m"})", "\xff"})
    EXPECT_THROW(read_chat_request(body, k3_context()), ApiError) << body;
}

TEST(ChatRequest, WrongMessagesAreNamedByTheirPlace) {
  const auto with_message = [](const Json& message) { return refusal(with(chat, {{"messages", {message}}})); };
  EXPECT_EQ(with_message({{"role", "user"}, {"content", "x"}}), "");
  EXPECT_EQ(with_message({{"role", "robot"}, {"content", "x"}}), "400 messages[0].role");
  EXPECT_EQ(with_message({{"content", "x"}}), "400 messages[0].role");
  EXPECT_EQ(with_message({{"role", "user"}}), "400 messages[0].content");
  EXPECT_EQ(with_message({{"role", "user"}, {"content", 5}}), "400 messages[0].content");
  EXPECT_EQ(with_message({{"role", "user"}, {"content", "x"}, {"weight", 1}}), "400 messages[0].weight");
  EXPECT_EQ(with_message({{"role", "user"}, {"content", {{{"type", "image_url"}, {"image_url", "x"}}}}}),
            "400 messages[0].content[0].type");
  EXPECT_EQ(with_message({{"role", "tool"}, {"content", "x"}}), "400 messages[0].tool_call_id");
  EXPECT_EQ(with_message({{"role", "assistant"}}), "400 messages[0].content");
  EXPECT_EQ(with_message({{"role", "assistant"}, {"tool_calls", {{{"id", "a"}, {"function", {{"name", "f"}}}}}}}),
            "400 messages[0].tool_calls[0].function.arguments");
  const auto with_tool = [](const Json& tool, const Json& more = Json::object()) {
    return refusal(with(with(chat, {{"tools", {tool}}}), more));
  };
  const Json f{{"type", "function"}, {"function", {{"name", "f"}}}};
  EXPECT_EQ(with_tool(f), "");
  EXPECT_EQ(with_tool(f, {{"tool_choice", "required"}}), "");
  EXPECT_EQ(with_tool(f, {{"tool_choice", f}}), "");
  EXPECT_EQ(with_tool(f, {{"tool_choice", {{"type", "function"}, {"function", {{"name", "g"}}}}}}),
            "400 tool_choice.function.name");
  EXPECT_EQ(with_tool({{"type", "web_search"}}), "400 tools[0].type");
  EXPECT_EQ(with_tool({{"type", "function"}, {"function", {{"name", "f"}, {"strict", 1}}}}),
            "400 tools[0].function.strict");
  EXPECT_EQ(with_tool({{"type", "function"},
                       {"function", {{"name", "f"}, {"strict", true}, {"parameters", {{"uniqueItems", true}}}}}}),
            "400 tools[0].function.parameters");
  EXPECT_EQ(with_tool({{"type", "function"}, {"function", {{"name", ""}}}}), "400 tools[0].function.name");
  EXPECT_EQ(refusal(with(chat, {{"tools", {f, f}}})), "400 tools[1].function.name");
  EXPECT_EQ(refusal(with(chat, {{"tools", {f}}, {"tool_choice", "required"}}), k2_context()), "");
  EXPECT_EQ(refusal(with(chat, {{"reasoning_effort", "max"}}), k2_context(false)), "400 reasoning_effort");
  EXPECT_EQ(refusal(with(chat, {{"reasoning_effort", "max"}}), k2_context(true)), "");
}

TEST(ChatRequest, AChosenFunctionIsTheOnlyOneDeclared) {
  const auto tool = [](const char* name) { return Json{{"type", "function"}, {"function", {{"name", name}}}}; };
  const auto chosen = read_chat_request(
      with(chat, {{"tools", {tool("f"), tool("g")}}, {"tool_choice", tool("g")}}).dump(), k3_context());
  const auto required =
      read_chat_request(with(chat, {{"tools", {tool("g")}}, {"tool_choice", "required"}}).dump(), k3_context());
  EXPECT_EQ(chosen.prompt, required.prompt);
}

TEST(CompletionRequest, TakesTextOrIds) {
  const auto text = read_completion_request(completion.dump(), k3_context());
  EXPECT_EQ(text.prompt, testing::nano_tokenizer().encode_text("1+1"));
  EXPECT_FALSE(text.chat);
  EXPECT_TRUE(text.choices[0].stop_tokens.empty());  // of this context
  for (const Json& ids : {Json(text.prompt), Json::array({text.prompt}), Json::array({"1+1"})})
    EXPECT_EQ(read_completion_request(with(completion, {{"prompt", ids}}).dump(), k3_context()).prompt, text.prompt);
  const auto logprobs = read_completion_request(with(completion, {{"logprobs", 0}}).dump(), k3_context());
  EXPECT_TRUE(logprobs.logprobs);
  EXPECT_EQ(logprobs.top_logprobs, 0);
  for (const Json& bad : {Json(""), Json::array(), Json(5), Json::array({"a", "b"}), Json::array({1, "a"}),
                          Json::array({455}), Json::array({-1}), Json::array({1.5})})
    EXPECT_EQ(refusal(with(completion, {{"prompt", bad}})), "400 prompt") << bad;
  for (const char* field : {"suffix", "user", "messages", "tools", "max_completion_tokens", "top_logprobs"})
    EXPECT_EQ(refusal(with(completion, {{field, 1}})), fmt::format("400 {}", field));
  EXPECT_EQ(refusal(with(completion, {{"echo", true}})), "400 echo");
  EXPECT_EQ(refusal(with(completion, {{"best_of", 2}})), "400 best_of");
  RequestContext small = k3_context();
  small.context = 3;
  EXPECT_EQ(refusal(completion, small), "400 prompt");
}

TEST(CompletionRequest, WithoutATokenizerIdsAreTaken) {
  const auto none = model::Tokenizer::from_gguf({.model = "none", .size = 100}, "bench.gguf");
  RequestContext context{none, testing::only_m()};
  context.context = 50;
  context.vocab = 100;
  EXPECT_EQ(read_completion_request(R"({"model":"m","prompt":[1,2]})", context).prompt.size(), 2U);
  EXPECT_EQ(refusal(completion, context), "400 ");
  EXPECT_EQ(refusal(chat, context), "400 ");
  EXPECT_EQ(refusal(with(completion, {{"prompt", {1}}, {"stop", "x"}}), context), "400 stop");
}

TEST(Tokenize, ThereAndBack) {
  const Json there = Json::parse(tokenize(R"({"prompt": "12*34? é"})", k3_context()));
  EXPECT_EQ(there.at("tokens").get<std::vector<std::int32_t>>(), testing::nano_tokenizer().encode_text("12*34? é"));
  EXPECT_EQ(there.at("count"), there.at("tokens").size());
  EXPECT_EQ(Json::parse(detokenize(Json{{"tokens", there.at("tokens")}}.dump(), k3_context())).at("prompt"),
            "12*34? é");
  const Json of_chat = Json::parse(tokenize(chat.dump(), k3_context()));
  EXPECT_EQ(of_chat.at("tokens").get<std::vector<std::int32_t>>(), read_chat_request(chat.dump(), k3_context()).prompt);
  EXPECT_THROW(tokenize("{}", k3_context()), ApiError);
  EXPECT_THROW(tokenize(R"({"prompt": "x", "x": 1})", k3_context()), ApiError);
  EXPECT_THROW(detokenize(R"({"tokens": [455]})", k3_context()), ApiError);
  EXPECT_THROW(detokenize(R"({"tokens": "x"})", k3_context()), ApiError);
}

}  // namespace request_test
}  // namespace tidelock::serve

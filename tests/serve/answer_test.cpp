// Answers: tokens in, the API's JSON out; a stream adds up to the body that the same tokens give at once.
#include "serve/answer.hpp"

#include <gtest/gtest.h>

#include "model/json.hpp"
#include "serve/support.hpp"

namespace tidelock::serve {
namespace answer_test {

using model::Json;
using model::testing::Parts;
using model::testing::segments;
using testing::k2_context;
using testing::k3_context;

GenerateRequest request_of(bool chat, std::size_t n = 1) {
  GenerateRequest request;
  request.chat = chat;
  request.prompt = {1, 2, 3};
  request.choices.resize(n);
  return request;
}

SampledToken token(std::int32_t id, engine::Status status = engine::Status::decode, std::size_t choice = 0) {
  return {choice, id, -0.5F, {{id, -0.5F}, {7, -1.5F}}, status};
}

std::vector<SampledToken> sampled(const std::vector<std::int32_t>& ids, engine::Status last = engine::Status::stopped) {
  std::vector<SampledToken> tokens;
  for (const auto id : ids) tokens.push_back(token(id));
  if (!tokens.empty()) tokens.back().status = last;
  return tokens;
}

Json whole(const RequestContext& context, const GenerateRequest& request, const std::vector<SampledToken>& tokens) {
  Answer answer(context, request, "chatcmpl-abc", 5);
  for (const auto& t : tokens) EXPECT_FALSE(answer.feed(t));
  EXPECT_TRUE(answer.done());
  return Json::parse(answer.response());
}

// A stream put together again as clients do it: {"content", "reasoning", "calls", "finish_reason"}.
Json streamed(const RequestContext& context, GenerateRequest request, const std::vector<SampledToken>& tokens) {
  request.stream = true;
  Answer answer(context, request, "chatcmpl-abc", 5);
  Json sum{{"content", ""}, {"reasoning", ""}, {"calls", Json::array()}, {"finish_reason", nullptr}};
  for (const auto& chunk : answer.begin())
    EXPECT_EQ(Json::parse(chunk).at("choices")[0].at("delta").at("role"), "assistant");
  for (const auto& t : tokens) {
    const auto text = answer.feed(t);
    if (!text) continue;
    const Json choice = Json::parse(*text).at("choices")[0];
    EXPECT_TRUE(sum["finish_reason"].is_null());
    sum["finish_reason"] = choice.at("finish_reason");
    const Json& delta = choice.at("delta");
    sum["content"] = sum["content"].get<std::string>() + delta.value("content", "");
    sum["reasoning"] = sum["reasoning"].get<std::string>() + delta.value("reasoning_content", "");
    for (Json call : delta.value("tool_calls", Json::array())) {
      EXPECT_EQ(call.at("index"), sum["calls"].size());
      call.erase("index");
      sum["calls"].push_back(call);
    }
  }
  return sum;
}

const Parts two_calls{"</think>",
                      "One moment",
                      "<|tool_calls_section_begin|>",
                      "<|tool_call_begin|>",
                      "functions.f:3",
                      "<|tool_call_argument_begin|>",
                      "{\"a\": 1}",
                      "<|tool_call_end|>",
                      "<|tool_call_begin|>",
                      "functions.g:4",
                      "<|tool_call_argument_begin|>",
                      "<|tool_call_end|>",
                      "<|tool_calls_section_end|>",
                      "<|im_end|>"};

TEST(Answer, CallsOfK2KeepTheirIds) {
  GenerateRequest request = request_of(true);
  request.thinking = true;
  Parts parts{"hm é"};
  parts.insert(parts.end(), two_calls.begin(), two_calls.end());
  const auto tokens = sampled(segments(parts));
  const Json body = whole(k2_context(), request, tokens);
  EXPECT_EQ(body.at("object"), "chat.completion");
  EXPECT_EQ(body.at("usage").at("completion_tokens"), tokens.size());
  EXPECT_EQ(body.at("usage").at("total_tokens"), tokens.size() + 3);
  const Json& choice = body.at("choices")[0];
  EXPECT_EQ(choice.at("finish_reason"), "tool_calls");
  EXPECT_FALSE(choice.contains("malformed"));
  const Json& message = choice.at("message");
  EXPECT_EQ(message.at("content"), "One moment");
  EXPECT_EQ(message.at("reasoning_content"), "hm é");
  EXPECT_EQ(message.at("tool_calls"), Json::parse(R"([
    {"id": "functions.f:3", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}},
    {"id": "functions.g:4", "type": "function", "function": {"name": "g", "arguments": "{}"}}])"));
  const Json stream = streamed(k2_context(), request, tokens);
  EXPECT_EQ(stream.at("content"), message.at("content"));
  EXPECT_EQ(stream.at("reasoning"), message.at("reasoning_content"));
  EXPECT_EQ(stream.at("calls"), message.at("tool_calls"));
  EXPECT_EQ(stream.at("finish_reason"), "tool_calls");
}

TEST(Answer, CallsOfK3GetIdsOfTheirOwn) {
  model::ChatOptions quiet;
  quiet.thinking = false;
  const model::Message said{.role = "assistant", .content = "", .tool_calls = {{"", "shell", R"({"command": "ls"})"}}};
  const auto tokens = sampled(model::render_completion(testing::nano_tokenizer(), said, quiet));
  const Json body = whole(k3_context(), request_of(true), tokens);
  const Json& message = body.at("choices")[0].at("message");
  EXPECT_TRUE(message.at("content").is_null());
  EXPECT_FALSE(message.contains("reasoning_content"));
  EXPECT_EQ(message.at("tool_calls"), Json::parse(R"([{"id": "call_1_abc", "type": "function",
    "function": {"name": "shell", "arguments": "{\"command\": \"ls\"}"}}])"));
  EXPECT_EQ(streamed(k3_context(), request_of(true), tokens).at("calls"), message.at("tool_calls"));
}

TEST(Answer, MalformedOutputIsReportedAndWholeCallsAreKept) {
  Parts broken(two_calls.begin() + 1, two_calls.begin() + 8);
  broken.insert(broken.end(), {"<|tool_call_begin|>", "nonsense", "<|tool_call_argument_begin|>"});
  const GenerateRequest request = request_of(true);
  Answer answer(k2_context(), request, "chatcmpl-abc", 5);
  for (const auto id : segments(broken)) answer.feed(token(id));
  EXPECT_TRUE(answer.done());
  EXPECT_TRUE(answer.ended_early(0));  // the engine would go on
  const Json choice = Json::parse(answer.response()).at("choices")[0];
  EXPECT_NE(choice.at("malformed").get<std::string>().find("call id"), std::string::npos);
  EXPECT_EQ(choice.at("finish_reason"), "tool_calls");
  EXPECT_EQ(choice.at("message").at("tool_calls").size(), 1U);
  // An end in the middle of a call stops the engine; that a call was lost there must be said all the same.
  Parts cut(two_calls.begin() + 1, two_calls.begin() + 5);
  cut.emplace_back("<|im_end|>");
  const Json lost = whole(k2_context(), request_of(true), sampled(segments(cut))).at("choices")[0];
  EXPECT_NE(lost.at("malformed").get<std::string>().find("inside a call"), std::string::npos);
  EXPECT_EQ(lost.at("finish_reason"), "stop");
  EXPECT_FALSE(lost.at("message").contains("tool_calls"));
}

TEST(Answer, AStopTokenOfTheClientEndsATurnAnywhere) {
  const auto tokens = sampled(segments({"hello", "[EOS]"}));
  const Json choice = whole(k2_context(), request_of(true), tokens).at("choices")[0];
  EXPECT_EQ(choice.at("finish_reason"), "stop");
  EXPECT_FALSE(choice.contains("malformed"));
  RequestContext context = k2_context();
  context.end_tokens = {tokens.back().token};
  EXPECT_TRUE(whole(context, request_of(true), tokens).at("choices")[0].contains("malformed"));
}

TEST(Answer, StopStringsCutAndEndAChoice) {
  GenerateRequest request = request_of(false);
  request.stop = {"lo w"};
  request.stream = true;
  Answer answer(k3_context(), request, "cmpl-abc", 5);
  EXPECT_TRUE(answer.begin().empty());
  std::string text;
  Json finish;
  for (const auto id : testing::nano_tokenizer().encode_text("hello world")) {
    const auto chunk = answer.feed(token(id));
    if (!chunk) continue;
    const Json choice = Json::parse(*chunk).at("choices")[0];
    text += choice.at("text").get<std::string>();
    finish = choice.at("finish_reason");
  }
  EXPECT_EQ(text, "hel");
  EXPECT_EQ(finish, "stop");
  EXPECT_TRUE(answer.ended_early(0));
  EXPECT_TRUE(answer.done());
}

TEST(Answer, LengthAndPartialCharacters) {
  // The first two bytes of a three-byte character, then the end.
  const Json choice =
      whole(k3_context(), request_of(false), sampled({'a', 0xE4, 0xB8}, engine::Status::length)).at("choices")[0];
  EXPECT_EQ(choice.at("finish_reason"), "length");
  EXPECT_EQ(choice.at("text"), "a\xef\xbf\xbd");
  const Json character = whole(k3_context(), request_of(false), sampled({0xE4, 0xB8, 0xAD}, engine::Status::length));
  EXPECT_EQ(character.at("choices")[0].at("text"), "中");
}

TEST(Answer, LogprobsAndIdsStandBesideTheTokens) {
  GenerateRequest request = request_of(true);
  request.logprobs = request.token_ids = true;
  request.top_logprobs = 2;
  const auto ids = segments({"hi", "<|im_end|>"});
  const Json body = whole(k2_context(), request, sampled(ids));
  EXPECT_EQ(body.at("prompt_token_ids"), Json(request.prompt));
  const Json& choice = body.at("choices")[0];
  EXPECT_EQ(choice.at("token_ids"), Json(ids));
  const Json& content = choice.at("logprobs").at("content");
  ASSERT_EQ(content.size(), ids.size());
  EXPECT_EQ(content.back().at("token"), "<|im_end|>");
  EXPECT_EQ(content.back().at("logprob"), -0.5);
  EXPECT_EQ(content[0].at("top_logprobs").size(), 2U);
  GenerateRequest old = request_of(false);
  old.logprobs = true;
  const Json legacy =
      whole(k3_context(), old, sampled({'a', 'b'}, engine::Status::length)).at("choices")[0].at("logprobs");
  EXPECT_EQ(legacy.at("tokens"), Json({"a", "b"}));
  EXPECT_EQ(legacy.at("token_logprobs"), Json({-0.5, -0.5}));
  EXPECT_EQ(legacy.at("text_offset"), Json({0, 1}));
  EXPECT_EQ(legacy.at("top_logprobs").size(), 2U);
}

TEST(Answer, ChoicesEndOnTheirOwn) {
  const GenerateRequest request = request_of(false, 2);
  Answer answer(k3_context(), request, "cmpl-abc", 5);
  answer.feed(token('a', engine::Status::length, 1));
  EXPECT_FALSE(answer.done());
  answer.feed(token('b', engine::Status::decode, 0));
  answer.feed(token('c', engine::Status::stopped, 0));
  EXPECT_TRUE(answer.done());
  const Json choices = Json::parse(answer.response()).at("choices");
  EXPECT_EQ(choices[0].at("text"), "b");  // a stop token is no text
  EXPECT_EQ(choices[0].at("finish_reason"), "stop");
  EXPECT_EQ(choices[1].at("text"), "a");
  EXPECT_EQ(choices[1].at("finish_reason"), "length");
}

}  // namespace answer_test
}  // namespace tidelock::serve

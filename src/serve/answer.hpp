// What a client sees of a generation: sampled tokens to text, tool calls, and the JSON of the OpenAI API. No I/O, no
// clock. Private to serve/.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "model/toolcall.hpp"
#include "serve/engine_loop.hpp"
#include "serve/request.hpp"
#include "serve/text_stream.hpp"

namespace tidelock::serve {

// What one token, or the end, added to a choice.
struct Piece {
  std::string content, reasoning;
  std::vector<model::ToolCall> calls;  // complete ones only
};

// One choice's tokens as text: the parser of the chat protocol, whole characters, stop strings. Stop strings are looked
// for in the content, not in reasoning and arguments.
class ChoiceReader {
 public:
  ChoiceReader(const RequestContext& context, const GenerateRequest& request);

  // The next token. Tokens after the end are ignored.
  Piece feed(const SampledToken& token);

  bool ended() const { return !finish_reason_.empty(); }
  // "stop", "length" or "tool_calls"; empty while it runs.
  const std::string& finish_reason() const { return finish_reason_; }
  // Why the output is not a turn of the protocol; empty when it is one.
  const std::string& malformed() const { return malformed_; }

 private:
  void read_chat(const SampledToken& token, Piece& piece);
  void end(const std::string& reason, Piece& piece);

  // Whether the model ends its turns with this token by itself.
  bool own_end(std::int32_t token) const;

  const model::Tokenizer& tokenizer_;
  const std::vector<std::int32_t>& end_tokens_;
  std::optional<model::AssistantParser> parser_;  // of a chat
  Utf8Stream content_, reasoning_;
  StopFinder stops_;
  std::string finish_reason_, malformed_;
};

// One request's answer: a body at the end, or chunks as tokens come.
class Answer {
 public:
  // `id` is the response's, `created` in seconds since 1970. Context and request must outlive this.
  Answer(const RequestContext& context, const GenerateRequest& request, std::string id, std::int64_t created);
  ~Answer();
  Answer(Answer&&) = delete;

  // The chunks that open a stream: one for each choice of a chat.
  std::vector<std::string> begin();

  // Takes a token. A chunk's JSON when the request streams and there is something to send.
  std::optional<std::string> feed(const SampledToken& token);
  // Whether this choice ended before the engine ended its sequence: at a stop string or at malformed output.
  bool ended_early(std::size_t choice) const;
  bool done() const;

  // Of a stream that asked for it: the last chunk.
  std::string usage_chunk() const;
  // Of all else: the whole response.
  std::string response() const;

 private:
  struct Choice;
  const RequestContext& context_;
  const GenerateRequest& request_;
  std::string id_;
  std::int64_t created_, cached_ = 0;
  std::vector<std::unique_ptr<Choice>> choices_;
};

}  // namespace tidelock::serve

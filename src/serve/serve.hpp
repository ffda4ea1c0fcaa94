// serve/: a model behind the OpenAI API. docs/serve.md is its users' page.
//
// A connection is a coroutine on one of a few HTTP threads; the engine has a thread of its own (engine_loop.hpp). A
// request goes down - bytes, JSON, tokens, engine - and its tokens come back through a mailbox; nothing calls upwards.
//
//   serve.cpp        listens, signals, limits on connections
//   session.cpp      one connection: reads requests within limits, sends replies
//   routes.cpp       which path does what
//   generate.cpp     a generation from its request to the last byte; ends it when the client goes away
//   request.cpp      requests to prompts and parameters      messages.cpp   chats in them
//   answer.cpp       tokens to text, calls and JSON          text_stream.cpp
//   engine_loop.cpp  the engine's thread                     keys.cpp, metrics.cpp, api_error.cpp, fields.cpp
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "base/team.hpp"
#include "model/model.hpp"
#include "model/tokenizer.hpp"
#include "state/state.hpp"

namespace tidelock::serve {

struct ServeOptions {
  std::string host = "127.0.0.1";
  std::uint16_t port = 8000;  // 0: any free one
  std::string model_id;       // what clients call the model
  std::string reasoning_effort = "none";
  std::filesystem::path keys;  // empty: everybody is let in
  int http_threads = 2;
  std::size_t sequences = 64;                       // that the engine runs at once
  std::size_t queue = 256;                          // requests that may wait; more are turned away (429)
  std::size_t state_bytes = state::Pool::kNoLimit;  // limit on the memory of sequences' state, running and kept
  bool reuse = true;                                // keep states of prompts and answers for those that start alike
  int connections = 512;                            // open at once; more are turned away (503)
  std::uint64_t body_bytes = 16 << 20;              // of a request (413)
  std::uint32_t header_bytes = 16 << 10;            // of a request (431)
  std::chrono::milliseconds patience{30'000};       // for a whole header, a whole body, and each write
  std::chrono::milliseconds idle{75'000};           // between two requests of a connection
  std::function<void(std::uint16_t)> listening;     // called once with the port; may be empty
};

// Serves until SIGINT or SIGTERM, then ends open answers and returns. Throws Error{invalid_argument} for options that
// contradict each other or the model, Error{io} for an address that cannot be listened on.
void serve(const model::Model& model, const model::Tokenizer& tokenizer, std::shared_ptr<const model::Adapter> adapter,
           Team& team, const ServeOptions& options);

}  // namespace tidelock::serve

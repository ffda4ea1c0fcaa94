// serve/: a model behind the OpenAI API. docs/serve.md is its users' page.
//
// A connection is a coroutine on one of a few HTTP threads; the engine has a thread of its own (engine_loop.hpp). A
// request goes down - bytes, JSON, tokens, engine - and its tokens come back through a mailbox; nothing calls upwards.
//
//   serve.cpp        a model, its engine and the server together
//   http_server.cpp  listens, signals, limits on connections            } shared with
//   session.cpp      one connection: reads requests within limits, replies  } e2b/
//   routes.cpp       which path does what
//   generate.cpp     a generation from its request to the last byte; ends it when the client goes away
//   request.cpp      requests to prompts and parameters      messages.cpp   chats in them
//   answer.cpp       tokens to text, calls and JSON          text_stream.cpp
//   engine_loop.cpp  the engine's thread                     keys.cpp, metrics.cpp, api_error.cpp, fields.cpp
//   event_log.cpp    the scheduler's decisions               event_replay.cpp  decides them again
//   administration.cpp  adapters, pauses                     adapters.cpp
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "base/team.hpp"
#include "model/model.hpp"
#include "model/tokenizer.hpp"
#include "serve/http_options.hpp"
#include "state/state.hpp"

namespace tidelock::serve {

struct ServeOptions : HttpOptions {
  std::string model_id;  // what clients call the model
  std::string reasoning_effort = "none";
  std::filesystem::path keys;                       // empty: everybody is let in
  std::filesystem::path admin_keys;                 // of administrators; empty: nobody administers
  std::filesystem::path adapters;                   // adapters below it may be loaded; empty: none
  std::size_t sequences = 64;                       // that the engine runs at once
  double step_seconds = 0.02;                       // that a step with prompts in it is to take, about
  double first_token_seconds = 0;                   // requests whose first token would come later are refused; 0: none
  std::size_t queue = 256;                          // requests that may wait; more are turned away (429)
  std::size_t state_bytes = state::Pool::kNoLimit;  // limit on the memory of sequences' state, running and kept
  bool reuse = true;                                // keep states of prompts and answers for those that start alike
  std::filesystem::path state_folder;               // on disk, for kept states; empty: none
  std::uint64_t state_disk_bytes = 0;               // that they may take there
  std::filesystem::path event_log;                  // file of the scheduler's decisions (event_log.hpp); empty: none
};

// Serves until SIGINT or SIGTERM, then ends open answers and returns. Throws Error{invalid_argument} for options that
// contradict each other or the model, Error{io} for an address that cannot be listened on.
void serve(const model::Model& model, const model::Tokenizer& tokenizer, std::shared_ptr<const model::Adapter> adapter,
           Team& team, const ServeOptions& options);

}  // namespace tidelock::serve

// What the tests of serve/ share: the quick start's model and contexts of both protocols.
#pragma once

#include <string>
#include <vector>

#include "base/base.hpp"
#include "model/k2_vocabulary.hpp"
#include "model/model.hpp"
#include "serve/request.hpp"

namespace tidelock::serve::testing {

inline const model::Model& nano_model() {
  static const auto model = model::load_model(std::filesystem::path(TIDELOCK_SOURCE_DIR) / "models/nano", false);
  return *model;
}
inline const model::Tokenizer& nano_tokenizer() {
  static const auto tokenizer = model::Tokenizer::load(std::filesystem::path(TIDELOCK_SOURCE_DIR) / "models/nano");
  return tokenizer;
}

inline const Adapters& only_m() {
  static const Adapters adapters(nano_model(), "m", nullptr, {});
  return adapters;
}

inline RequestContext context_of(const model::Tokenizer& tokenizer) {
  RequestContext context{tokenizer, only_m()};
  context.context = 4096;
  context.vocab = tokenizer.vocab_size();
  return context;
}
inline const RequestContext& k3_context() {
  static const RequestContext context = context_of(nano_tokenizer());
  return context;
}
inline const RequestContext& k2_context(bool thinking = true) {
  static const RequestContext thinker = context_of(model::testing::k2_tokenizer(true)),
                              plain = context_of(model::testing::k2_tokenizer(false));
  return thinking ? thinker : plain;
}

}  // namespace tidelock::serve::testing

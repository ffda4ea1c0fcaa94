// JSON of configs, requests and tool calls: refused with the error asked for, or stable from then on.
#include <cstdlib>

#include "base/error.hpp"
#include "model/json.hpp"
#include "model/toolcall_arguments.hpp"

using namespace tidelock;
using namespace tidelock::model;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  bool parsed = false;
  try {
    const Json value = parse_json(text, "fuzz", {.code = ErrorCode::invalid_argument});
    parsed = true;
    const std::string dumped = value.dump();
    if (parse_json(dumped, "again").dump() != dumped) std::abort();
  } catch (const Error& error) {
    // A value that was accepted once must be accepted again.
    if (parsed || error.code() != ErrorCode::invalid_argument) std::abort();
  }
  if (const auto arguments = split_arguments(text)) {
    const std::string joined = join_arguments(*arguments);
    if (split_arguments(joined) != arguments) std::abort();
  }
  if (parse_json(json_quote(text), "quoted").type() != Json::value_t::string) std::abort();
  return 0;
}

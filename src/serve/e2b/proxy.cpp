#include "serve/e2b/proxy.hpp"

#include <sstream>

namespace tidelock::serve::e2b {
namespace {

constexpr const char* kOurs[] = {"E2b-Sandbox-Id", "E2b-Sandbox-Port", "X-Access-Token",   "X-API-KEY",
                                 "Expect",         "Keep-Alive",       "Proxy-Connection", "Connection"};

}  // namespace

ProxyHead forward_request(const HttpRequest& header) {
  http::request_header<> out = header.base();
  ProxyHead made;
  made.upgrade = http::token_list(out[http::field::connection]).exists("upgrade") && !out[http::field::upgrade].empty();
  made.chunked = http::token_list(out[http::field::transfer_encoding]).exists("chunked");
  for (const char* name : kOurs) out.erase(name);
  out.set(http::field::connection, made.upgrade ? "Upgrade" : "close");
  if (!made.upgrade) out.erase(http::field::upgrade);
  std::ostringstream text;
  text << out;
  made.text = text.str();
  return made;
}

std::optional<ProxyAnswer> forward_answer(std::string_view bytes, bool upgrade_asked) {
  std::size_t from = 0;
  while (true) {
    const std::size_t end = bytes.find("\r\n\r\n", from);
    const bool long_head =
        end == std::string_view::npos ? bytes.size() - from > kMaxAnswerHead : end - from > kMaxAnswerHead;
    if (long_head) throw ApiError(502, "", "the sandbox's server answered with too long a header");
    if (end == std::string_view::npos) return std::nullopt;
    http::response_parser<http::empty_body> parser;
    parser.header_limit(static_cast<std::uint32_t>(kMaxAnswerHead + 8));
    parser.body_limit(boost::none);
    boost::system::error_code error;
    parser.put(asio::buffer(bytes.substr(from, end + 4 - from)), error);
    if (!parser.is_header_done()) throw ApiError(502, "", "the sandbox's server did not answer in HTTP");
    from = end + 4;
    const unsigned status = parser.get().result_int();
    if (status < 200 && status != 101) continue;
    ProxyAnswer out;
    out.used = from;
    out.head.upgrade = status == 101;
    if (out.head.upgrade && !upgrade_asked)
      throw ApiError(502, "", "the sandbox's server changed the protocol unasked");
    http::response_header<> head = parser.get().base();
    if (!out.head.upgrade) {
      head.erase("Keep-Alive");
      head.set(http::field::connection, "close");
    }
    std::ostringstream text;
    text << head;
    out.head.text = text.str();
    return out;
  }
}

}  // namespace tidelock::serve::e2b

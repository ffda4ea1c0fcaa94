// The E2B API's decisions and encodings, and its records on disk.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <signal.h>
#include <stdlib.h>

#include <fstream>

#include "base/base.hpp"
#include "serve/api_error.hpp"
#include "serve/e2b/control.hpp"
#include "serve/e2b/log_query.hpp"
#include "serve/e2b/proxy.hpp"
#include "serve/e2b/text.hpp"
#include "serve/e2b/watchers.hpp"

namespace tidelock::serve::e2b {
namespace {

namespace fs = std::filesystem;

template <typename Act>
std::string code_of(Act act) {
  try {
    act();
  } catch (const RpcError& error) {
    return error.code();
  } catch (const ApiError& error) {
    return std::to_string(error.status()) + error.code();
  }
  return "nothing";
}

ListItem item(const std::string& id, std::int64_t started, State state = State::running) {
  ListItem out;
  out.record.id = id, out.record.template_id = "base", out.record.started = started;
  out.record.metadata = {{"team", id.substr(0, 1)}, {"a", "b c"}};
  out.state = state;
  return out;
}

std::string ids(const Page& page) {
  std::string out;
  for (const ListItem& one : page.items) out += one.record.id + " ";
  return out;
}

TEST(E2bText, Base64GoesBothWaysAndRefusesWhatItIsNot) {
  EXPECT_TRUE(rc::check([] {
    const auto bytes = *rc::gen::container<std::string>(rc::gen::arbitrary<char>());
    RC_ASSERT(base64_decode(base64(bytes)) == bytes);
  }));
  EXPECT_EQ(base64("any"), "YW55");
  EXPECT_EQ(base64("an"), "YW4=");
  EXPECT_FALSE(base64_decode("YW5!"));
  EXPECT_FALSE(base64_decode("Y"));
}

TEST(E2bText, TimesAndQueries) {
  EXPECT_EQ(rfc3339(1'767'323'045'678), "2026-01-02T03:04:05.678Z");
  EXPECT_EQ(parse_rfc3339("2026-01-02T03:04:05.678Z"), 1'767'323'045'678);
  EXPECT_EQ(parse_rfc3339("2026-01-02T05:04:05.678901+02:00"), 1'767'323'045'678);
  for (const char* text : {"", "2026", "2026-01-02T03:04:05", "2026-01-02T03:04:05+2", "2026-01-02T03:04:05Zx"})
    EXPECT_FALSE(parse_rfc3339(text)) << text;
  EXPECT_EQ(parse_form("a=1&b=x%20y+z&c&a=2")->at("b"), "x y z");
  EXPECT_EQ(parse_form("a=1&a=2")->at("a"), "2");
  EXPECT_FALSE(parse_form("a=%2"));
  EXPECT_TRUE(same_secret("abc", "abc"));
  EXPECT_FALSE(same_secret("abc", "abd"));
  EXPECT_FALSE(same_secret("", "a"));
}

TEST(E2bList, FiltersByMetadataEncodedThreeTimesStateTemplateAndStart) {
  const std::vector<ListItem> all{item("x1", 10), item("y1", 20, State::paused), item("y2", 30)};
  // {"team": "y", "a": "b c"} as the client sends it, after the query was decoded
  const ListQuery query = parse_list_query({{"metadata", "team=y&a=b%2520c"}});
  EXPECT_EQ(query.metadata.at("a"), "b c");
  EXPECT_EQ(ids(list_page(all, query)), "y2 y1 ");
  EXPECT_EQ(ids(list_page(all, parse_list_query({{"metadata", "a=b"}}))), "");
  EXPECT_EQ(ids(list_page(all, parse_list_query({{"state", "paused"}}))), "y1 ");
  EXPECT_EQ(ids(list_page(all, parse_list_query({{"state", "running,paused"}, {"order", "asc"}}))), "x1 y1 y2 ");
  EXPECT_EQ(ids(list_page(all, parse_list_query({{"template", "other"}}))), "");
  EXPECT_EQ(ids(list_page(all, parse_list_query({{"startedAfter", "1970-01-01T00:00:00.020Z"}}))), "y2 y1 ");
  for (const auto& [name, value] : std::map<std::string, std::string>{
           {"state", "broken"}, {"limit", "0"}, {"limit ", "5"}, {"order", "up"}, {"startedAfter", "now"}})
    EXPECT_EQ(code_of([&] { parse_list_query({{name, value}}); }), "400") << name;
}

TEST(E2bList, PagesHoldEverySandboxOnceWhateverComesAndGoes) {
  EXPECT_TRUE(rc::check([] {
    std::vector<ListItem> all;
    const int count = *rc::gen::inRange(0, 30);
    for (int i = 0; i < count; ++i) all.push_back(item(fmt::format("v{:02}", i), *rc::gen::inRange(0, 5)));
    ListQuery query;
    query.limit = static_cast<std::size_t>(*rc::gen::inRange(1, 7));
    query.ascending = *rc::gen::arbitrary<bool>();
    std::vector<std::string> seen;
    do {
      const Page page = list_page(all, query);
      for (const ListItem& one : page.items) seen.push_back(one.record.id);
      query.after = page.next;
      // The one that the token names goes away: the next page begins behind it all the same.
      if (!page.next.empty())
        std::erase_if(all, [&](const ListItem& one) { return one.record.id == page.items.back().record.id; });
    } while (!query.after.empty());
    std::sort(seen.begin(), seen.end());
    RC_ASSERT(seen.size() == static_cast<std::size_t>(count));
    RC_ASSERT(std::unique(seen.begin(), seen.end()) == seen.end());
  }));
  ListQuery bad;
  bad.after = "nonsense";
  EXPECT_EQ(code_of([&] { list_page({item("a", 1)}, bad); }), "400");
}

TEST(E2bRecord, TimeOutsKillOrPauseRunningOnesAlone) {
  SandboxRecord record;
  record.ends = 1000;
  EXPECT_EQ(expiry_of(record, State::running, 999), Expiry::none);
  EXPECT_EQ(expiry_of(record, State::running, 1000), Expiry::kill);
  EXPECT_EQ(expiry_of(record, State::paused, 5000), Expiry::none);
  record.auto_pause = true;
  EXPECT_EQ(expiry_of(record, State::running, 1000), Expiry::pause);
}

TEST(E2bRecord, WhatIsDamagedOnDiskIsSetAsideAndTheRestIsRead) {
  char name[] = "/tmp/tidelock-e2b-test-XXXXXX";
  const fs::path folder = mkdtemp(name);
  RecordFolder records(folder / "records", folder / "quarantine");
  SandboxRecord record = item("v1", 5).record;
  record.environment = {{"K", "v\"\n"}};
  records.save("v1", to_json(record));
  records.save("v2", to_json(item("v2", 6).record));
  std::fstream(folder / "records/v2.json", std::ios::in | std::ios::out | std::ios::ate).seekp(30).put('#');
  std::ofstream(folder / "records/v3.json.tmp") << "half";
  const std::vector<Json> read = records.load();
  ASSERT_EQ(read.size(), 1U);
  EXPECT_EQ(parse_sandbox(read[0])->environment, record.environment);
  EXPECT_TRUE(fs::exists(folder / "quarantine/records-v2.json"));
  EXPECT_FALSE(fs::exists(folder / "records/v3.json.tmp"));
  EXPECT_FALSE(parse_sandbox(Json{{"id", 1}}));
  fs::remove_all(folder);
}

TEST(E2bConnect, EnvelopesAndEvents) {
  const std::string one = envelope(Json{{"a", 1}});
  EXPECT_EQ(one.substr(0, 5), std::string("\0\0\0\0\7", 5));
  EXPECT_EQ(open_envelope(one)["a"], 1);
  for (const std::string& bad : {std::string(), one.substr(0, 6), one + one, std::string("\0\0\0\0\2[]", 7)})
    EXPECT_EQ(code_of([&] { open_envelope(bad); }), "invalid_argument");
  EXPECT_EQ(code_of([] { open_envelope(std::string("\1\0\0\0\2{}", 7)); }), "unimplemented");
  EXPECT_EQ(code_of([] { parse_timeout("12x"); }), "invalid_argument");
  EXPECT_EQ(parse_timeout("1500"), 1500);
  using Kind = sandbox::ProcessEvent::Kind;
  EXPECT_EQ(process_event({.kind = Kind::error, .bytes = "any"})["event"]["data"]["stderr"], "YW55");
  EXPECT_EQ(process_event({.kind = Kind::terminal, .bytes = "any"})["event"]["data"]["pty"], "YW55");
  const Json killed = process_event({.kind = Kind::ended, .bytes = {}, .exit_code = 137, .signal = SIGKILL});
  EXPECT_EQ(killed["event"]["end"]["exitCode"], -1);
  EXPECT_EQ(killed["event"]["end"]["exited"], false);
  EXPECT_FALSE(process_event({.kind = Kind::ended, .bytes = {}, .exit_code = 0})["event"]["end"].contains("error"));
}

TEST(E2bEnvd, StartsArePutTogetherFromSandboxAndCall) {
  SandboxRecord record;
  record.environment = {{"A", "sandbox"}, {"B", "sandbox"}};
  const Json call =
      Json::parse(R"({"process":{"cmd":"/bin/bash","args":["-c","x"],"envs":{"B":"call"},"cwd":"w"},"stdin":false})");
  const sandbox::ProcessRequest made = parse_start(call, record, true);
  EXPECT_EQ(made.argv, (std::vector<std::string>{"/bin/bash", "-c", "x"}));
  EXPECT_EQ(made.environment.at("A"), "sandbox");
  EXPECT_EQ(made.environment.at("B"), "call");
  EXPECT_EQ(made.directory, "/root/w");
  EXPECT_TRUE(made.root);
  EXPECT_FALSE(made.open_input);
  for (const char* bad :
       {R"({})", R"({"process":[]})", R"({"process":{"cmd":""}})", R"({"process":{"cmd":"a","args":"b"}})",
        R"({"process":{"cmd":"a","envs":{"x":1}}})", R"({"process":{"cmd":"a"},"stdin":"yes"})"})
    EXPECT_EQ(code_of([&] { parse_start(Json::parse(bad), record, false); }), "invalid_argument") << bad;
}

TEST(E2bProcess, ATerminalHasASizeOfAtLeastOne) {
  const auto start = [](const std::string& terminal) {
    return parse_start(Json::parse(R"({"process":{"cmd":"a"},"pty":)" + terminal + "}"), {}, false);
  };
  const auto size = start(R"({"size":{"rows":24,"cols":65535}})").terminal;
  ASSERT_TRUE(size);
  EXPECT_EQ(size->rows, 24);
  EXPECT_EQ(size->columns, 65535);
  EXPECT_FALSE(start("null").terminal);
  for (const char* bad : {"{}", "1", R"({"size":{"rows":24}})", R"({"size":{"rows":24,"cols":0}})",
                          R"({"size":{"rows":24,"cols":65536}})", R"({"size":{"rows":"24","cols":80}})"})
    EXPECT_EQ(code_of([&] { start(bad); }), "invalid_argument") << bad;
}

TEST(E2bWatch, AsksAndEvents) {
  const auto asked = parse_watch(Json::parse(R"({"path":"w/","recursive":true,"includeEntry":true})"), true);
  EXPECT_EQ(asked.path, "/root/w");
  EXPECT_TRUE(asked.recursive && asked.entries && asked.root);
  EXPECT_FALSE(parse_watch(Json::parse(R"({"path":"/w"})"), false).recursive);
  for (const char* bad : {"{}", R"({"path":1})", R"({"path":""})", R"({"path":"a","recursive":"yes"})"})
    EXPECT_EQ(code_of([&] { parse_watch(Json::parse(bad), false); }), "invalid_argument") << bad;
  sandbox::FileChange change{.kind = sandbox::FileChange::Kind::rename, .name = "a/b", .entry = std::nullopt};
  EXPECT_EQ(change_json(change).dump(), R"({"name":"a/b","type":"EVENT_TYPE_RENAME"})");
  change.entry.emplace().size = 5;
  EXPECT_EQ(change_json(change)["entry"]["size"], "5");
}

TEST(E2bProxy, RequestsLoseWhatIsMeantForTheServerAndEndTheirConnection) {
  HttpRequest request{http::verb::post, "/a?b=c", 11};
  request.set(http::field::host, "8080-v1.example.org");
  request.set("E2b-Sandbox-Id", "v1");
  request.set("X-Access-Token", "secret");
  request.set("X-API-KEY", "secret");
  request.set(http::field::transfer_encoding, "chunked");
  request.set(http::field::connection, "keep-alive, Upgrade");  // without a protocol to change to
  ProxyHead head = forward_request(request);
  EXPECT_TRUE(head.text.starts_with("POST /a?b=c HTTP/1.1\r\nHost: 8080-v1.example.org\r\n")) << head.text;
  EXPECT_EQ(head.text.find("secret"), std::string::npos);
  EXPECT_EQ(head.text.find("Sandbox"), std::string::npos);
  EXPECT_NE(head.text.find("Connection: close\r\n"), std::string::npos);
  EXPECT_TRUE(head.text.ends_with("\r\n\r\n"));
  EXPECT_TRUE(head.chunked && !head.upgrade);
  request.set(http::field::upgrade, "websocket");
  head = forward_request(request);
  EXPECT_TRUE(head.upgrade);
  EXPECT_NE(head.text.find("Connection: Upgrade\r\n"), std::string::npos);
}

TEST(E2bProxy, AnswersArePassedOnAtAnyCutAndOnlyHttpIs) {
  const std::string interim = "HTTP/1.1 100 Continue\r\n\r\n", body = "3\r\nabc\r\n";
  const std::string answer = "HTTP/1.1 200 OK\r\nConnection: keep-alive\r\nKeep-Alive: timeout=5\r\nX: y\r\n\r\n";
  for (std::size_t cut = 0; cut < interim.size() + answer.size(); ++cut)
    EXPECT_FALSE(forward_answer((interim + answer).substr(0, cut), false)) << cut;
  const auto made = forward_answer(interim + answer + body, false);
  ASSERT_TRUE(made);
  EXPECT_EQ(made->used, interim.size() + answer.size());
  EXPECT_EQ(made->head.text, "HTTP/1.1 200 OK\r\nX: y\r\nConnection: close\r\n\r\n");
  const std::string change = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n";
  EXPECT_TRUE(forward_answer(change + "frame", true)->head.upgrade);
  EXPECT_EQ(code_of([&] { forward_answer(change, false); }), "502");
  EXPECT_EQ(code_of([&] { forward_answer("SSH-2.0\r\n\r\n", false); }), "502");
  EXPECT_EQ(code_of([&] { forward_answer(std::string(kMaxAnswerHead + 1, 'x'), false); }), "502");
}

TEST(E2bEnvd, PathsUsersAndParts) {
  EXPECT_EQ(guest_path("a/b/"), "/root/a/b");
  EXPECT_EQ(guest_path("~/x"), "/root/x");
  EXPECT_EQ(guest_path("~"), "/root");
  EXPECT_EQ(guest_path("/"), "/");
  EXPECT_EQ(code_of([] { guest_path(""); }), "invalid_argument");
  EXPECT_TRUE(is_root_of("Basic " + base64("root:")));
  EXPECT_FALSE(is_root_of("Basic " + base64("user:")));
  EXPECT_EQ(code_of([] { is_root_of("Basic " + base64("mallory:")); }), "unauthenticated");
  const std::string body =
      "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"/a \\\"b\"\r\nX: y\r\n\r\none\r\n--\r\n"
      "\r\n--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"two\"\r\n\r\n\r\n--b--\r\n";
  const std::vector<Part> parts = parse_multipart("multipart/form-data; boundary=b", body);
  ASSERT_EQ(parts.size(), 2U);
  EXPECT_EQ(parts[0].filename, "/a \"b");
  EXPECT_EQ(parts[0].content, "one\r\n--\r\n");
  EXPECT_EQ(parts[1].content, "");
  for (std::size_t cut = 0; cut < body.size() - 4; ++cut)
    EXPECT_EQ(code_of([&] { parse_multipart("multipart/form-data; boundary=b", body.substr(0, cut)); }),
              "invalid_argument")
        << cut;
  EXPECT_EQ(code_of([&] { parse_multipart("multipart/form-data", body); }), "invalid_argument");
}

TEST(E2bEnvd, UsageIsReadFromWhatTheGuestPrints) {
  const Usage usage = parse_usage(
      "cpu  100 0 100 700 100 0 0 0\nMemTotal: 1000 kB\nMemAvailable: 400 kB\nCached: 50 kB\n"
      "Filesystem 1024-blocks Used Available Capacity Mounted on\n/dev/root 2000 500 1500 25% /\ncpu 150 0 100 740 110 "
      "0 0 0\n");
  EXPECT_EQ(usage.cpu_percent, 50.0);
  EXPECT_EQ(usage.memory_used, 600 << 10);
  EXPECT_EQ(usage.disk_used, 500 << 10);
  EXPECT_THROW(parse_usage("sh: head: not found"), Error);
}

TEST(E2bLog, ReadsFromATimeOnOrBackWithLevelAndText) {
  using sandbox::LogLevel;
  const std::vector<sandbox::LogEntry> all{{10, LogLevel::info, "create done", {}},
                                           {20, LogLevel::debug, "noise", {}},
                                           {20, LogLevel::error, "pause failed", {{"reason", "the disk is full"}}},
                                           {30, LogLevel::warning, "pause undone", {}}};
  const auto chosen = [&](const std::map<std::string, std::string>& query, bool second_version = true) {
    std::string out;
    for (const sandbox::LogEntry& entry : select_entries(all, parse_log_query(query, second_version)))
      out += entry.message + "; ";
    return out;
  };
  EXPECT_EQ(chosen({}), "create done; noise; pause failed; pause undone; ");
  EXPECT_EQ(chosen({{"start", "20"}, {"limit", "2"}}, false), "noise; pause failed; ");
  EXPECT_EQ(chosen({{"cursor", "20"}, {"level", "warn"}}), "pause failed; pause undone; ");
  EXPECT_EQ(chosen({{"cursor", "20"}, {"direction", "backward"}}), "pause failed; noise; create done; ");
  EXPECT_EQ(chosen({{"direction", "backward"}, {"limit", "1"}}), "pause undone; ");
  EXPECT_EQ(chosen({{"search", "full"}}), "pause failed; ");
  EXPECT_EQ(chosen({{"limit", "0"}}), "");
  for (const auto& [name, value] : std::vector<std::pair<std::string, std::string>>{{"cursor", "-1"},
                                                                                    {"cursor", "1x"},
                                                                                    {"limit", "1001"},
                                                                                    {"limit", ""},
                                                                                    {"direction", "up"},
                                                                                    {"level", "loud"},
                                                                                    {"start", "1"},
                                                                                    {"search", std::string(257, 'x')}})
    EXPECT_EQ(code_of([&] { parse_log_query({{name, value}}, true); }), "400") << name << value;
  for (const char* name : {"cursor", "level", "search"})
    EXPECT_EQ(code_of([&] { parse_log_query({{name, "1"}}, false); }), "400") << name;
}

TEST(E2bControl, SandboxesAreAskedForInTwoVersions) {
  EXPECT_EQ(parse_new_sandbox(R"({"templateID":"base"})", true).timeout, 300);
  EXPECT_TRUE(parse_new_sandbox(R"({"templateID":"base"})", true).secure);
  EXPECT_EQ(parse_new_sandbox(R"({"templateID":"base"})", false).timeout, 15);
  EXPECT_FALSE(parse_new_sandbox(R"({"templateID":"base"})", false).secure);
  const NewSandbox full = parse_new_sandbox(
      R"({"templateID":"t","timeout":7,"autoPause":true,"autoResume":{"enabled":true},"metadata":{"a":"b"},"envVars":{"c":"d"},"network":{},"mcp":null})",
      true);
  EXPECT_TRUE(full.auto_pause && full.auto_resume && full.metadata.at("a") == "b" && full.environment.at("c") == "d");
  for (const char* bad :
       {"", "[]", R"({"templateID":1})", R"({"templateID":"t","timeout":"x"})",
        R"({"templateID":"t","envVars":{"a":1}})", R"({"templateID":"t","autoResume":{"enabled":true}})"})
    EXPECT_TRUE(code_of([&] { parse_new_sandbox(bad, true); }).starts_with("400")) << bad;
  for (const char* unbuilt : {R"({"templateID":"t","iam":{"tokens":1}})", R"({"templateID":"t","volumeMounts":[1]})",
                              R"({"templateID":"t","autoPauseMemory":false})", R"({"templateID":"t","other":1})"})
    EXPECT_EQ(code_of([&] { parse_new_sandbox(unbuilt, true); }), "400unsupported_parameter") << unbuilt;
}

}  // namespace
}  // namespace tidelock::serve::e2b

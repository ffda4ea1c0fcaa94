// The wire format. Properties: what is encoded is decoded; a message cut, stretched or altered anywhere is refused or
// still well-formed, and nothing is ever read past its end or reserved on its word.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <thread>

#include "base/error.hpp"
#include "sandbox/container.hpp"
#include "sandbox/wire.hpp"

namespace tidelock::sandbox {
namespace wire_test {

RunRequest any_run() {
  RunRequest run;
  run.kind = RunKind::command;
  run.argv = *rc::gen::nonEmpty(rc::gen::arbitrary<std::vector<std::string>>());
  run.environment = *rc::gen::arbitrary<std::vector<std::string>>();
  run.path = *rc::gen::arbitrary<std::string>();
  run.mode = *rc::gen::arbitrary<std::uint32_t>();
  run.limit = *rc::gen::arbitrary<std::uint64_t>();
  return run;
}

RC_GTEST_PROP(Wire, RunComesBack, ()) {
  const RunRequest run = any_run();
  const RunRequest back = decode_run(encode(run));
  RC_ASSERT(back.argv == run.argv);
  RC_ASSERT(back.environment == run.environment);
  RC_ASSERT(back.path == run.path);
  RC_ASSERT(back.mode == run.mode);
  RC_ASSERT(back.limit == run.limit);
}

RC_GTEST_PROP(Wire, ACutOrStretchedMessageIsRefused, ()) {
  const std::string body = encode(any_run());
  const auto cut = *rc::gen::inRange<std::size_t>(0, body.size());
  RC_ASSERT_THROWS_AS(decode_run(body.substr(0, cut)), Error);
  RC_ASSERT_THROWS_AS(decode_run(body + "x"), Error);
}

RC_GTEST_PROP(Wire, AnAlteredMessageNeverCrashes, ()) {
  std::string body = encode(any_run());
  body[*rc::gen::inRange<std::size_t>(0, body.size())] = *rc::gen::arbitrary<char>();
  try {
    const RunRequest run = decode_run(body);
    RC_ASSERT(encode(run) == body);
  } catch (const Error& error) {
    RC_ASSERT(error.code() == ErrorCode::corrupt_data);
  }
}

TEST(Wire, OtherBodiesComeBack) {
  const CreateRequest create = decode_create(encode(CreateRequest{"s1", "/image", {1, 2, 3, 0.5}, 7}));
  EXPECT_EQ(create.id, "s1");
  EXPECT_EQ(create.limits.processes, 3);
  EXPECT_EQ(create.limits.cpus, 0.5);
  EXPECT_EQ(create.uid, 7U);
  EXPECT_THROW(decode_create(encode(CreateRequest{"../x", "/image", {}, 0})), Error);
  EXPECT_THROW(decode_create(encode(CreateRequest{"", "/image", {}, 0})), Error);
  EXPECT_EQ(decode_exited(encode(Exited{137, 9})).signal, 9);
  EXPECT_EQ(decode_created(encode(Created{12, 13})).uid, 13U);
  EXPECT_EQ(decode_hello(encode(Hello{"/run", {false, true, true}})).features.cgroup_freezer, true);
  EXPECT_EQ(decode_welcome(encode(Welcome{"text", Freezer::version2})).freezer, Freezer::version2);
  EXPECT_THROW(decode_welcome(encode(Welcome{"text", static_cast<Freezer>(9)})), Error);
}

TEST(Wire, FramesAndDescriptorsCrossASocket) {
  auto [one, other] = make_socket_pair();
  const std::string big(3 << 20, 'b');
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  std::thread sender([&, socket = one.get()] {
    send_message(socket, MessageType::run, big, {ends, 2});
    send_message(socket, MessageType::kill);
  });
  const std::optional<Message> first = receive_message(other.get());
  const std::optional<Message> second = receive_message(other.get());
  sender.join();
  ASSERT_TRUE(first && second);
  EXPECT_EQ(first->body, big);
  ASSERT_EQ(first->descriptors.size(), 2U);
  EXPECT_EQ(write(first->descriptors[1].get(), "x", 1), 1);
  char byte = 0;
  EXPECT_EQ(read(ends[0], &byte, 1), 1);
  EXPECT_EQ(second->type, MessageType::kill);
  EXPECT_TRUE(second->descriptors.empty());
  one.reset();
  EXPECT_FALSE(receive_message(other.get()));
  close(ends[0]);
  close(ends[1]);
}

TEST(Wire, LyingFramesAreRefused) {
  for (const FrameHeader& header :
       {FrameHeader{0, 0}, FrameHeader{99, 0}, FrameHeader{1, kMaxBody + 1}, FrameHeader{1, 100}}) {
    auto [one, other] = make_socket_pair();
    ASSERT_EQ(write(one.get(), &header, sizeof header), static_cast<ssize_t>(sizeof header));
    one.reset();
    EXPECT_THROW(receive_message(other.get()), Error);
  }
  auto [one, other] = make_socket_pair();
  EXPECT_THROW(send_message(one.get(), MessageType::run, std::string(kMaxBody + 1, 'x')), Error);
  other.reset();
  EXPECT_THROW(send_message(one.get(), MessageType::run, "x"), Error);
}

}  // namespace wire_test
}  // namespace tidelock::sandbox

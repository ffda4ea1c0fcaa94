// What a container does for its user. Properties: a command behaves in it as in any shell; every way to end is
// reported; output is bounded; a background process neither blocks a call nor is harmed by its end; files are separate.
#include <rapidcheck.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <atomic>
#include <fstream>
#include <thread>

#include "sandbox/container.hpp"
#include "sandbox/support.hpp"

namespace tidelock::sandbox::testing {
namespace container_test {

class Container : public ::testing::Test {
 protected:
  Folder folder_;
  std::unique_ptr<Runtime> runtime_ = make_container_runtime({folder_.path(), {}});
  std::unique_ptr<Sandbox> box_ = runtime_->create({});
};

TEST_F(Container, RunsACommandAndReturnsBothStreams) {
  const ExecResult result = box_->exec(shell("echo $((37*58)); echo wrong >&2; exit 3"));
  EXPECT_EQ(result.output, "2146\n");
  EXPECT_EQ(result.error, "wrong\n");
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_EQ(result.signal, 0);
  EXPECT_FALSE(result.timed_out);
  EXPECT_FALSE(result.truncated);
  EXPECT_GT(result.seconds, 0);
}

TEST_F(Container, ReportsASignalAsShellsDo) {
  const ExecResult result = box_->exec(shell("kill -SEGV $$"));
  EXPECT_EQ(result.signal, SIGSEGV);
  EXPECT_EQ(result.exit_code, 128 + SIGSEGV);
}

TEST_F(Container, ACommandThatCannotStartSaysWhy) {
  const ExecResult missing = box_->exec(command({"no-such-program"}));
  EXPECT_EQ(missing.exit_code, 127);
  EXPECT_NE(missing.error.find("no-such-program"), std::string::npos);
  EXPECT_EQ(box_->exec(command({"/etc/passwd"})).exit_code, 126);
  ExecRequest elsewhere = shell("true");
  elsewhere.directory = "/no/such/folder";
  EXPECT_EQ(box_->exec(elsewhere).exit_code, 126);
  EXPECT_EQ(box_->exec(shell("echo well")).output, "well\n");
}

TEST_F(Container, PassesEnvironmentDirectoryAndInput) {
  ExecRequest request = shell("echo $COLOUR $HOME; pwd; wc -c; cat");
  request.environment = {{"COLOUR", "red green"}};
  request.directory = "/tmp";
  request.input = std::string(3 << 20, 'x');
  const ExecResult result = box_->exec(request);
  EXPECT_EQ(result.output, "red green /root\n/tmp\n3145728\n");
  EXPECT_EQ(box_->exec(shell("cat; echo $COLOUR")).output, "\n");
}

TEST_F(Container, ArgumentsArriveUnchanged) {
  rc::check("echo returns its arguments", [&] {
    auto words = *rc::gen::container<std::vector<std::string>>(
        rc::gen::container<std::string>(rc::gen::distinctFrom(rc::gen::arbitrary<char>(), '\0')));
    words.resize(std::min<std::size_t>(words.size(), 40));
    std::vector<std::string> argv{"printf", "%s|"};
    std::string expected = words.empty() ? "|" : "";
    for (const std::string& word : words) {
      argv.push_back(word);
      expected += word + "|";
    }
    RC_ASSERT(box_->exec(command(argv)).output == expected);
  });
}

TEST_F(Container, RefusesRequestsThatCannotBe) {
  EXPECT_EQ(code_of([&] { box_->exec({}); }), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([&] { box_->exec(command({std::string("a\0b", 3)})); }), ErrorCode::invalid_argument);
  ExecRequest request = shell("true");
  request.environment = {{"A=B", "x"}};
  EXPECT_EQ(code_of([&] { box_->exec(request); }), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([&] { box_->exec(command({"echo", std::string(8 << 20, 'x')})); }), ErrorCode::invalid_argument);
  EXPECT_EQ(box_->exec(command({"echo", std::string(200'000, 'x')})).exit_code,
            126);  // the kernel's limit per argument
  Spec spec;
  spec.image = "no-such-image";
  EXPECT_EQ(code_of([&] { runtime_->create(spec); }), ErrorCode::not_found);
  spec = {};
  spec.limits.processes = 0;
  EXPECT_EQ(code_of([&] { runtime_->create(spec); }), ErrorCode::invalid_argument);
  EXPECT_EQ(box_->exec(shell("echo well")).output, "well\n");
}

TEST_F(Container, KeepsOutputUpToTheLimitOfEachStream) {
  ExecRequest request = shell("head -c 1000000 /dev/zero; head -c 10 /dev/zero >&2; exit 7");
  request.output_limit = 1000;
  std::size_t arrived = 0;
  request.on_output = [&](Stream, std::string_view text) { arrived += text.size(); };
  const ExecResult result = box_->exec(request);
  EXPECT_EQ(result.output.size(), 1000U);
  EXPECT_EQ(result.error.size(), 10U);
  EXPECT_TRUE(result.truncated);
  EXPECT_EQ(result.exit_code, 7);
  EXPECT_EQ(arrived, 1010U);
  request.output_limit = 1'000'000;
  EXPECT_FALSE(box_->exec(request).truncated);
}

TEST_F(Container, OutputArrivesWhileTheCommandRuns) {
  // The command waits for a file that only the first piece of output makes us write: no output in time, no end.
  ExecRequest request = shell("echo first; read x < /root/pipe; echo $x");
  ASSERT_EQ(box_->exec(shell("mkfifo /root/pipe")).exit_code, 0);
  ASSERT_EQ(box_->exec(shell("(sleep 0.1; echo second > /root/pipe) > /dev/null 2>&1 &")).exit_code, 0);
  std::vector<std::string> pieces;
  request.on_output = [&](Stream, std::string_view text) { pieces.emplace_back(text); };
  EXPECT_EQ(box_->exec(request).output, "first\nsecond\n");
  EXPECT_EQ(pieces, (std::vector<std::string>{"first\n", "second\n"}));
}

TEST_F(Container, AnExceptionOfTheListenerEndsTheCommandAndPasses) {
  const std::string marker = unique_marker();
  ExecRequest request = shell("echo x; exec sleep " + marker);
  request.on_output = [](Stream, std::string_view) { throw std::runtime_error("enough"); };
  EXPECT_THROW(box_->exec(request), std::runtime_error);
  EXPECT_TRUE(processes_with(marker).empty());
  EXPECT_EQ(box_->exec(shell("echo well")).output, "well\n");
}

TEST_F(Container, TimeOutEndsTheWholeSession) {
  const std::string marker = unique_marker();
  const ExecResult result =
      box_->exec(shell("sleep " + marker + " & (sleep " + marker + " & wait) & echo on; wait", 300ms));
  EXPECT_TRUE(result.timed_out);
  EXPECT_EQ(result.signal, SIGKILL);
  EXPECT_EQ(result.output, "on\n");
  EXPECT_TRUE(eventually([&] { return processes_with(marker).empty(); }));
  EXPECT_EQ(box_->exec(shell("echo well")).output, "well\n");
}

TEST_F(Container, ABackgroundProcessStaysAndDoesNotBlock) {
  const std::string marker = unique_marker();
  const ExecResult result = box_->exec(shell("sleep " + marker + " & echo started"));
  EXPECT_EQ(result.output, "started\n");
  EXPECT_FALSE(result.timed_out);
  // The shell may say so while its child is still becoming the other program.
  EXPECT_TRUE(eventually([&] { return processes_with(marker).size() == 1; }));
  // Long after its exec it prints more than a pipe holds: it must neither block nor die of a closed pipe.
  box_->exec(
      shell("(while [ ! -e /root/go ]; do sleep 0.02; done; head -c 3000000 /dev/zero; echo $? > /root/printed) &"));
  box_->exec(shell("touch /root/go"));
  EXPECT_TRUE(eventually([&] { return box_->exec(shell("cat /root/printed")).output == "0\n"; }));
}

TEST_F(Container, AServerInTheSandboxCanBeReachedFromWithin) {
  box_->exec(shell("(echo hello | nc -l -p 8080) > /dev/null 2>&1 &"));
  EXPECT_TRUE(eventually([&] { return box_->exec(shell("nc 127.0.0.1 8080 < /dev/null")).output == "hello\n"; }));
}

TEST_F(Container, SandboxesDoNotSeeEachOther) {
  auto other = runtime_->create({});
  box_->write_file("/root/mine", "secret");
  box_->exec(
      shell("(nc -l -p 8080 > /dev/null 2>&1) & (nc -lU @abstract > /dev/null 2>&1) & sleep 1000 > /dev/null 2>&1 &"));
  EXPECT_NE(other->exec(shell("cat /root/mine")).exit_code, 0);
  EXPECT_NE(other->exec(shell("nc 127.0.0.1 8080 < /dev/null")).exit_code, 0);
  const char* sleepers = "ps -o comm | grep -c '^sleep'";
  EXPECT_TRUE(eventually([&] { return box_->exec(shell(sleepers)).output == "1\n"; }));
  EXPECT_EQ(other->exec(shell(sleepers)).output, "0\n");
  EXPECT_NE(box_->exec(command({"id", "-u"})).output, other->exec(command({"id", "-u"})).output);
}

TEST_F(Container, ADirectoryIsAReadOnlyImage) {
  const fs::path image = folder_.path() / "image";
  fs::create_directories(image / "bin");
  fs::create_directories(image / "etc");
  fs::copy_file("/bin/busybox", image / "bin/sh");
  fs::permissions(image / "bin/sh", fs::perms(0755));
  std::ofstream(image / "data") << "original";
  fs::permissions(image / "data", fs::perms(0666));
  // An image must not be able to fetch the host's files by a link.
  std::ofstream(folder_.path() / "host-secret") << "host-secret:x:1:1::/:/bin/sh\n";
  fs::create_symlink(folder_.path() / "host-secret", image / "etc/passwd");
  Spec spec;
  spec.image = image.string();
  auto box = runtime_->create(spec);
  EXPECT_EQ(box->exec(shell("echo changed > /data; while read x; do echo $x; done < /data")).output, "changed\n");
  EXPECT_EQ(slurp(image / "data"), "original");
  EXPECT_EQ(box->read_file("/etc/passwd").find("host-secret"), std::string::npos);
  EXPECT_FALSE(fs::exists(image / "root"));
  auto fresh = runtime_->create(spec);
  EXPECT_EQ(fresh->read_file("/data"), "original");
}

TEST_F(Container, FreezeStopsProcessesAndExecThaws) {
  expect_freeze_works(*box_);
}

TEST_F(Container, TimesAreAccountedFor) {
  EXPECT_EQ(box_->times().frozen, 0);
  box_->freeze();
  box_->freeze();  // a second time changes nothing
  std::this_thread::sleep_for(100ms);
  EXPECT_GE(box_->times().frozen, 0.1);
  box_->thaw();
  box_->thaw();
  const double frozen = box_->times().frozen;
  box_->exec(shell("sleep 0.2"));
  const Times end = box_->times();
  EXPECT_EQ(end.frozen, frozen);
  EXPECT_GE(end.busy, 0.2);
  EXPECT_GE(end.alive, end.busy + end.frozen);
}

TEST_F(Container, ManyLiveAtOnceFromManyThreads) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit usual{std::min<rlim_t>(1024, before.rlim_max), before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &usual), 0);  // what a login shell has; this machine may allow more
  auto runtime = make_container_runtime({folder_.path(), {}});
  constexpr int kThreads = 4, kEach = 64;
  std::vector<std::vector<std::unique_ptr<Sandbox>>> boxes(kThreads);
  std::atomic<int> right{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      try {
        for (int i = 0; i < kEach; ++i) {
          boxes[t].push_back(runtime->create({}));
          const std::string mine = std::to_string(t * kEach + i);
          boxes[t].back()->exec(shell("echo " + mine + " > /root/number"));
          boxes[t].back()->freeze();
        }
        for (int i = 0; i < kEach; ++i) {
          right += boxes[t][i]->exec(shell("cat number")).output == std::to_string(t * kEach + i) + "\n" ? 1 : 0;
        }
      } catch (const Error& error) {
        ADD_FAILURE() << error.what();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(right, kThreads * kEach);
}

}  // namespace container_test
}  // namespace tidelock::sandbox::testing

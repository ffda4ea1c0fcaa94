// Files put into and taken from a sandbox. Properties: what is written is read back, byte for byte; no path, link or
// special file leads out of the sandbox's own root; a full disk is an error and harms nobody.
#include <rapidcheck.h>

#include <fstream>

#include "sandbox/support.hpp"

namespace tidelock::sandbox::testing {
namespace files_test {

class Files : public ::testing::Test {
 protected:
  Folder folder_;
  std::unique_ptr<Runtime> runtime_ = make_container_runtime({folder_.path(), {}});
  std::unique_ptr<Sandbox> box_ = runtime_->create({});
};

TEST_F(Files, WhatIsWrittenIsReadBack) {
  rc::check("round trip", [&] {
    const auto content = *rc::gen::container<std::string>(rc::gen::arbitrary<char>());
    const auto depth = *rc::gen::inRange(0, 5);
    std::string path = "/root";
    for (int i = 0; i < depth; ++i) {
      path += "/d" + std::to_string(*rc::gen::inRange(0, 3));
    }
    path += "/f" + std::to_string(*rc::gen::inRange(0, 5));
    box_->write_file(path, content);
    RC_ASSERT(box_->read_file(path) == content);
  });
  const std::string big(20 << 20, 'y');
  box_->write_file("big", big);  // relative: to /root
  EXPECT_EQ(box_->read_file("/root/big", 32 << 20), big);
}

TEST_F(Files, BelongToTheUserWithTheirMode) {
  box_->write_file("/work/deep/run.sh", "#!/bin/sh\necho ran\n", 0755);
  EXPECT_EQ(box_->exec(command({"/work/deep/run.sh"})).output, "ran\n");
  EXPECT_EQ(
      box_->exec(shell("echo 'echo new' >> /work/deep/run.sh && touch /work/other && stat -c %a /work/deep/run.sh"))
          .output,
      "755\n");
  box_->write_file("/work/deep/run.sh", "short", 0600);
  EXPECT_EQ(box_->exec(shell("stat -c '%a %s' /work/deep/run.sh")).output, "600 5\n");
  // A file that the user has locked itself out of can still be read for grading.
  box_->exec(shell("echo answer > /root/a; chmod 000 /root/a"));
  EXPECT_EQ(box_->read_file("/root/a"), "answer\n");
}

TEST_F(Files, NamedErrors) {
  EXPECT_EQ(code_of([&] { box_->read_file("/root/none"); }), ErrorCode::not_found);
  EXPECT_EQ(code_of([&] { box_->read_file("/root"); }), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([&] { box_->read_file(""); }), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([&] { box_->write_file("/root/", "x"); }), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([&] { box_->write_file(std::string("/root/a\0b", 9), "x"); }), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([&] { box_->write_file("/etc/passwd/x", "x"); }), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([&] { box_->write_file("/root/" + std::string(5000, 'n'), "x"); }), ErrorCode::invalid_argument);
  box_->write_file("/root/ten", "0123456789");
  EXPECT_EQ(box_->read_file("/root/ten", 10), "0123456789");
  EXPECT_EQ(code_of([&] { box_->read_file("/root/ten", 9); }), ErrorCode::exhausted);
}

TEST_F(Files, NothingLeadsOutOfTheRoot) {
  const fs::path secret = folder_.path() / "secret";
  { std::ofstream(secret) << "host"; }
  ASSERT_EQ(slurp(secret), "host");
  const std::string up = "../../../../../../../../..";
  const std::string host = secret.string();
  box_->exec(shell("cd /root; ln -s " + host + " absolute; ln -s " + up + host + " relative; ln -s /proc/1/root" +
                   host +
                   " proc; ln -s /proc/sys/kernel/hostname sys; ln -s /dev/zero device; ln -s loop loop; mkfifo fifo;"
                   "ln -s /proc/1/oom_score_adj adj; ln -s / slash; ln -s /proc/1/mem mem"));
  const std::vector<std::string> ways{host,
                                      up + host,
                                      "/proc/1/root" + host,
                                      "/proc/self/root" + host,
                                      "/proc/self/cwd/../.." + host,
                                      "/root/absolute",
                                      "/root/relative",
                                      "/root/proc",
                                      "/root/slash" + host};
  for (const std::string& path : ways) {
    EXPECT_NE(code_of([&] { box_->read_file(path); }), ErrorCode::internal) << path;
  }
  for (const std::string& path : ways) {
    try {
      box_->write_file(path, "overwritten");
    } catch (const Error&) {
      continue;  // inside the root a file of that name may well be made; outside none may
    }
  }
  EXPECT_EQ(slurp(secret), "host");
  for (const char* path :
       {"/root/sys", "/root/device", "/root/loop", "/root/fifo", "/root/adj", "/root/mem", "/dev/null", "/dev/new",
        "/proc/self/comm", "/proc/sys/kernel/hostname", "/proc/sysrq-trigger"}) {
    EXPECT_EQ(code_of([&] { box_->write_file(path, "x"); }), ErrorCode::invalid_argument) << path;
    EXPECT_NE(code_of([&] { box_->read_file(path); }), ErrorCode::internal) << path;
  }
}

TEST_F(Files, ARacingLinkDoesNotLeadOut) {
  // The last folder of the path keeps changing between a folder and a link into /proc and /dev.
  box_->exec(
      shell("mkdir /root/real; (while :; do ln -sfn /proc/self /root/flip; rm -f /root/flip; mkdir /root/flip;"
            " rm -rf /root/flip; ln -sfn /dev/shm /root/flip; rm -f /root/flip; done) > /dev/null 2>&1 &"));
  for (int i = 0; i < 200; ++i) {
    try {
      box_->write_file("/root/flip/comm", "owned");
    } catch (const Error&) {
      continue;  // refusals are fine; what matters is where bytes went
    }
  }
  EXPECT_EQ(box_->exec(shell("cat /proc/1/comm")).output, "init\n");
  EXPECT_EQ(box_->exec(shell("ls /dev/shm")).output, "");
}

TEST_F(Files, AFullDiskIsAnError) {
  EXPECT_EQ(code_of([&] { box_->write_file("/root/big", std::string(70 << 20, 'x')); }), ErrorCode::exhausted);
  EXPECT_EQ(box_->exec(shell("rm /root/big")).exit_code, 0);
  box_->write_file("/root/small", "fits");
  EXPECT_EQ(box_->read_file("/root/small"), "fits");
  Spec spec;
  spec.limits.disk_bytes = 128 << 20;  // the same bytes on a larger disk
  auto larger = runtime_->create(spec);
  larger->write_file("/root/big", std::string(70 << 20, 'x'));
}

TEST_F(Files, AForkStartsWithTheSameFilesAndGoesItsOwnWay) {
  box_->exec(
      shell("cd /root; echo one > a; ln a hard; ln -s a soft; mkdir -p d/e; echo deep > d/e/f; chmod 640 a; mkfifo p;"
            "truncate -s 30M sparse; printf tail >> sparse; touch -d '2001-02-03 04:05:06' a; mkdir /tmp/x"));
  box_->write_file("/opt/replaced", "x");
  // Removed files of the image stay removed, and a folder made anew in place of one of the image is empty.
  Spec spec;
  const fs::path image = folder_.path() / "image";
  fs::create_directories(image / "bin");
  fs::create_directories(image / "data/old");
  fs::create_directories(image / "data/kept");
  fs::copy_file("/bin/busybox", image / "bin/busybox");
  fs::permissions(image / "bin/busybox", fs::perms(0755));
  for (const char* applet : {"sh", "rm", "mkdir", "ls", "cat"}) {
    fs::create_symlink("/bin/busybox", image / "bin" / applet);
  }
  { std::ofstream(image / "data/old/file") << "x"; }
  fs::permissions(image / "data", fs::perms(0777));
  fs::permissions(image / "data/old", fs::perms(0777));
  spec.image = image.string();
  auto whiteouts = runtime_->create(spec);
  ASSERT_EQ(whiteouts->exec(shell("cd /data && rm -r old && mkdir old && rm -r kept")).exit_code, 0);
  ASSERT_EQ(whiteouts->exec(shell("ls /data /data/old")).output, "/data:\nold\n\n/data/old:\n");
  EXPECT_EQ(whiteouts->fork_filesystem()->exec(shell("ls /data /data/old")).output, "/data:\nold\n\n/data/old:\n");

  auto copy = box_->fork_filesystem();
  const char* look =
      "cd /root; cat a soft d/e/f; stat -c '%n %a %h %Y %F' a hard soft p d; id -u; stat -c %u a;"
      "stat -c %s sparse; tail -c 4 sparse; du -k sparse; ls -ld /tmp/x; whoami";
  EXPECT_EQ(copy->exec(shell(look)).output, box_->exec(shell(look)).output);
  EXPECT_NE(copy->exec(shell("cat a")).output, "");
  copy->exec(shell("echo two > a; touch new"));
  box_->exec(shell("echo three > d/e/f"));
  EXPECT_EQ(box_->read_file("a"), "one\n");
  EXPECT_EQ(copy->read_file("d/e/f"), "deep\n");
  EXPECT_EQ(code_of([&] { box_->read_file("new"); }), ErrorCode::not_found);
  box_.reset();
  EXPECT_EQ(copy->exec(shell("cat hard")).output, "two\n");
  EXPECT_EQ(copy->fork_filesystem()->read_file("hard"), "two\n");
}

TEST_F(Files, AForkCopiesNoProcessesAndKeepsTheConditionOfItsSource) {
  const std::string marker = unique_marker();
  box_->exec(shell("sleep " + marker + " > /dev/null 2>&1 &"));
  box_->write_file("a", "x");
  box_->freeze();
  auto copy = box_->fork_filesystem();
  EXPECT_EQ(processes_with(marker).size(), 1U);
  EXPECT_EQ(copy->read_file("a"), "x");
  const double before = box_->times().frozen;
  EXPECT_TRUE(eventually([&] { return box_->times().frozen > before; }));  // still frozen
  box_->thaw();
  auto another = box_->fork_filesystem();
  const double after = box_->times().frozen;
  EXPECT_EQ(box_->times().frozen, after);  // and not frozen
  EXPECT_FALSE(runtime_->capabilities().fork_memory);
}

}  // namespace files_test
}  // namespace tidelock::sandbox::testing

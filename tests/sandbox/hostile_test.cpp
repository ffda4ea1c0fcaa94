// Tools that mean harm. Property of every test: the program gets an answer in bounded time, goes on working with this
// and with other sandboxes, and the host is as it was. Each attack is also shown to bite where its limit is wider, or
// to be seen by the check that looks for it.
#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <atomic>
#include <ctime>
#include <fstream>
#include <thread>

#include "sandbox/container.hpp"
#include "sandbox/support.hpp"

namespace tidelock::sandbox::testing {
namespace hostile_test {

class Hostile : public ::testing::Test {
 protected:
  // After an attack, both the attacked sandbox and its neighbour answer.
  void expect_well() {
    EXPECT_EQ(box_->exec(shell("echo well")).output, "well\n");
    EXPECT_EQ(neighbour_->exec(shell("echo well")).output, "well\n");
    EXPECT_EQ(runtime_->create({})->exec(shell("echo well")).output, "well\n");
  }

  Folder folder_;
  std::unique_ptr<Runtime> runtime_ = make_container_runtime({folder_.path(), {}});
  std::unique_ptr<Sandbox> box_ = runtime_->create({});
  std::unique_ptr<Sandbox> neighbour_ = runtime_->create({});
};

long resident_kilobytes() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word == "VmRSS:") {
      long value = 0;
      status >> value;
      return value;
    }
  }
  return 0;
}

TEST_F(Hostile, PrintsGigabytes) {
  const long before = resident_kilobytes();
  const ExecResult finite = box_->exec(shell("head -c 300000000 /dev/zero; exit 5", 60s));
  EXPECT_EQ(finite.exit_code, 5);
  EXPECT_EQ(finite.output.size(), 64U << 10);
  EXPECT_TRUE(finite.truncated);
  const ExecResult endless = box_->exec(shell("yes & yes >&2", 500ms));
  EXPECT_TRUE(endless.timed_out);
  EXPECT_EQ(endless.error.size(), 64U << 10);
  EXPECT_LT(resident_kilobytes() - before, 64 << 10);
  expect_well();
}

TEST_F(Hostile, NeverEndsAndIgnoresSignals) {
  const std::string marker = unique_marker();
  const ExecResult result = box_->exec(
      shell("trap '' TERM INT HUP QUIT USR1 ALRM; sh -c 'sleep " + marker + "' & while :; do :; done", 300ms));
  EXPECT_TRUE(result.timed_out);
  EXPECT_TRUE(eventually([&] { return processes_with(marker).empty(); }));
  expect_well();
}

TEST_F(Hostile, ForkBombInItsSession) {
  // Each process of it starts others until it fails; the first only waits. A busy machine gets more time to grow it.
  const std::string marker = unique_marker();
  box_->write_file("/root/bomb", "while :; do sh /root/bomb " + marker + " & done");
  std::size_t most = 0;
  for (auto time = 1500ms; most <= 20 && time < 30s; time *= 2) {
    std::atomic<bool> over = false;
    std::thread watch([&] {
      while (!over) most = std::max(most, processes_with(marker).size());
    });
    std::thread neighbour([&] { EXPECT_EQ(neighbour_->exec(shell("echo well")).output, "well\n"); });
    const ExecResult result =
        box_->exec(shell("sh /root/bomb " + marker + " 2> /dev/null & while :; do :; done", time));
    neighbour.join();
    over = true;
    watch.join();
    EXPECT_TRUE(result.timed_out);
    EXPECT_TRUE(eventually([&] { return processes_with(marker).empty(); }));
  }
  EXPECT_GT(most, 20U);
  EXPECT_LE(most, 66U);
  expect_well();
}

TEST_F(Hostile, ForkBombOfDaemonsIsBounded) {
  // Each process leaves its session, so a time-out does not reach it: the limit of processes and the removal must.
  const std::string marker = unique_marker();
  box_->write_file("/root/bomb", "while :; do setsid sleep " + marker + " & setsid sh /root/bomb & done");
  try {
    box_->exec(shell("sh /root/bomb > /dev/null 2>&1", 700ms));
    box_->exec(shell("true", 2s));
  } catch (const Error& error) {
    EXPECT_NE(error.code(), ErrorCode::internal) << error.what();
  }
  const std::size_t most = processes_with(marker).size();
  EXPECT_GT(most, 10U);
  EXPECT_LE(most, 64U);
  EXPECT_EQ(neighbour_->exec(shell("echo well")).output, "well\n");
  box_.reset();
  EXPECT_TRUE(processes_with(marker).empty());
}

TEST_F(Hostile, ProcessesAreLimited) {
  const char* many = "i=0; while [ $i -lt 100 ]; do sleep 5 & i=$((i+1)); done 2> /dev/null; echo $i";
  const ExecResult limited = box_->exec(shell(many));
  EXPECT_NE(limited.output, "100\n");
  Spec spec;
  spec.limits.processes = 200;
  EXPECT_EQ(runtime_->create(spec)->exec(shell(many)).output, "100\n");
}

TEST_F(Hostile, EatsMemory) {
  // A buffer larger than the memory and the disk of a sandbox together.
  const char* eat = "dd if=/dev/zero of=/dev/null bs=350M count=1 && echo eaten";
  const ExecResult limited = box_->exec(shell(eat, 60s));
  EXPECT_EQ(limited.output, "");
  EXPECT_EQ(limited.signal != 0 || limited.exit_code != 0, true);
  EXPECT_EQ(box_->exec(shell("cat /proc/self/oom_score_adj")).output, "500\n");  // init itself has -1000
  Spec spec;
  spec.limits.memory_bytes = 1ULL << 30;
  EXPECT_EQ(runtime_->create(spec)->exec(shell(eat, 60s)).output, "eaten\n");
  expect_well();
}

TEST_F(Hostile, FillsTheDiskAndSharedMemory) {
  struct statvfs before {
  }, after{};
  ASSERT_EQ(statvfs(folder_.path().c_str(), &before), 0);
  const ExecResult result = box_->exec(
      shell("dd if=/dev/zero of=/root/a bs=1M 2>&1; dd if=/dev/zero of=/dev/shm/b bs=1M 2>&1; dd if=/dev/zero of=/tmp/c"
            " bs=1M 2>&1; dd if=/dev/zero of=/dev/c bs=1k count=1 2>&1; du -ck /root /dev/shm /tmp | tail -1"));
  EXPECT_NE(result.output.find("No space left"), std::string::npos);
  EXPECT_LE(std::stoi(result.output.substr(result.output.find_last_of('\n', result.output.size() - 2) + 1)), 65536);
  ASSERT_EQ(statvfs(folder_.path().c_str(), &after), 0);
  expect_well();
  EXPECT_EQ(box_->exec(shell("rm /root/a /dev/shm/b /tmp/c; echo x > /root/d; cat /root/d")).output, "x\n");
}

TEST_F(Hostile, MakesFilesWithoutEnd) {
  const ExecResult result =
      box_->exec(shell("i=0; while true > /root/f$i; do i=$((i+1)); done 2> /dev/null; echo $i", 60s));
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_LT(std::stoi(result.output), 40'000);
  expect_well();
}

TEST_F(Hostile, AttacksInit) {
  const ExecResult result = box_->exec(shell(
      "kill -9 1; kill -STOP 1; kill -TERM 1; cat /proc/1/environ; cat /proc/1/mem; ls /proc/1/fd; ls /proc/1/root/;"
      "echo x > /proc/1/oom_score_adj; echo -1000 > /proc/self/oom_score_adj; renice -20 1"));
  EXPECT_EQ(result.output, "");
  EXPECT_NE(result.error.find("can't kill pid 1"), std::string::npos);
  expect_well();
}

TEST_F(Hostile, KillsEverythingItSees) {
  box_->exec(shell("kill -9 -1"));
  expect_well();
}

TEST_F(Hostile, ClosesItsStreams) {
  const ExecResult result = box_->exec(shell("exec 0<&- 1>&- 2>&-; sleep 0.3; exit 4"));
  EXPECT_EQ(result.exit_code, 4);
  EXPECT_GE(result.seconds, 0.3);
  expect_well();
}

TEST_F(Hostile, DoubleForksDaemons) {
  const std::string marker = unique_marker();
  const ExecResult result = box_->exec(shell("(setsid sh -c 'setsid sleep " + marker + " & sleep " + marker +
                                             "' &) ; (trap '' HUP; sleep " + marker + " &); echo gone"));
  EXPECT_EQ(result.output, "gone\n");
  EXPECT_TRUE(eventually([&] { return processes_with(marker).size() >= 3; }));
  box_.reset();
  EXPECT_TRUE(processes_with(marker).empty());
}

TEST_F(Hostile, LeavesZombies) {
  // Orphans are handed to init; unreaped they would fill the limit of processes.
  const ExecResult result = box_->exec(shell("i=0; while [ $i -lt 300 ]; do (true & ) ; i=$((i+1)); done; echo $i"));
  EXPECT_EQ(result.output, "300\n");
  EXPECT_TRUE(eventually([&] { return box_->exec(shell("ps -o stat | grep -c Z")).output == "0\n"; }));
}

TEST_F(Hostile, WritesToTheHost) {
  const fs::path secret = folder_.path() / "secret";
  { std::ofstream(secret) << "host"; }
  const std::string run = (folder_.path() / runs_under(folder_.path()).front()).string();
  const std::string image = slurp(fs::path("/bin/busybox"));
  const std::string path = secret.string();
  const ExecResult result = box_->exec(shell(
      "for f in " + path + " /proc/1/root" + path + " /proc/self/root" + path +
      "; do cat $f; echo x > $f; done;"
      "echo x > /bin/busybox; rm -rf /bin/busybox /bin /etc/passwd; mount -t tmpfs none /mnt; mount -o remount,rw "
      "/proc/sys;"
      "mknod /root/disk b 8 0; mknod /root/memory c 1 1; cat /dev/sda /dev/vda /dev/mem /dev/kmsg; umount /proc;"
      "chroot / true; unshare -m true; unshare -U true; nsenter -t 1 -m true; pivot_root / /tmp; insmod x; swapoff -a;"
      "echo b > /proc/sysrq-trigger; echo x > /proc/sys/kernel/hostname; echo 1 > /proc/sys/vm/drop_caches;"
      "hostname changed; date -s 2001-01-01 > /dev/null; reboot -f; poweroff -f; dmesg; su -c true; chown 0 /root; id "
      "-u | grep -x "
      "0; true"));
  EXPECT_EQ(result.output, "");
  EXPECT_EQ(slurp(secret), "host");
  EXPECT_GT(std::time(nullptr), 1'000'000'000);  // September 2001
  EXPECT_TRUE(slurp(fs::path(run) / "busybox/bin/busybox") == image);
  EXPECT_TRUE(fs::is_empty(fs::path(run) / "mnt"));
  expect_well();
}

TEST_F(Hostile, HoldsNoPrivilege) {
  const std::string status = box_->exec(shell("cat /proc/self/status")).output;
  for (const char* line :
       {"CapInh:\t0000000000000000", "CapPrm:\t0000000000000000", "CapEff:\t0000000000000000",
        "CapBnd:\t0000000000000000", "CapAmb:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2", "Groups:\t \n"}) {
    EXPECT_NE(status.find(line), std::string::npos) << line;
  }
  EXPECT_EQ(box_->exec(shell("ls -l /proc/self/fd | wc -l")).output,
            "5\n");  // 0, 1, 2, the folder itself, a head line
  EXPECT_EQ(box_->exec(shell("ls /dev")).output,
            "fd\nfull\nnull\nrandom\nshm\nstderr\nstdin\nstdout\ntty\nurandom\nzero\n");
  EXPECT_EQ(box_->exec(shell("ifconfig -a | grep -c Link")).output, "1\n");  // lo
  EXPECT_EQ(box_->exec(shell("ls /sys")).exit_code, 1);
  // Nothing tells where the host keeps the image, or who started the container.
  const std::string told =
      box_->exec(shell("cat /proc/self/mountinfo /proc/self/cgroup /proc/1/cmdline /proc/mounts")).output;
  EXPECT_EQ(told.find(folder_.path().string()), std::string::npos);
  EXPECT_EQ(told.find("tidelock"), std::string::npos);
}

TEST_F(Hostile, SetUserIdIsIgnored) {
  // A set-uid program of the image, owned by root: no new privileges.
  const fs::path image = folder_.path() / "image";
  fs::create_directories(image / "bin");
  fs::copy_file("/bin/busybox", image / "bin/sh");
  fs::permissions(image / "bin/sh", fs::perms(04755));
  fs::copy_file("/bin/busybox", image / "bin/id");
  fs::permissions(image / "bin/id", fs::perms(04755));
  Spec spec;
  spec.image = image.string();
  EXPECT_NE(runtime_->create(spec)->exec(command({"id", "-u"})).output, "0\n");
}

TEST_F(Hostile, DiesDuringACallAndTheErrorSaysSo) {
  auto& box = dynamic_cast<ContainerSandbox&>(*box_);
  std::thread killer([&] {
    std::this_thread::sleep_for(200ms);
    kill(box.init_pid(), SIGKILL);
  });
  EXPECT_EQ(code_of([&] { box_->exec(shell("sleep 100", 60s)); }), ErrorCode::io);
  killer.join();
  EXPECT_EQ(code_of([&] { box_->exec(shell("true")); }), ErrorCode::io);
  EXPECT_EQ(code_of([&] { box_->freeze(); }), ErrorCode::io);
  box_ = runtime_->create({});
  expect_well();
}

}  // namespace hostile_test
}  // namespace tidelock::sandbox::testing

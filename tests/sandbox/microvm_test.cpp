// MicroVMs: what is promised of a sandbox that sleeps, wakes, is copied, and whose program is killed.
//
// One template for all tests, booted by the first (seconds). Set TIDELOCK_SOAK for every step of every operation.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <thread>

#include "base/files.hpp"
#include "sandbox/microvm_victim.hpp"
#include "sandbox/support.hpp"
#include "sandbox/vm/store.hpp"

namespace tidelock::sandbox::testing {
namespace microvm_test {

// A state directory that lives as long as the test program.
const fs::path& shared_directory() {
  static const Folder folder;
  return folder.path();
}

MicrovmOptions options_for(const fs::path& directory) {
  MicrovmOptions options;
  options.directory = directory;
  return options;
}

std::unique_ptr<Runtime> open_runtime() {
  return make_microvm_runtime(options_for(shared_directory()));
}

Spec small() {
  Spec spec;
  spec.limits.memory_bytes = 128ULL << 20;
  spec.limits.disk_bytes = 32ULL << 20;
  return spec;
}

std::string output_of(Sandbox& box, const std::string& script) {
  const ExecResult result = box.exec(shell(script, 60s));
  EXPECT_EQ(result.exit_code, 0) << script << ": " << result.error;
  return result.output;
}

// A process that counts in its memory and writes every number to the disk. A number lost, repeated or taken back, in
// memory or on disk, breaks the row.
void start_counter(Sandbox& box) {
  output_of(box,
            "(i=0; while :; do i=$((i+1)); echo $i >> /root/log; sleep 0.1; done) >/dev/null 2>&1 & "
            "while [ ! -s /root/log ]; do sleep 0.02; done");
}

// Checks the row and that it grows; returns its length.
int expect_counting(Sandbox& box) {
  const auto length = [&box] {
    return std::stoi(output_of(box, "awk '$1 != NR { print \"broken at\", NR; exit 1 } END { print NR }' /root/log"));
  };
  const int before = length();
  int after = before;
  EXPECT_TRUE(eventually([&] { return (after = length()) > before; })) << "it stands still at " << before;
  return after;
}

std::size_t machines_of(const fs::path& directory) {
  std::size_t count = 0;
  for (const int pid : processes_with("guest=tidelock-")) {
    const std::string log = fs::read_symlink(fs::path("/proc") / std::to_string(pid) / "fd/1").string();
    count += log.rfind(fs::canonical(directory).string(), 0) == 0 ? 1 : 0;
  }
  return count;
}

// "message" of each entry in order.
std::string log_of(Runtime& runtime, const std::string& id) {
  std::string out;
  for (const LogEntry& entry : runtime.log(id)) {
    out += entry.message + "; ";
  }
  return out;
}

// ---- what must never break

TEST(Microvm, APausedSandboxIsNoProcessAndGoesOnInAnotherProgram) {
  std::string id;
  int before = 0;
  {
    const auto runtime = open_runtime();
    auto box = runtime->create(small());
    id = box->id();
    start_counter(*box);
    before = expect_counting(*box);
    box->pause();
    box->keep();
    EXPECT_EQ(machines_of(shared_directory()), 0U);
  }
  const auto runtime = open_runtime();
  auto box = runtime->open(id);
  std::this_thread::sleep_for(1s);  // it must not have counted this
  box->resume();
  const int after = expect_counting(*box);
  EXPECT_GT(after, before);
  const long drift = std::stol(output_of(*box, "date +%s")) - std::time(nullptr);
  EXPECT_LE(std::abs(drift), 2);
  box->remove();
  EXPECT_EQ(machines_of(shared_directory()), 0U);
}

TEST(Microvm, CopiesKeepTheCountThroughAChainOfCheckpointsAndThenDiverge) {
  const auto runtime = open_runtime();
  auto box = runtime->create(small());
  start_counter(*box);
  output_of(*box, "head -c 3000000 /dev/urandom > /dev/shm/blob; head -c 3000000 /dev/urandom > /root/blob; sync");
  const std::string sums = output_of(*box, "md5sum /dev/shm/blob /root/blob");
  const int checkpoints = std::getenv("TIDELOCK_SOAK") != nullptr ? 20 : 3;
  for (int i = 0; i < checkpoints; ++i) {
    box->checkpoint();
    expect_counting(*box);
  }
  box->pause();
  box->resume();
  auto copies = box->fork(3);
  std::set<std::string> random{output_of(*box, "head -c 16 /dev/urandom | md5sum")};
  for (std::size_t i = 0; i < copies.size(); ++i) {
    expect_counting(*copies[i]);
    EXPECT_EQ(output_of(*copies[i], "md5sum /dev/shm/blob /root/blob"), sums);
    random.insert(output_of(*copies[i], "head -c 16 /dev/urandom | md5sum"));
    copies[i]->write_file("mine", std::to_string(i));
  }
  EXPECT_EQ(random.size(), 4U) << "copies draw the same random numbers";
  for (std::size_t i = 0; i < copies.size(); ++i) {
    EXPECT_EQ(copies[i]->read_file("mine"), std::to_string(i));
  }
  EXPECT_EQ(code_of([&] { box->read_file("mine"); }), ErrorCode::not_found);
  expect_counting(*box);
}

TEST(Microvm, ACheckpointHoldsEveryByteOfMemory) {
  vm::Store store(options_for(shared_directory()));
  const std::string id = store.create(small());
  for (int round = 0; round < 2; ++round) {
    store.set_frozen(id, true);
    store.checkpoint(id);
    const vm::Guest guest = store.guest(id);
    const fs::path base = shared_directory() / "templates" / guest.template_key / "memory";
    static std::vector<fs::path> layers;
    layers.push_back(shared_directory() / "layers" / guest.layer / "pages");
    const vm::PageChain chain(base, layers);
    const vm::GuestMemory memory(guest.process.pid, base, chain.memory_bytes());
    std::vector<std::byte> page(vm::kPage);
    for (std::uint32_t number = 0; number < chain.memory_bytes() / vm::kPage; ++number) {
      memory.read({&number, 1}, page.data());
      ASSERT_TRUE(chain.holds(number, page.data(), vm::hash_page(page.data()))) << "page " << number;
    }
    EXPECT_GT(memory.private_bytes(), 0U);
    EXPECT_LT(memory.private_bytes(), chain.memory_bytes() / 5) << "copies share what they did not write";
    store.set_frozen(id, false);
  }
  store.remove(id);
}

// kill -9 of the program at a step of an operation: the sandbox counts on, and nothing is left over.
TEST(Microvm, TheProgramKilledAtAnyStepLosesNothingAndLeavesNothing) {
  const bool all = std::getenv("TIDELOCK_SOAK") != nullptr;
  std::vector<std::pair<const char*, const char*>> cases{{"pause", "capture:read"},
                                                         {"pause", "capture:committed"},
                                                         {"resume", "start:awake"},
                                                         {"checkpoint", "capture:swapped"},
                                                         {"fork", "fork:awake"}};
  if (all) {
    cases.insert(cases.end(), {{"pause", "capture:intended"},
                               {"pause", "capture:written"},
                               {"resume", "start:intended"},
                               {"resume", "start:committed"},
                               {"checkpoint", "capture:intended"},
                               {"checkpoint", "capture:read"},
                               {"checkpoint", "capture:written"},
                               {"checkpoint", "capture:committed"},
                               {"fork", "capture:committed"},
                               {"revert", "start:intended"},
                               {"revert", "start:awake"},
                               {"revert", "start:committed"},
                               {"revert", "collect:committed"},
                               {"create", "start:intended"},
                               {"create", "start:awake"}});
  }
  std::string id;
  {
    const auto runtime = open_runtime();
    auto box = runtime->create(small());
    start_counter(*box);
    box->checkpoint();
    id = box->id();
    box->keep();
  }
  for (const auto& [operation, step] : cases) {
    SCOPED_TRACE(std::string(operation) + " killed at " + step);
    if (std::string_view(operation) == "resume") {
      open_runtime()->open(id)->pause();
    }
    ASSERT_TRUE(kill_microvm_program(shared_directory(), operation, step, id));
    const auto runtime = open_runtime();
    const auto box = runtime->open(id);
    expect_counting(*box);
    EXPECT_EQ(machines_of(shared_directory()), 1U);
    EXPECT_EQ(runtime->list().size(), 2U) << "one sandbox, one template";
    EXPECT_FALSE(fs::exists(shared_directory() / "quarantine"));
  }
  EXPECT_NE(log_of(*open_runtime(), id).find("pause undone; "), std::string::npos);
  EXPECT_TRUE(kill_microvm_program(shared_directory(), "remove", "collect:committed", id));
  EXPECT_EQ(open_runtime()->list().size(), 1U);
  EXPECT_TRUE(fs::is_empty(shared_directory() / "layers"));
  EXPECT_TRUE(fs::is_empty(shared_directory() / "disks"));
  EXPECT_EQ(machines_of(shared_directory()), 0U);
}

TEST(Microvm, AFullDiskLeavesTheSandboxAsItWas) {
  if (geteuid() != 0) {
    GTEST_SKIP() << "needs root, for a small file system";
  }
  open_runtime()->build(small());
  const Folder folder;
  ASSERT_EQ(mount("none", folder.path().c_str(), "tmpfs", 0, "size=160m"), 0);
  {
    ASSERT_EQ(std::system(("cp -a --sparse=always " + (shared_directory() / "templates").string() + " " +
                           folder.path().string())
                              .c_str()),
              0);
    const auto runtime = make_microvm_runtime(options_for(folder.path()));
    auto box = runtime->create(small());
    start_counter(*box);
    output_of(*box, "head -c 12000000 /dev/urandom > /dev/shm/blob");
    const std::uintmax_t room = fs::space(folder.path()).available;
    std::ofstream(folder.path() / "filler") << std::string(room - (4U << 20), 'x');
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(code_of([&] { box->pause(); }), ErrorCode::exhausted);
      EXPECT_EQ(runtime->log(box->id()).back().message, "pause failed");
      expect_counting(*box);
      EXPECT_EQ(code_of([&] { box->checkpoint(); }), ErrorCode::exhausted);
      expect_counting(*box);
    }
    EXPECT_TRUE(fs::is_empty(folder.path() / "layers"));
    fs::remove(folder.path() / "filler");
    box->pause();
    box->resume();
    expect_counting(*box);
  }
  EXPECT_EQ(umount2(folder.path().c_str(), MNT_DETACH), 0);
}

// ---- the rest

TEST(Microvm, RunsCommandsAsAContainerDoes) {
  const auto runtime = open_runtime();
  auto box = runtime->create(small());
  std::string pieces;
  ExecRequest request = shell("cat; echo err >&2; id -u; pwd; exit 3");
  request.input = std::string(300'000, 'a') + "\n";
  request.output_limit = 1 << 20;
  request.on_output = [&](Stream, std::string_view bytes) { pieces += bytes; };
  const ExecResult result = box->exec(request);
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_EQ(result.output, request.input + "1000\n/root\n");
  EXPECT_EQ(result.error, "err\n");
  EXPECT_EQ(pieces.size(), result.output.size() + result.error.size());
  EXPECT_EQ(box->exec(command({"no-such-program"})).exit_code, 127);
  const ExecResult late = box->exec(shell("sleep 100 & sleep 100", 1s));
  EXPECT_TRUE(late.timed_out);
  EXPECT_EQ(output_of(*box, "ps | grep -c '[s]leep 100' || true"), "0\n");
  EXPECT_EQ(box->exec(shell("kill -9 $$")).signal, SIGKILL);
  std::string binary(100'000, '\0');
  for (std::size_t i = 0; i < binary.size(); ++i) {
    binary[i] = static_cast<char>(i * 7 + i / 256);
  }
  box->write_file("a/b/c", binary, 0755);
  EXPECT_EQ(box->read_file("/root/a/b/c"), binary);
  EXPECT_EQ(output_of(*box, "stat -c '%a %u' a/b/c"), "755 1000\n");
  EXPECT_EQ(code_of([&] { box->read_file("nothing"); }), ErrorCode::not_found);
  EXPECT_EQ(code_of([&] { box->read_file("a/b/c", 10); }), ErrorCode::exhausted);
  EXPECT_EQ(code_of([&] { box->read_file("/dev/zero"); }), ErrorCode::invalid_argument);
  // No way to end the agent from inside, and no network but loopback.
  EXPECT_EQ(output_of(*box, "kill -9 1 2>/dev/null || echo refused"), "refused\n");
  EXPECT_EQ(output_of(*box, "ls /sys/class/net"), "lo\n");
  EXPECT_EQ(code_of([&] { box->fork_filesystem(); }), ErrorCode::not_supported);
}

TEST(Microvm, SnapshotsHaveNamesAndSandboxesGoBackToThem) {
  const auto runtime = open_runtime();
  auto box = runtime->create(small());
  EXPECT_EQ(code_of([&] { box->revert(); }), ErrorCode::not_found);
  start_counter(*box);
  box->write_file("state", "one");
  box->snapshot("first");
  EXPECT_EQ(code_of([&] { box->snapshot("first"); }), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([&] { box->snapshot("../x"); }), ErrorCode::invalid_argument);
  box->write_file("state", "two");
  box->checkpoint();
  box->write_file("state", "three");
  box->revert();
  EXPECT_EQ(box->read_file("state"), "two");
  box->revert("first");
  EXPECT_EQ(box->read_file("state"), "one");
  expect_counting(*box);
  Spec spec;
  spec.snapshot = "first";
  auto other = runtime->create(spec);
  EXPECT_EQ(other->read_file("state"), "one");
  box.reset();
  expect_counting(*other);
  runtime->remove_snapshot("first");
  expect_counting(*other);
  EXPECT_EQ(code_of([&] { runtime->create(spec); }), ErrorCode::not_found);
  other.reset();
  EXPECT_TRUE(fs::is_empty(shared_directory() / "layers")) << "nothing refers to any layer";
  EXPECT_TRUE(fs::is_empty(shared_directory() / "disks"));
}

TEST(Microvm, ALogTellsWhatHappenedToASandboxAndGoesWithIt) {
  std::string id;
  {
    const auto runtime = open_runtime();
    const auto box = runtime->create(small());
    id = box->id();
    runtime->note(id, {.level = LogLevel::debug, .message = "noted"});
    runtime->note("nobody", {.message = "lost"});
    EXPECT_EQ(code_of([&] { box->revert(); }), ErrorCode::not_found);  // nothing was begun
    box->pause();
    box->resume();
    const std::string copy = box->fork(1).at(0)->id();
    EXPECT_EQ(runtime->log(id).back().fields.at("copy"), copy);
    EXPECT_EQ(code_of([&] { runtime->log(copy); }), ErrorCode::not_found) << "it went with the copy";
    EXPECT_GT(runtime->log(id).front().time, 1'700'000'000'000);
    box->keep();
  }
  const auto runtime = open_runtime();
  EXPECT_EQ(log_of(*runtime, id),
            "create done; noted; pause done; resume done; checkpoint for copies done; fork done; ");
  ASSERT_TRUE(fs::exists(shared_directory() / "logs" / (id + ".jsonl")));
  runtime->open(id)->remove();
  EXPECT_TRUE(fs::is_empty(shared_directory() / "logs"));
}

TEST(Microvm, AKilledMachineIsToldAndItsCheckpointIsGoneBackTo) {
  vm::Store store(options_for(shared_directory()));
  const std::string id = store.create(small());
  vm::GuestRequest request;
  request.path = "/root";
  request.arguments = std::string("/bin/true\0", 10);
  store.checkpoint(id);
  EXPECT_EQ(kill(store.guest(id).process.pid, SIGKILL), 0);
  EXPECT_EQ(code_of([&] { store.run(id, request, {}); }), ErrorCode::io);
  EXPECT_EQ(store.guest(id).state, "lost");
  EXPECT_EQ(store.log(id).back().message, "its QEMU process has ended");
  EXPECT_EQ(code_of([&] { store.pause(id); }), ErrorCode::io);
  store.revert(id, "");
  EXPECT_EQ(store.run(id, request, {}).exit_code, 0);
  store.remove(id);
}

TEST(Microvm, RefusesWhatItCannotDo) {
  const auto runtime = open_runtime();
  Spec spec = small();
  spec.limits.cpus = 2;
  EXPECT_EQ(code_of([&] { runtime->create(spec); }), ErrorCode::not_supported);
  spec = small();
  spec.image = "no-such-image";
  EXPECT_EQ(code_of([&] { runtime->create(spec); }), ErrorCode::not_found);
  EXPECT_EQ(code_of([&] { runtime->open("nobody"); }), ErrorCode::not_found);
  MicrovmOptions options = options_for(shared_directory());
  options.patience = 0s;
  EXPECT_EQ(code_of([&] { make_microvm_runtime(options); }), ErrorCode::exhausted) << "one program at a time";
}

}  // namespace microvm_test
}  // namespace tidelock::sandbox::testing

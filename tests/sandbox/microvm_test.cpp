// MicroVMs: what is promised of a sandbox that sleeps, wakes and is copied. Set TIDELOCK_SOAK for longer chains.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <thread>

#include "base/files.hpp"
#include "sandbox/microvm_support.hpp"
#include "sandbox/support.hpp"
#include "sandbox/vm/store.hpp"

namespace tidelock::sandbox::testing {
namespace microvm_test {

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
  const int checkpoints = soaking() ? 20 : 3;
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

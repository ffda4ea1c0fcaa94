// Times of the microVM runtime: create, checkpoint, pause, resume, fork, by how much the guest has written since.
// Peer: QEMU's own savevm and loadvm, on the same guest with the same memory, in the same run.
//
//   microvm_bench DIRECTORY [--rounds N] [--dirty MiB]... [--json]
// DIRECTORY is a state directory on the disk to be measured; it is made when it does not exist.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "base/log.hpp"
#include "sandbox/vm/qcow2.hpp"
#include "sandbox/vm/store.hpp"

namespace {

using namespace tidelock;
using namespace tidelock::sandbox;
using Clock = std::chrono::steady_clock;
using Times = std::map<std::string, std::vector<double>>;

constexpr std::uint64_t kMemory = 384ULL << 20;  // room for 128 MiB in the guest's /dev/shm, half of its memory

std::map<std::string, Clock::time_point> steps;

double between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double, std::milli>(to - from).count();
}

double percentile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(share * static_cast<double>(values.size() - 1) + 0.5)];
}

void report(const std::string& what, const Times& times, bool json) {
  for (const auto& [name, values] : times) {
    if (json) {
      for (const auto& [label, share] : {std::pair{"p50", 0.5}, std::pair{"p99", 0.99}}) {
        std::printf("{\"name\":\"%s.%s_%s\",\"value\":%.2f,\"unit\":\"ms\",\"rounds\":%zu}\n", what.c_str(),
                    name.c_str(), label, percentile(values, share), values.size());
      }
    } else {
      std::printf("%-14s %-34s p50 %8.1f ms   p99 %8.1f ms   (%zu)\n", what.c_str(), name.c_str(),
                  percentile(values, 0.5), percentile(values, 0.99), values.size());
    }
  }
  std::fflush(stdout);
}

vm::GuestRequest shell(const std::string& script) {
  vm::GuestRequest request;
  request.path = "/root";
  request.processes = 64;
  request.arguments = std::string("/bin/sh") + '\0' + "-c" + '\0' + script + '\0';
  request.environment = std::string("PATH=/bin:/usr/bin") + '\0';
  return request;
}

// Writes `mebibytes` of memory, each time with another letter: every page differs from the last checkpoint's.
std::string dirtying(int mebibytes, int round) {
  return fmt::format("tr '\\0' '{}' </dev/zero | head -c {}m > /dev/shm/blob; echo done",
                     static_cast<char>('a' + round % 26), mebibytes);
}

ExecRequest patient() {
  ExecRequest io;
  io.timeout = std::chrono::minutes(3);
  return io;
}

void expect_done(const ExecResult& result) {
  if (result.output != "done\n") {
    fail(ErrorCode::internal, "the guest printed '{}' and '{}'", result.output, result.error);
  }
}

// Machines outlive the program that started them: one that is interrupted must not leave them running.
std::atomic<bool> interrupted{false};

void remove_all(vm::Store& store) {
  for (const Listing& entry : store.list()) {
    if (entry.kind == "sandbox") {
      store.remove(entry.name);
    }
  }
}

double timed(const std::function<void()>& action) {
  if (interrupted) {
    fail(ErrorCode::exhausted, "interrupted");
  }
  const Clock::time_point start = Clock::now();
  action();
  return between(start, Clock::now());
}

Spec bench_spec() {
  Spec spec;
  spec.limits.memory_bytes = kMemory;
  return spec;
}

void measure_create(vm::Store& store, int rounds, bool json) {
  Times times;
  for (int i = 0; i < rounds; ++i) {
    store.await_pool();
    std::string id;
    const Clock::time_point start = Clock::now();
    times["create (agent answers)"].push_back(timed([&] { id = store.create(bench_spec()); }));
    times["create (guest runs)"].push_back(between(start, steps["wake:running"]));
    times["first command after create"].push_back(timed([&] { store.run(id, shell("echo done"), patient()); }));
    times["second command"].push_back(timed([&] { store.run(id, shell("echo done"), patient()); }));
    store.remove(id);
  }
  report("untouched", times, json);
}

void measure_dirty(vm::Store& store, int mebibytes, int rounds, bool json) {
  Times times;
  std::string id = store.create(bench_spec());
  for (int i = 0; i < rounds; ++i) {
    // A new one now and then: a chain of checkpoints that only grows is measured by itself, below.
    if (i % 3 == 0) {
      store.remove(id);
      id = store.create(bench_spec());
    }
    expect_done(store.run(id, shell(dirtying(mebibytes, i)), patient()));
    store.await_pool();
    times["checkpoint (in all)"].push_back(timed([&] { store.checkpoint(id); }));
    times["checkpoint (guest stands still)"].push_back(between(steps["capture:stopped"], steps["capture:going"]));
    expect_done(store.run(id, shell(dirtying(mebibytes, i + 13)), patient()));
    times["pause to zero"].push_back(timed([&] { store.pause(id); }));
    store.await_pool();
    const Clock::time_point start = Clock::now();
    times["resume from pool (agent answers)"].push_back(timed([&] { store.resume(id); }));
    times["resume from pool (guest runs)"].push_back(between(start, steps["wake:running"]));
  }
  if (mebibytes <= 16) {
    for (int i = 0; i < std::max(1, rounds / 4); ++i) {
      std::vector<std::string> one, eight;
      store.await_pool();
      times["fork of 1"].push_back(timed([&] { one = store.fork(id, 1); }));
      store.await_pool();
      times["fork of 8"].push_back(timed([&] { eight = store.fork(id, 8); }));
      eight.push_back(one[0]);
      for (const std::string& copy : eight) {
        store.remove(copy);
      }
    }
  }
  store.remove(id);
  report(fmt::format("{} MiB", mebibytes), times, json);
}

// The last of 20 checkpoints on each other, 1 MiB each, and the resume from them.
void measure_chain(vm::Store& store, bool json) {
  Times times;
  const std::string id = store.create(bench_spec());
  for (int i = 0; i < 20; ++i) {
    expect_done(store.run(id, shell(dirtying(1, i)), patient()));
    const double taken = timed([&] { store.checkpoint(id); });
    if (i >= 15) {
      times["checkpoint 16 to 20 (in all)"].push_back(taken);
    }
  }
  store.pause(id);
  store.await_pool();
  const Clock::time_point start = Clock::now();
  times["resume from 21 (agent answers)"].push_back(timed([&] { store.resume(id); }));
  times["resume from 21 (guest runs)"].push_back(between(start, steps["wake:running"]));
  store.remove(id);
  report("chain", times, json);
}

// QEMU's own way: the whole state into the guest's disk image, and back.
void measure_peer(const vm::Template& from, const std::filesystem::path& folder, int mebibytes, int rounds, bool json) {
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  vm::LaunchPlan plan;
  plan.emulator = vm::find_emulator();
  plan.shape = from.shape;
  plan.name = "tidelock-bench-peer";
  plan.folder = folder;
  plan.memory = from.memory();
  const std::unique_ptr<vm::Machine> machine = vm::Machine::launch(plan);
  try {
    vm::create_overlay(folder / "disk", from.shape.disk_bytes);
    machine->prepare(from.disk());
    machine->add_disks(from.disk().node, {{"peer", folder / "disk"}});
    machine->attach("peer");
    machine->monitor().execute("blockdev-del", {{"node-name", "nothing"}});  // savevm wants every disk to take part
    machine->load_devices(from.devices());
    machine->go_on();
    vm::Channel agent;
    agent.open(machine->agent_socket(), std::chrono::seconds(30));
    Times times;
    for (int i = 0; i < rounds; ++i) {
      expect_done(agent.run(shell(dirtying(mebibytes, i)), patient()));
      for (const auto& [name, command] :
           {std::pair{"QEMU savevm", "savevm peer"}, std::pair{"QEMU loadvm", "loadvm peer"}}) {
        times[name].push_back(timed([&] {
          const std::string answer =
              machine->monitor().execute("human-monitor-command", {{"command-line", command}}).get<std::string>();
          if (!answer.empty()) {
            fail(ErrorCode::io, "{}: {}", command, answer);
          }
        }));
      }
      machine->monitor().execute("human-monitor-command", {{"command-line", "delvm peer"}});
    }
    report(fmt::format("{} MiB", mebibytes), times, json);
  } catch (const Error&) {
    machine->end();
    throw;
  }
  machine->end();
  std::filesystem::remove_all(folder);
}

int run(int argc, char** argv) {
  int rounds = 20;
  bool json = false;
  std::vector<int> sizes;
  for (int i = 2; i < argc; ++i) {
    if (std::strcmp(argv[i], "--json") == 0) {
      json = true;
    } else if (std::strcmp(argv[i], "--rounds") == 0 && i + 1 < argc) {
      rounds = std::max(1, std::atoi(argv[++i]));
    } else if (std::strcmp(argv[i], "--dirty") == 0 && i + 1 < argc) {
      sizes.push_back(std::clamp(std::atoi(argv[++i]), 1, 160));
    } else {
      fail(ErrorCode::invalid_argument, "'{}': expected --json, --rounds N or --dirty MiB", argv[i]);
    }
  }
  if (argc < 2) {
    fail(ErrorCode::invalid_argument, "expected a state directory");
  }
  if (sizes.empty()) {
    sizes = {1, 16, 128};
  }
  MicrovmOptions options;
  options.directory = argv[1];
  options.pool = 1;
  options.at_step = [](const char* step) { steps[step] = Clock::now(); };
  vm::Store store(options);
  remove_all(store);  // of a run that was killed
  store.template_of(bench_spec());
  store.remove(store.create(bench_spec()));  // the pool begins with the first
  try {
    measure_create(store, rounds, json);
    measure_chain(store, json);
    const vm::Template from = store.template_of(bench_spec());
    for (const int mebibytes : sizes) {
      measure_dirty(store, mebibytes, mebibytes > 64 ? std::max(1, rounds / 4) : rounds, json);
      measure_peer(from, store.folder() / "peer", mebibytes, std::max(1, rounds / 4), json);
    }
  } catch (const Error&) {
    remove_all(store);
    throw;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  tidelock::init_log();
  for (const int signal : {SIGINT, SIGTERM}) {
    std::signal(signal, [](int) { interrupted = true; });
  }
  try {
    return run(argc, argv);
  } catch (const tidelock::Error& error) {
    std::fprintf(stderr, "microvm_bench: %s\n%s\n", error.what(), error.remedy().c_str());
    return tidelock::exit_code(error.code());
  }
}

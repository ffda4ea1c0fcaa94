// Times of the container runtime: create to first output, one exec, freeze and thaw, removal, many at once.
// Peer: the same shell command by posix_spawn on the host, in the same run - what a sandbox costs over none at all.
//
//   sandbox_bench [--json] [--rounds N] [--threads N]
#include <fcntl.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "base/log.hpp"
#include "sandbox/sandbox.hpp"

extern char** environ;

namespace {

using namespace tidelock;
using Clock = std::chrono::steady_clock;

constexpr const char* kCommand = "echo $((37*58))";

double milliseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

double percentile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(share * static_cast<double>(values.size() - 1))];
}

double children_cpu_milliseconds() {
  rusage own{}, children{};
  getrusage(RUSAGE_SELF, &own);
  getrusage(RUSAGE_CHILDREN, &children);
  const auto of = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_usec) / 1e3;
  };
  return of(own.ru_utime) + of(own.ru_stime) + of(children.ru_utime) + of(children.ru_stime);
}

struct Report {
  bool json = false;
  void line(const std::string& name, double value, const char* unit, double peer) const {
    const double ratio = peer > 0 ? value / peer : 0;
    if (json) {
      std::printf("{\"name\":\"%s\",\"value\":%.4f,\"unit\":\"%s\",\"peer\":%.4f,\"ratio\":%.4f}\n", name.c_str(),
                  value, unit, peer, ratio);
    } else if (peer > 0) {
      std::printf("%-34s %10.3f %-6s  peer %8.3f  ratio %6.2f\n", name.c_str(), value, unit, peer, ratio);
    } else {
      std::printf("%-34s %10.3f %s\n", name.c_str(), value, unit);
    }
  }
  void both(const std::string& name, const std::vector<double>& values, const std::vector<double>& peers) const {
    for (const auto& [label, share] : {std::pair{"p50", 0.50}, std::pair{"p99", 0.99}}) {
      line(name + "_" + label, percentile(values, share), "ms", peers.empty() ? 0 : percentile(peers, share));
    }
  }
};

// The command on the host: spawned, its output read to the end, reaped.
double run_on_host() {
  const Clock::time_point start = Clock::now();
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) {
    fail_errno("make", "a pipe");
  }
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], 1);
  std::string program = "/bin/busybox", shell = "sh", flag = "-c", command = kCommand;
  char* argv[] = {program.data(), shell.data(), flag.data(), command.data(), nullptr};
  pid_t pid = 0;
  const int error = posix_spawn(&pid, program.c_str(), &actions, nullptr, argv, environ);
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  if (error != 0) {
    fail(ErrorCode::io, "cannot run {}: {}", program, std::strerror(error));
  }
  char part[256];
  while (read(ends[0], part, sizeof part) > 0) {
  }
  close(ends[0]);
  int status = 0;
  waitpid(pid, &status, 0);
  return milliseconds_since(start);
}

sandbox::ExecRequest shell(const char* command) {
  sandbox::ExecRequest request;
  request.argv = {"sh", "-c", command};
  return request;
}

void expect_answer(const sandbox::ExecResult& result) {
  if (result.output != "2146\n") {
    fail(ErrorCode::internal, "the command printed '{}' and '{}'", result.output, result.error);
  }
}

void run_one_at_a_time(sandbox::Runtime& runtime, int rounds, const Report& report) {
  std::vector<double> host, first, exec, destroy, freeze, thaw, wake;
  for (int i = 0; i < rounds; ++i) {
    host.push_back(run_on_host());
    Clock::time_point start = Clock::now();
    std::unique_ptr<sandbox::Sandbox> box = runtime.create({});
    expect_answer(box->exec(shell(kCommand)));
    first.push_back(milliseconds_since(start));
    start = Clock::now();
    expect_answer(box->exec(shell(kCommand)));
    exec.push_back(milliseconds_since(start));
    start = Clock::now();
    box->freeze();
    freeze.push_back(milliseconds_since(start));
    start = Clock::now();
    box->thaw();
    thaw.push_back(milliseconds_since(start));
    box->freeze();
    start = Clock::now();
    expect_answer(box->exec(shell(kCommand)));
    wake.push_back(milliseconds_since(start));
    start = Clock::now();
    box.reset();
    destroy.push_back(milliseconds_since(start));
  }
  report.both("sandbox_create_first_output", first, host);
  report.both("sandbox_exec", exec, host);
  report.both("sandbox_exec_when_frozen", wake, host);
  report.both("sandbox_freeze", freeze, {});
  report.both("sandbox_thaw", thaw, {});
  report.both("sandbox_destroy", destroy, {});
}

// A training step's worth: `rounds` sandboxes by `threads` threads, all alive at once.
void run_together(sandbox::Runtime& runtime, int rounds, int threads, const Report& report) {
  std::vector<std::unique_ptr<sandbox::Sandbox>> boxes(static_cast<std::size_t>(rounds));
  const Clock::time_point start = Clock::now();
  std::vector<std::thread> workers;
  for (int worker = 0; worker < threads; ++worker) {
    workers.emplace_back([&, worker] {
      for (std::size_t i = static_cast<std::size_t>(worker); i < boxes.size(); i += static_cast<std::size_t>(threads)) {
        boxes[i] = runtime.create({});
        expect_answer(boxes[i]->exec(shell(kCommand)));
      }
    });
  }
  for (std::thread& worker : workers) {
    worker.join();
  }
  report.line("sandbox_create_exec_rate", rounds / milliseconds_since(start) * 1e3, "1/s", 0);
  const Clock::time_point end = Clock::now();
  boxes.clear();
  report.line("sandbox_destroy_rate", rounds / milliseconds_since(end) * 1e3, "1/s", 0);
}

int run(int argc, char** argv) {
  Report report;
  int rounds = 200, threads = 2;
  for (int i = 1; i < argc; ++i) {
    const std::string_view flag = argv[i];
    if (flag == "--json") {
      report.json = true;
    } else if (flag == "--rounds" && i + 1 < argc) {
      rounds = std::max(2, std::atoi(argv[++i]));
    } else if (flag == "--threads" && i + 1 < argc) {
      threads = std::max(1, std::atoi(argv[++i]));
    } else {
      fail(ErrorCode::invalid_argument, "unknown flag '{}'; known: --json, --rounds N, --threads N", flag);
    }
  }
  const double before = children_cpu_milliseconds();
  {
    const std::unique_ptr<sandbox::Runtime> runtime = sandbox::make_container_runtime();
    run_together(*runtime, rounds, threads, report);
  }
  // The runtime is gone and its processes are reaped: their time counts as that of children.
  report.line("sandbox_cpu_per_life", (children_cpu_milliseconds() - before) / rounds, "ms", 0);
  const std::unique_ptr<sandbox::Runtime> runtime = sandbox::make_container_runtime();
  run_one_at_a_time(*runtime, rounds, report);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::string_view(argv[1]) == "sandbox-helper") {
    return sandbox::helper_main(argc, argv);
  }
  tidelock::init_log();
  try {
    return run(argc, argv);
  } catch (const Error& error) {
    std::fprintf(stderr, "sandbox_bench: %s\n", error.what());
    return exit_code(error.code());
  }
}

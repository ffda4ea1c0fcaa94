// sandbox/: places where an agent's commands run, that cost nothing while the model thinks and never harm their host.
//
// One interface for two runtimes: containers (namespaces, here) and microVMs (later). What a runtime cannot do it says
// in its Capabilities, and the call fails with Error{not_supported}; it never pretends.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tidelock::sandbox {

struct Capabilities {
  bool freeze = false;           // stop all processes without losing them
  bool fork_filesystem = false;  // copy files to a new sandbox
  bool fork_memory = false;      // copy running processes too
  bool snapshot = false;         // survive the end of this program
  std::string isolation;         // one line for people: what separates a sandbox from its host
};

struct Limits {
  std::uint64_t memory_bytes = 256ULL << 20;
  std::uint64_t disk_bytes = 64ULL << 20;  // what the sandbox may write to its own root
  int processes = 64;
  double cpus = 1.0;
};

struct Spec {
  std::string image = "busybox";  // name of a template known to the runtime, or a directory to use as read-only root
  Limits limits;
};

enum class Stream { standard_output, standard_error };

struct ExecRequest {
  std::vector<std::string> argv;  // argv[0] is looked up in PATH inside the sandbox
  std::map<std::string, std::string> environment;
  std::string directory = "/root";
  std::string input;  // given on standard input, which is then closed
  std::chrono::milliseconds timeout{10'000};
  std::uint64_t output_limit = 64ULL << 10;                 // bytes kept of each stream; more is read and thrown away
  std::function<void(Stream, std::string_view)> on_output;  // called as bytes arrive; may be empty
};

struct ExecResult {
  int exit_code = -1;  // of the process; 128 + signal when a signal ended it
  int signal = 0;
  bool timed_out = false;  // the whole process group was killed
  bool truncated = false;  // output_limit was reached on a stream
  std::string output, error;
  double seconds = 0;  // wall time
};

// Time a sandbox spent in each condition, for the run's metrics (seconds).
struct Times {
  double alive = 0;   // since creation
  double busy = 0;    // inside exec and file calls
  double frozen = 0;  // between freeze and thaw
};

// One sandbox. Calls on one object must not overlap; different objects may be used from different threads.
// Destroying the object kills every process in it and removes everything it left on the host.
class Sandbox {
 public:
  virtual ~Sandbox() = default;
  virtual const std::string& id() const = 0;
  virtual ExecResult exec(const ExecRequest& request) = 0;  // thaws first when frozen
  virtual void write_file(const std::string& path, std::string_view content, int mode = 0644) = 0;  // makes parents
  virtual std::string read_file(const std::string& path, std::uint64_t limit = 1 << 20) = 0;
  virtual void freeze() = 0;
  virtual void thaw() = 0;
  virtual std::unique_ptr<Sandbox> fork_filesystem() = 0;
  virtual Times times() const = 0;
};

// Creates sandboxes. Thread-safe. Destroying the runtime ends all of its sandboxes.
class Runtime {
 public:
  virtual ~Runtime() = default;
  virtual Capabilities capabilities() const = 0;
  virtual std::unique_ptr<Sandbox> create(const Spec& spec) = 0;
};

struct ContainerOptions {
  std::filesystem::path directory;  // where overlays live; empty: a fresh one under the system's temporary folder
  std::filesystem::path
      helper_program;  // the program that serves the hidden verb `sandbox-helper`; empty: /proc/self/exe
};

// The container runtime. Throws Error{not_supported} naming what this host lacks.
std::unique_ptr<Runtime> make_container_runtime(const ContainerOptions& options = {});

// The hidden verb `sandbox-helper FD`: a small single-threaded process that creates containers on behalf of the
// program, so that a large process is never forked, and that cleans up when the program dies. Returns the exit code.
int helper_main(int argc, char** argv);

}  // namespace tidelock::sandbox

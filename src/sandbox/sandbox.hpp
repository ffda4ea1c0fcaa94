// sandbox/: places where an agent's commands run, that cost nothing while the model thinks and never harm their host.
//
// One interface for two runtimes: containers (namespaces) and microVMs (QEMU). What a runtime cannot do it says in its
// Capabilities, and the call fails with Error{not_supported}; it never pretends.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tidelock::sandbox {

struct Capabilities {
  bool freeze = false;           // stop all processes without losing them
  bool fork_filesystem = false;  // copy files to a new sandbox
  bool fork_memory = false;      // copy running processes too
  bool snapshot = false;         // survive the end of this program
  bool processes = false;        // start, attach, signal...: processes beside the calls that start them
  std::string isolation;         // one line for people: what separates a sandbox from its host
};

struct Limits {
  std::uint64_t memory_bytes = 256ULL << 20;
  std::uint64_t disk_bytes = 64ULL << 20;  // what the sandbox may write to its own root
  int processes = 64;
  double cpus = 1.0;
};

struct Spec {
  // Name of a template known to the runtime, or a directory to use as read-only root. MicroVMs: also an OCI image
  // layout, as a folder or as a tar archive.
  std::string image = "busybox";
  Limits limits;
  std::string snapshot;  // start from this snapshot instead, which has its image and limits; empty: from the image
  // A later program that finds it left by this one, which was killed, ends and removes it.
  bool passing = false;
};

// What processes in a sandbox get where a request does not say. Kept with the sandbox, its copies and its snapshots.
struct Defaults {
  std::map<std::string, std::string> environment;
  std::string directory;  // empty: /root
  bool root = false;      // as the sandbox's root; otherwise as its unprivileged user
  std::string working_directory() const { return directory.empty() ? "/root" : directory; }
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

// Of a terminal, in characters; at least 1 each.
struct WindowSize {
  std::uint16_t rows = 24, columns = 80;
};

// A process that goes on after the call that started it, and after everybody stopped listening.
struct ProcessRequest {
  std::vector<std::string> argv;  // argv[0] is looked up in PATH inside the sandbox
  std::map<std::string, std::string> environment;
  std::string directory = "/root";
  bool root = false;                   // as the sandbox's root; otherwise as its unprivileged user
  bool open_input = false;             // standard input stays open for write_input; otherwise it is empty
  std::string tag;                     // the caller's name for it
  std::optional<WindowSize> terminal;  // it gets one, which is its input (open), output and error; else pipes
};

struct ProcessInfo {
  int pid = 0;  // inside the sandbox
  ProcessRequest request;
};

struct ProcessEvent {
  enum class Kind {
    output,
    error,     // standard error
    terminal,  // what a process with a terminal shows there, instead of output and error
    ended,
    lost,  // the sandbox was paused or ended; the process may go on when it is resumed, unheard until attached to
  };
  Kind kind{};
  std::string bytes;   // of output, error and terminal
  int exit_code = -1;  // of ended, as in ExecResult
  int signal = 0;
};

// One listener of a process; there may be several, each hears everything from when it came. A process whose listeners
// do not take its output waits. Thread-safe. Destroying it ends the listening, not the process.
class ProcessListener {
 public:
  virtual ~ProcessListener() = default;
  virtual int pid() const = 0;
  virtual std::optional<ProcessEvent> take() = 0;  // the next event, if there is one; ended or lost is the last
  // Called from another thread whenever there may be something to take, until the listener goes; must not block. Once,
  // before the first take.
  virtual void on_event(std::function<void()> wake) = 0;
};

// One entry of a sandbox's file system. A link is told as what it leads to, with its target.
struct FileEntry {
  enum class Type { file, folder, other };
  Type type = Type::other;
  std::string path;
  std::uint64_t size = 0;
  std::uint32_t mode = 0;  // st_mode
  std::string owner, group;
  std::int64_t seconds = 0, nanoseconds = 0;  // of the last change of its content, since 1970
  std::string target;                         // of a link; empty otherwise
};

struct FileCommand {
  enum class Operation {
    stat,
    list,         // the entries of a folder, in no order
    make_folder,  // with its parents; Error{mismatch} when the folder exists
    move,         // makes the parents of `to`
    remove,       // with all below; nothing happens when there is nothing
    write,        // with its parents; a file that exists keeps its mode and owner
  };
  Operation operation{};
  std::string path;  // absolute, as `to`
  std::string to = {};
  int depth = 1;                  // of list
  std::string_view content = {};  // of write
  bool root = false;              // what is made belongs to root
};

struct WatchRequest {
  std::string path;  // an absolute one of a folder
  bool recursive = false;
  bool entries = false;  // each change comes with what its file is then
  bool root = false;     // with the rights of root; otherwise those of the unprivileged user
};

struct FileChange {
  enum class Kind { create, write, remove, rename, chmod };  // rename: the old name; the new one is told as create
  Kind kind{};
  std::string name;                // below the folder; "." for itself
  std::optional<FileEntry> entry;  // if asked for, and there is still something
};

// A folder that is watched. Changes wait in the guest until they are taken; past what is kept there it is over.
// Destroying it ends the watching. One user at a time.
class FileWatch {
 public:
  virtual ~FileWatch() = default;
  // The next change, if there is one. Throws when it is over: Error{exhausted} when changes were lost or there are too
  // many folders, Error{io} when the sandbox was paused or ended (a pause ends all watches).
  virtual std::optional<FileChange> take() = 0;
  virtual bool over() const = 0;                          // nothing new will come; what came may still wait
  virtual void on_event(std::function<void()> wake) = 0;  // as of ProcessListener
};

// A connection to a TCP port of a sandbox's loopback, which has no other network. Nothing here waits; the other side is
// made to wait when bytes are not taken. Thread-safe. Destroying it resets the connection.
class PortConnection {
 public:
  virtual ~PortConnection() = default;
  // The next bytes; nothing when there are none now. Throws Error{io} when the sandbox was paused or ended.
  virtual std::optional<std::string> take() = 0;
  virtual bool ended() const = 0;                         // the other side has ended, and everything was taken
  virtual std::size_t give(std::string_view bytes) = 0;   // how many were accepted: as many as there is room for
  virtual void finish() = 0;                              // no more will be given
  virtual void on_event(std::function<void()> wake) = 0;  // something to take, or room: as of ProcessListener
};

// Time a sandbox spent in each condition, for the run's metrics (seconds).
struct Times {
  double alive = 0;   // since creation
  double busy = 0;    // inside exec and file calls
  double frozen = 0;  // between freeze and thaw
};

// One sandbox. Calls on one object must not overlap; different objects may be used from different threads.
// Destroying the object kills every process in it and removes everything it left on the host, unless it is kept.
class Sandbox {
 public:
  virtual ~Sandbox() = default;
  virtual const std::string& id() const = 0;
  virtual ExecResult exec(const ExecRequest& request) = 0;  // thaws or resumes first
  virtual void write_file(const std::string& path, std::string_view content, int mode = 0644) = 0;  // makes parents
  virtual std::string read_file(const std::string& path, std::uint64_t limit = 1 << 20) = 0;
  virtual void freeze() = 0;
  virtual void thaw() = 0;
  virtual std::unique_ptr<Sandbox> fork_filesystem() = 0;
  virtual Times times() const = 0;
  // Beside exec: only where Capabilities say processes. These may be called from several threads at once, and resume
  // first as exec does. Throw Error{not_found} for a pid that none of them has.
  virtual std::shared_ptr<ProcessListener> start(const ProcessRequest& request);
  virtual std::shared_ptr<ProcessListener> attach(int pid);  // also for some seconds after its end
  virtual std::vector<ProcessInfo> processes();
  virtual void signal(int pid, int number);  // SIGKILL ends its session, others go to its process group
  virtual void write_input(int pid, std::string_view bytes);  // waits until it is taken; Error{exhausted} after a while
  virtual void close_input(int pid);                          // not of a terminal, where control-D is typed
  virtual void resize(int pid, WindowSize size);              // Error{invalid_argument} without a terminal
  virtual std::vector<FileEntry> files(const FileCommand& command);
  // Error{not_found, invalid_argument} for what is no folder, Error{exhausted} for more watches than a sandbox has.
  virtual std::unique_ptr<FileWatch> watch(const WatchRequest& request);
  // Error{not_found} when nothing listens on the port, Error{exhausted} for more than 64 connections at once.
  virtual std::shared_ptr<PortConnection> connect_port(int port);
  // With memory: only where Capabilities say so.
  virtual void pause();       // its processes stand still on disk; nothing of it is left in memory
  virtual void resume();      // they go on, with the clock set and fresh randomness
  virtual void checkpoint();  // what revert("") goes back to; it goes on running
  virtual std::vector<std::unique_ptr<Sandbox>> fork(int count);  // copies, each going on from now
  virtual void snapshot(const std::string& name);                 // a checkpoint with a name, for Spec and revert
  virtual void revert(const std::string& snapshot = "");          // back to a snapshot, or to the last checkpoint
  virtual Defaults defaults();
  virtual void set_defaults(const Defaults& defaults);
  virtual void keep();    // outlives this object and this program
  virtual void remove();  // what destroying the object would do, now and for a kept one; not to be used after
};

// What a runtime has, for people and for lists.
struct Listing {
  std::string kind;  // sandbox, snapshot or template
  std::string name;
  std::string state;                // of a sandbox: running, paused, lost
  std::string origin;               // its template or layer
  std::uint64_t memory_bytes = 0;   // that the guest has
  std::uint64_t private_bytes = 0;  // that only it holds in memory, running
  std::int64_t created = 0;         // seconds since 1970
};

// One line of a sandbox's log: what happened to it, not what its processes print.
enum class LogLevel { debug, info, warning, error };
const char* log_level_name(LogLevel level);                      // debug, info, warn, error
std::optional<LogLevel> parse_log_level(std::string_view name);  // nothing for another word
struct LogEntry {
  std::int64_t time = 0;  // milliseconds since 1970
  LogLevel level = LogLevel::info;
  std::string message;
  std::map<std::string, std::string> fields = {};
};

// Creates sandboxes. Thread-safe. Destroying the runtime ends all of its sandboxes but those kept.
class Runtime {
 public:
  virtual ~Runtime() = default;
  virtual Capabilities capabilities() const = 0;
  virtual std::unique_ptr<Sandbox> create(const Spec& spec) = 0;
  // Where sandboxes may outlive the program: those of earlier ones.
  virtual std::unique_ptr<Sandbox> open(const std::string& id);  // kept
  virtual std::vector<Listing> list();
  virtual void remove_snapshot(const std::string& name);
  virtual Defaults snapshot_defaults(const std::string& name);  // Error{not_found}
  // A second name for what a snapshot holds, in place of what `name` named before, at once. Error{not_found}.
  virtual void name_snapshot(const std::string& existing, const std::string& name);
  // Prepares what create needs, so that it is quick. Names what all of it was made from: equal for equal content.
  virtual std::string build(const Spec& spec);
  // What happened to a sandbox, oldest first; it ends with the sandbox and keeps the newest some thousand entries.
  virtual std::vector<LogEntry> log(const std::string& id);  // Error{not_found}
  // Adds to it what the runtime cannot know; nothing happens when the sandbox is gone. The time is set here.
  virtual void note(const std::string& id, LogEntry entry);
};

struct ContainerOptions {
  std::filesystem::path directory;  // where overlays live; empty: a fresh one under the system's temporary folder
  std::filesystem::path
      helper_program;  // the program that serves the hidden verb `sandbox-helper`; empty: /proc/self/exe
};

// The container runtime. Throws Error{not_supported} naming what this host lacks.
std::unique_ptr<Runtime> make_container_runtime(const ContainerOptions& options = {});

struct MicrovmOptions {
  std::filesystem::path directory;    // where templates, layers and the journal live; needed
  std::string accelerator = "auto";   // kvm, tcg, or auto: kvm where processor and host have it
  int pool = 0;                       // QEMU processes kept ready, so that create and resume need not start one
  std::chrono::seconds patience{10};  // to wait for another program that uses the directory
  std::function<void(const char*)>
      at_step;  // told each step of each operation, for tests that kill there; may be empty
};

// The microVM runtime: QEMU, with memory that is paused, copied and kept. docs/sandbox.md says how. Throws
// Error{not_supported} naming what this host lacks.
std::unique_ptr<Runtime> make_microvm_runtime(const MicrovmOptions& options);

// The hidden verb `sandbox-helper FD`: a small single-threaded process that creates containers on behalf of the
// program, so that a large process is never forked, and that cleans up when the program dies. Returns the exit code.
int helper_main(int argc, char** argv);

}  // namespace tidelock::sandbox

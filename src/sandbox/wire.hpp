// How the program, the helper and a container's init talk: frames over Unix stream sockets, file descriptors beside
// them.
//
// A frame is `type` and `length` (both u32, native order: both ends are the same binary) and `length` bytes of body.
// Bodies are fields in a fixed order; text is a u32 length and its bytes. Every length is checked before it is
// believed: the program reads frames from an init that lives among hostile processes.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "sandbox/sandbox.hpp"

namespace tidelock::sandbox {

// Owns a file descriptor.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    if (this != &other) {
      reset(std::exchange(other.fd_, -1));
    }
    return *this;
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  ~FileDescriptor() { reset(); }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  void reset(int fd = -1);

 private:
  int fd_ = -1;
};

// Raises this process's limit of open files to what it may: a sandbox holds five in the program, and the usual 1024
// would end at two hundred sandboxes.
void raise_file_limit() noexcept;

constexpr std::size_t kMaxBody = 4U << 20;  // more than execve accepts as arguments and environment together
constexpr std::size_t kMaxDescriptors = 8;

enum class MessageType : std::uint32_t {
  // program -> helper, and its answers
  hello = 1,  // Hello; descriptor: the run directory's lock
  welcome,    // Welcome
  create,     // CreateRequest; descriptors: init's end of its socket, write end of the "gone" pipe, [upper to copy]
  created,    // Created; descriptors: control and event file of the freezer, when it is a cgroup
  destroy,    // text: id. No answer: the "gone" pipe closes when nothing is left
  failed,     // text: why
  // init -> program, and back
  ready,   // descriptor: the upper directory (for fork_filesystem)
  run,     // RunRequest; descriptors: standard input, output, error
  exited,  // Exited
  kill,    // ends what `run` started. No answer of its own: `exited` follows
  adopt,   // descriptors: read ends of pipes that background processes still hold; init empties them
  stop,    // SIGSTOP to all but init (where no freezer is writable); answered by `done`
  resume,  // SIGCONT to all; answered by `done`
  done,
};

struct Message {
  MessageType type{};
  std::string body;
  std::vector<FileDescriptor> descriptors;
};

// Sends one frame. Throws Error{io} when the peer is gone.
void send_message(int socket, MessageType type, std::string_view body = {}, std::span<const int> descriptors = {});

// Receives one frame; nothing when the peer has closed. Throws Error{corrupt_data} for a frame that cannot be one and
// Error{io} when the socket fails or its receive time-out passes inside a frame.
std::optional<Message> receive_message(int socket);

// Waits until `descriptor` is readable (or closed by its peer) or `deadline` has passed; false when it has passed.
bool wait_readable(int descriptor, std::chrono::steady_clock::time_point deadline);

struct FrameHeader {
  std::uint32_t type = 0;
  std::uint32_t length = 0;
};
FrameHeader decode_header(std::string_view bytes);  // throws Error{corrupt_data}

// What a run of the helper may use; all true but in tests of the fall-backs.
struct Features {
  bool cgroup_limits = true;
  bool cgroup_freezer = true;
  bool cgroup_version2 = true;
};

struct Hello {
  std::string run_directory;
  Features features;
};

enum class Freezer : std::uint8_t { signals = 0, version1 = 1, version2 = 2 };  // SIGSTOP, or which cgroup

struct Welcome {
  std::string isolation;
  Freezer freezer = Freezer::signals;
};

struct CreateRequest {
  std::string id;
  std::string image_root;
  Limits limits;
  std::uint32_t uid = 0;  // of the container that this one is a copy of; 0: a new one
};

struct Created {
  std::int32_t pid = 0;  // of init, as the host sees it
  std::uint32_t uid = 0;
};

enum class RunKind : std::uint8_t { command = 0, write_file = 1, read_file = 2 };

struct RunRequest {
  RunKind kind = RunKind::command;
  std::vector<std::string> argv;         // command
  std::vector<std::string> environment;  // command: NAME=value
  std::string path;                      // command: its directory; files: the file
  std::uint32_t mode = 0;                // write_file
  std::uint64_t limit = 0;               // read_file: bytes
};

struct Exited {
  std::int32_t exit_code = 0;
  std::int32_t signal = 0;
};

// Each decode throws Error{corrupt_data} for a body that is short, has bytes left over, or holds an impossible value.
std::string encode(const Hello& value);
std::string encode(const Welcome& value);
std::string encode(const CreateRequest& value);
std::string encode(const Created& value);
std::string encode(const RunRequest& value);
std::string encode(const Exited& value);
Hello decode_hello(std::string_view body);
Welcome decode_welcome(std::string_view body);
CreateRequest decode_create(std::string_view body);
Created decode_created(std::string_view body);
RunRequest decode_run(std::string_view body);
Exited decode_exited(std::string_view body);

}  // namespace tidelock::sandbox

#include "sandbox/container.hpp"

#include <fcntl.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>

#include "base/error.hpp"
#include "base/log.hpp"
#include "sandbox/image.hpp"

extern char** environ;

namespace tidelock::sandbox {
namespace fs = std::filesystem;
namespace {

constexpr timeval kPatience{30, 0};  // inside a message, and for answers of the helper

}  // namespace

std::pair<FileDescriptor, FileDescriptor> make_socket_pair() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    fail(ErrorCode::exhausted, "sandbox: cannot make a socket: {}", std::strerror(errno));
  }
  // Our end never waits long inside a message: the other may be in hostile company.
  setsockopt(ends[0], SOL_SOCKET, SO_RCVTIMEO, &kPatience, sizeof kPatience);
  setsockopt(ends[0], SOL_SOCKET, SO_SNDTIMEO, &kPatience, sizeof kPatience);
  return {FileDescriptor(ends[0]), FileDescriptor(ends[1])};
}

HelperProcess::HelperProcess(const ContainerOptions& options, const Features& features)
    : run_(make_run_directory(options.directory.empty() ? fs::temp_directory_path() : options.directory)) {
  raise_file_limit();
  try {
    start(options.helper_program.empty() ? "/proc/self/exe" : options.helper_program);
    const int lock = run_.lock.get();
    std::optional<Message> answer;
    try {
      send_message(control_.get(), MessageType::hello, encode(Hello{run_.path.string(), features}), {&lock, 1});
      answer = receive_message(control_.get());
    } catch (const Error&) {
      answer.reset();  // gone before it has read or answered
    }
    if (!answer) {
      fail(ErrorCode::internal, "sandbox: the helper ended at once; is '{}' a program with the verb sandbox-helper?",
           options.helper_program.empty() ? "/proc/self/exe" : options.helper_program.string());
    }
    if (answer->type == MessageType::failed) {
      fail(ErrorCode::not_supported, "{}", answer->body);
    }
    welcome_ = decode_welcome(answer->body);
  } catch (const Error&) {
    shut_down();
    throw;
  }
}

void HelperProcess::start(const fs::path& program) {
  auto [ours, theirs] = make_socket_pair();
  control_ = std::move(ours);
  constexpr int kNumber = 3;
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, theirs.get(), kNumber);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  // A session of its own: Ctrl-C in the terminal must not end it before it has cleaned up.
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK);
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);
  std::string name = "tidelock", verb = "sandbox-helper", number = std::to_string(kNumber);
  char* argv[] = {name.data(), verb.data(), number.data(), nullptr};
  const int error = posix_spawn(&pid_, program.c_str(), &actions, &attributes, argv, environ);
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) {
    pid_ = -1;
    fail(ErrorCode::io, "sandbox: cannot start the helper {}: {}", program.string(), std::strerror(error));
  }
}

void HelperProcess::shut_down() noexcept {
  const std::scoped_lock guard(mutex_);
  control_.reset();  // the helper sees the end, kills every container, removes everything, and ends
  if (pid_ > 0) {
    int status = 0;
    while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
    }
    pid_ = -1;
  }
  if (!run_.path.empty()) {
    std::error_code ignored;
    if (fs::exists(run_.path, ignored)) {
      remove_run_directory(run_.path);  // the helper died before it could
    }
    run_.path.clear();
    run_.lock.reset();
  }
}

HelperProcess::Birth HelperProcess::create(const CreateRequest& request, std::span<const int> descriptors) {
  const std::scoped_lock guard(mutex_);
  if (!control_) {
    fail(ErrorCode::io, "sandbox: the runtime has ended or its helper process has died");
  }
  std::optional<Message> answer;
  try {
    send_message(control_.get(), MessageType::create, encode(request), descriptors);
    answer = receive_message(control_.get());
  } catch (const Error& error) {
    control_.reset();  // question and answer could be taken for those of others from now on
    fail(ErrorCode::io, "sandbox: the helper process does not answer: {}", error.what());
  }
  if (!answer) {
    control_.reset();
    fail(ErrorCode::io, "sandbox: the helper process has died");
  }
  if (answer->type == MessageType::failed) {
    fail(ErrorCode::io, "{}", answer->body);
  }
  return {decode_created(answer->body), std::move(answer->descriptors)};
}

void HelperProcess::destroy(const std::string& id) noexcept {
  const std::scoped_lock guard(mutex_);
  if (!control_) {
    return;
  }
  try {
    send_message(control_.get(), MessageType::destroy, id);
  } catch (const std::exception& exception) {
    spdlog::warn("sandbox {}: {}", id, exception.what());
  }
}

std::string HelperProcess::next_id() {
  const std::scoped_lock guard(mutex_);
  return fmt::format("s{}", ++counter_);
}

fs::path HelperProcess::image_root(const std::string& image) {
  if (image == "busybox") {
    const std::scoped_lock guard(image_mutex_);
    fs::path root = run_.path / "busybox";
    if (!fs::exists(root)) {
      build_busybox_image(root);
    }
    return root;
  }
  std::error_code error;
  fs::path root = fs::canonical(image, error);
  if (error || !fs::is_directory(root, error)) {
    throw Error(ErrorCode::not_found,
                fmt::format("sandbox image '{}': neither a known template nor a directory", image),
                "use 'busybox' or the path of a directory that holds a root file system");
  }
  return root;
}

ContainerRuntime::ContainerRuntime(const ContainerOptions& options, const Features& features)
    : helper_(std::make_shared<HelperProcess>(options, features)) {
  // A trial, so that a host that lacks something says so now and not at the first task.
  Spec trial;
  trial.image = (helper_->run_directory() / "empty").string();
  try {
    const ContainerSandbox made(helper_, trial, nullptr);
  } catch (const Error& error) {
    throw Error(ErrorCode::not_supported, fmt::format("containers do not work on this host: {}", error.what()),
                "run as root, or allow user namespaces and overlay mounts in them");
  }
}

Capabilities ContainerRuntime::capabilities() const {
  return {.freeze = true,
          .fork_filesystem = true,
          .fork_memory = false,
          .snapshot = false,
          .isolation = helper_->welcome().isolation};
}

std::unique_ptr<Sandbox> ContainerRuntime::create(const Spec& spec) {
  if (spec.limits.processes < 1 || spec.limits.memory_bytes < (8U << 20) || !(spec.limits.cpus > 0)) {
    fail(ErrorCode::invalid_argument,
         "sandbox limits: {} processes, {} bytes of memory, {} cpus; expected at least 1, 8 MiB and more than 0",
         spec.limits.processes, spec.limits.memory_bytes, spec.limits.cpus);
  }
  return std::make_unique<ContainerSandbox>(helper_, spec, nullptr);
}

std::unique_ptr<Runtime> make_container_runtime(const ContainerOptions& options) {
  return std::make_unique<ContainerRuntime>(options, Features{});
}

}  // namespace tidelock::sandbox

// Starting a QEMU process, and knowing processes again.

#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "base/error.hpp"
#include "base/files.hpp"
#include "sandbox/vm/machine.hpp"

namespace tidelock::sandbox::vm {
namespace fs = std::filesystem;
namespace {

constexpr std::size_t kStack = 64U << 10;
// Where the child finds what it is handed.
constexpr int kMemoryFd = 3, kMonitorFd = 4, kAgentFd = 5, kKernelFd = 6, kInitrdFd = 7;

struct Child {
  std::array<int, 8> descriptors{};  // to become 0, 1, 2, ...; -1: none
  uid_t user = 0;
  const char* program = nullptr;
  char** argv = nullptr;
  int error = 0;
  const char* step = nullptr;
};

int give_up(Child& child, const char* step) {
  child.error = errno;
  child.step = step;
  _exit(127);
}

// Shares our memory until it becomes QEMU: system calls only, and raw ones where the C library would tell other
// threads.
int run_child(void* argument) {
  Child& child = *static_cast<Child*>(argument);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  for (std::size_t i = 0; i < child.descriptors.size(); ++i) {  // out of the way first, so that none is overwritten
    child.descriptors[i] = child.descriptors[i] < 0 ? -1 : fcntl(child.descriptors[i], F_DUPFD, 100);
  }
  for (std::size_t i = 0; i < child.descriptors.size(); ++i) {
    if (child.descriptors[i] >= 0 && dup2(child.descriptors[i], static_cast<int>(i)) < 0) {
      return give_up(child, "hand over a file");
    }
  }
  if (close_range(static_cast<unsigned>(child.descriptors.size()), ~0U, 0) != 0 || setsid() < 0) {
    return give_up(child, "leave the session");
  }
  if (child.user != 0) {
    if (unshare(CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS) != 0) {
      return give_up(child, "make namespaces");
    }
    if (syscall(SYS_setgroups, 0, nullptr) != 0 || syscall(SYS_setresgid, child.user, child.user, child.user) != 0 ||
        syscall(SYS_setresuid, child.user, child.user, child.user) != 0) {
      return give_up(child, "become an ordinary user");
    }
  }
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || chdir("/") != 0) {
    return give_up(child, "give up privileges");
  }
  char path[] = "PATH=/usr/bin:/bin";
  char* environment[] = {path, nullptr};
  execve(child.program, child.argv, environment);
  return give_up(child, "run QEMU");
}

std::vector<std::string> arguments_of(const LaunchPlan& plan) {
  const MachineShape& shape = plan.shape;
  std::vector<std::string> out{
      plan.emulator.program.string(), "-name", fmt::format("guest={},process={}", plan.name, plan.name), "-nodefaults",
      "-no-user-config", "-display", "none", "-no-reboot", "-msg", "timestamp=off", "-machine",
      fmt::format("pc,accel={},memory-backend=mem,suppress-vmdesc=on,usb=off", shape.accelerator), "-cpu",
      shape.accelerator == "kvm" ? "host" : "max", "-smp", "1", "-m", fmt::format("{}M", shape.memory_bytes >> 20),
      "-object",
      fmt::format("memory-backend-file,id=mem,size={}M,mem-path=/proc/self/fd/{},share={}", shape.memory_bytes >> 20,
                  kMemoryFd, plan.copy ? "off" : "on"),
      "-global", "migration.send-configuration=off", "-chardev",
      fmt::format("socket,id=monitor,fd={},server=on,wait=off", kMonitorFd), "-mon", "chardev=monitor,mode=control",
      "-device", "virtio-serial-pci,id=serial,max_ports=2", "-chardev",
      fmt::format("socket,id=agent,fd={},server=on,wait=off", kAgentFd), "-device",
      "virtserialport,bus=serial.0,nr=1,chardev=agent,name=tidelock.agent",
      // A place for the disk, which is put in before the guest runs.
      "-blockdev", fmt::format("null-co,node-name=nothing,size={},read-zeroes=on", shape.disk_bytes), "-device",
      "virtio-blk-pci,id=disk,drive=nothing,share-rw=on", "-sandbox",
      "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny", "-S"};
  if (plan.copy) {
    out.insert(out.end(),
               {"-chardev", "null,id=console", "-device", "isa-serial,chardev=console", "-incoming", "defer"});
  } else {
    out.insert(out.end(),
               {"-chardev", "stdio,id=console,signal=off", "-device", "isa-serial,chardev=console", "-kernel",
                fmt::format("/proc/self/fd/{}", kKernelFd), "-initrd", fmt::format("/proc/self/fd/{}", kInitrdFd),
                "-append", "console=ttyS0 quiet panic=-1 random.trust_cpu=on no_timer_check"});
  }
  return out;
}

FileDescriptor open_for(const fs::path& path, int flags) {
  FileDescriptor out(open(path.c_str(), flags | O_CLOEXEC, 0600));
  if (!out) {
    fail_errno("open", path.string());
  }
  return out;
}

std::string last_line(const fs::path& log) {
  std::string text = fs::exists(log) ? read_file(log, 1U << 20) : "";
  text.erase(text.find_last_not_of("\r\n ") + 1);
  const std::size_t start = text.find_last_of('\n');
  return start == std::string::npos ? text : text.substr(start + 1);
}

}  // namespace

Emulator find_emulator() {
  for (const char* folder : {"/usr/bin", "/usr/local/bin", "/usr/libexec"}) {
    const fs::path program = fs::path(folder) / "qemu-system-x86_64";
    if (access(program.c_str(), X_OK) != 0) {
      continue;
    }
    FILE* pipe = popen((program.string() + " --version 2>/dev/null").c_str(), "re");
    char line[256] = "";
    const bool read = pipe != nullptr && fgets(line, sizeof line, pipe) != nullptr;
    if (pipe != nullptr) {
      pclose(pipe);
    }
    std::string version(line);
    version.erase(version.find_last_not_of('\n') + 1);
    if (read) {
      return {program, version};
    }
  }
  throw Error(ErrorCode::not_supported, "microVM sandboxes need qemu-system-x86_64, which this host does not have",
              "install the package qemu-system-x86 (tools/setup.sh does)");
}

std::optional<ProcessId> identify(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string text;
  if (!std::getline(file, text) || text.rfind(')') == std::string::npos) {
    return std::nullopt;
  }
  // After the name in brackets: state is field 3, the start time field 22.
  std::string rest = text.substr(text.rfind(')') + 2);
  if (rest[0] == 'Z' || rest[0] == 'X') {
    return std::nullopt;
  }
  for (int field = 3; field < 22; ++field) {
    rest.erase(0, rest.find(' ') + 1);
  }
  return ProcessId{pid, std::strtoull(rest.c_str(), nullptr, 10)};
}

bool is_alive(const ProcessId& process) {
  const std::optional<ProcessId> now = process.pid > 0 ? identify(process.pid) : std::nullopt;
  return now && now->start == process.start;
}

void end_process(const ProcessId& process) {
  // The descriptor is taken before the identity is checked: from then on the pid cannot become another process's.
  const FileDescriptor handle(static_cast<int>(syscall(SYS_pidfd_open, process.pid, 0)));
  if (handle && is_alive(process)) {
    syscall(SYS_pidfd_send_signal, handle.get(), SIGKILL, nullptr, 0);
    pollfd entry{handle.get(), POLLIN, 0};
    poll(&entry, 1, 10'000);
  }
  waitpid(process.pid, nullptr, WNOHANG);  // when it is our child
}

std::vector<std::pair<std::string, ProcessId>> find_machines(const std::string& directory_id) {
  std::vector<std::pair<std::string, ProcessId>> out;
  const std::string wanted = "guest=tidelock-" + directory_id + "-";
  for (const fs::directory_entry& entry : fs::directory_iterator("/proc")) {
    const pid_t pid = std::atoi(entry.path().filename().c_str());
    if (pid <= 0) {
      continue;
    }
    std::ifstream file(entry.path() / "cmdline");
    std::string text((std::istreambuf_iterator<char>(file)), {});
    const std::size_t at = text.find(wanted);
    const std::optional<ProcessId> process = at == std::string::npos ? std::nullopt : identify(pid);
    if (process) {
      const std::size_t begin = at + wanted.size();
      out.emplace_back(text.substr(begin, text.find_first_of(std::string_view(",\0", 2), begin) - begin), *process);
    }
  }
  return out;
}

std::unique_ptr<Machine> Machine::launch(const LaunchPlan& plan) {
  const FileDescriptor memory = open_for(plan.memory, O_RDWR), null = open_for("/dev/null", O_RDONLY);
  const FileDescriptor log = open_for(plan.folder / "log", O_WRONLY | O_CREAT | O_APPEND);
  const FileDescriptor monitor = listen_socket((plan.folder / "monitor").string());
  const FileDescriptor agent = listen_socket((plan.folder / "agent").string());
  FileDescriptor kernel, initrd;
  if (!plan.copy) {
    kernel = open_for(plan.kernel, O_RDONLY);
    initrd = open_for(plan.initrd, O_RDONLY);
  }
  std::vector<std::string> arguments = arguments_of(plan);
  std::vector<char*> argv;
  argv.reserve(arguments.size() + 1);
  for (std::string& text : arguments) argv.push_back(text.data());
  argv.push_back(nullptr);
  Child child;
  child.descriptors = {null.get(),    log.get(),   log.get(),    memory.get(),
                       monitor.get(), agent.get(), kernel.get(), initrd.get()};
  child.user = plan.user;
  child.program = argv[0];
  child.argv = argv.data();
  const std::unique_ptr<char[]> stack(new char[kStack]);
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // no handler of ours may run in the shared memory
  const pid_t pid = clone(run_child, stack.get() + kStack, CLONE_VM | CLONE_VFORK | SIGCHLD, &child);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (pid < 0 || child.error != 0) {
    if (pid > 0) {
      waitpid(pid, nullptr, 0);
    }
    fail(ErrorCode::io, "sandbox: cannot {}: {}", pid < 0 ? "start a process" : child.step,
         std::strerror(pid < 0 ? errno : child.error));
  }
  const std::optional<ProcessId> process = identify(pid);
  if (!process) {
    waitpid(pid, nullptr, 0);
    fail(ErrorCode::io, "sandbox: QEMU ended at once: {}", last_line(plan.folder / "log"));
  }
  return std::make_unique<Machine>(*process, plan.folder, plan.memory, plan.shape.memory_bytes);
}

void Machine::fail_dead(const std::string& step) {
  waitpid(process_.pid, nullptr, WNOHANG);
  fail(ErrorCode::io, "sandbox: QEMU ended while it should {}: {}", step, last_line(folder_ / "log"));
}

Qmp& Machine::monitor() {
  if (!monitor_.connected()) {
    try {
      monitor_ = Qmp((folder_ / "monitor").string());
    } catch (const Error& error) {
      if (!alive()) {
        fail_dead("greet");
      }
      throw;
    }
  }
  return monitor_;
}

}  // namespace tidelock::sandbox::vm

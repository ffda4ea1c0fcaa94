// A watch: a child of the agent that tells what changes below a folder, until its standard input ends. What it may take
// of the guest is bounded: folders, memory, and the kernel's own queue of changes; past that it ends and says so.

#include <dirent.h>
#include <grp.h>
#include <poll.h>
#include <sys/inotify.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "sandbox/agent/agent.hpp"

namespace tidelock::sandbox::agent {
namespace {

constexpr std::size_t kMaxFolders = 8192;
constexpr rlim_t kMemory = 64U << 20;
constexpr std::uint32_t kMask = IN_CREATE | IN_MODIFY | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO | IN_ATTRIB |
                                IN_DELETE_SELF | IN_MOVE_SELF | IN_ONLYDIR;

// The letter of vm::kChanges for what the kernel told; 0: nothing that anybody asked for.
char letter_of(std::uint32_t mask) {
  return (mask & (IN_CREATE | IN_MOVED_TO)) != 0        ? 'c'
         : (mask & IN_MODIFY) != 0                      ? 'w'
         : (mask & (IN_DELETE | IN_DELETE_SELF)) != 0   ? 'r'
         : (mask & (IN_MOVED_FROM | IN_MOVE_SELF)) != 0 ? 'n'
         : (mask & IN_ATTRIB) != 0                      ? 'a'
                                                        : '\0';
}

class Watch {
 public:
  explicit Watch(const vm::GuestRequest& request)
      : root_(request.path),
        recursive_((request.flags & vm::kRecursive) != 0),
        entries_((request.flags & vm::kWithEntries) != 0),
        changes_(inotify_init1(IN_CLOEXEC | IN_NONBLOCK)) {}

  [[noreturn]] void serve() {
    if (changes_ < 0) {
      quit_file("watch", root_, errno);
    }
    add("", false);
    print(vm::kWatchReady + std::string(1, '\0'));
    while (true) {
      pollfd entries[2] = {{changes_, POLLIN, 0}, {STDIN_FILENO, POLLIN, 0}};
      poll(entries, 2, -1);
      if (entries[1].revents != 0) {
        _exit(0);
      }
      alignas(inotify_event) char part[16U << 10];
      const ssize_t got = read(changes_, part, sizeof part);
      for (ssize_t at = 0; at < got;) {
        const auto* event = reinterpret_cast<const inotify_event*>(part + at);
        take(*event, event->len > 0 ? event->name : "");
        at += static_cast<ssize_t>(sizeof *event + event->len);
      }
      print(told_);
      told_.clear();
    }
  }

 private:
  std::string full(const std::string& below) const { return below.empty() ? root_ : root_ + "/" + below; }

  void take(const inotify_event& event, const std::string& name) {
    if ((event.mask & IN_Q_OVERFLOW) != 0) {
      quit(kExhausted, "changes below " + root_ + " were lost: there were too many at once");
    }
    const auto found = folders_.find(event.wd);
    if (found == folders_.end()) {
      return;
    }
    if ((event.mask & IN_IGNORED) != 0) {
      folders_.erase(found);
      return;
    }
    const std::string below = name.empty() || found->second.empty() ? found->second + name : found->second + "/" + name;
    if (name.empty() && !below.empty()) {
      return;  // a folder below: the one above tells of it
    }
    const char letter = letter_of(event.mask);
    if (letter != '\0') {
      tell(letter, below.empty() ? "." : below);
    }
    if ((event.mask & IN_ISDIR) != 0 && !name.empty() && (event.mask & IN_MOVED_FROM) != 0) {
      forget(below);
    }
    if (recursive_ && (event.mask & IN_ISDIR) != 0 && !name.empty() && letter == 'c') {
      add(below, true);
    }
  }

  void tell(char letter, const std::string& below) {
    told_.append(1, letter).push_back('\0');
    told_.append(below).push_back('\0');
    std::string fields;
    const bool has =
        entries_ && letter != 'r' && letter != 'n' && append_entry(full(below == "." ? "" : below), fields);
    told_.append(has ? std::to_string(vm::kFileFields) : "0").push_back('\0');
    told_.append(has ? fields : "");
    if (told_.size() > (64U << 10)) {  // waits for the program, while the kernel queues
      print(told_);
      told_.clear();
    }
  }

  // Watches a folder and, if asked, those below. What is in a new one was made before anybody looked: it is told.
  void add(const std::string& first, bool is_new) {
    std::vector<std::string> todo{first};
    while (!todo.empty()) {
      const std::string below = todo.back();
      todo.pop_back();
      const std::uint32_t links = below.empty() ? 0 : IN_DONT_FOLLOW;
      const int folder = inotify_add_watch(changes_, full(below).c_str(), kMask | links);
      if (folder < 0 && (below.empty() || errno == ENOSPC || errno == ENOMEM)) {
        quit_file("watch", full(below), errno);
      }
      if (folder < 0) {
        continue;  // it went, or may not be looked into
      }
      folders_[folder] = below;
      if (folders_.size() + todo.size() > kMaxFolders) {
        quit(kExhausted, "there are more than " + std::to_string(kMaxFolders) + " folders below " + root_);
      }
      if (recursive_) {
        look_into(below, is_new, todo);
      }
    }
  }

  void look_into(const std::string& below, bool is_new, std::vector<std::string>& todo) {
    DIR* folder = opendir(full(below).c_str());
    while (const dirent* entry = folder != nullptr ? readdir(folder) : nullptr) {
      const std::string name = entry->d_name;
      if (name == "." || name == "..") {
        continue;
      }
      const std::string inner = below.empty() ? name : below + "/" + name;
      if (is_new) {
        tell('c', inner);
      }
      struct stat info {};
      if (lstat(full(inner).c_str(), &info) == 0 && S_ISDIR(info.st_mode)) {
        todo.push_back(inner);
        if (folders_.size() + todo.size() > kMaxFolders) {
          quit(kExhausted, "there are more than " + std::to_string(kMaxFolders) + " folders below " + root_);
        }
      }
    }
    if (folder != nullptr) {
      closedir(folder);
    }
  }

  // A folder that was moved away is not below any more, with all that is in it.
  void forget(const std::string& moved) {
    for (auto at = folders_.begin(); at != folders_.end();) {
      if (at->second == moved || at->second.compare(0, moved.size() + 1, moved + "/") == 0) {
        inotify_rm_watch(changes_, at->first);
        at = folders_.erase(at);
      } else {
        ++at;
      }
    }
  }

  std::string root_;
  bool recursive_, entries_;
  int changes_;
  std::map<int, std::string> folders_;  // by what inotify calls them: the path below root_
  std::string told_;
};

}  // namespace

void watch(const vm::GuestRequest& request) {
  const rlimit memory{kMemory, kMemory};
  struct stat info {};
  if (setrlimit(RLIMIT_AS, &memory) != 0 || setgroups(0, nullptr) != 0 ||
      ((request.flags & vm::kAsRoot) == 0 &&
       (setresgid(kUser, kUser, kUser) != 0 || setresuid(kUser, kUser, kUser) != 0))) {
    quit(kIo, std::string("cannot give up privileges: ") + strerror(errno));
  }
  if (stat(request.path.c_str(), &info) != 0) {
    quit_file("watch", request.path, errno);
  }
  if (!S_ISDIR(info.st_mode)) {
    quit(kInvalid, "watch " + request.path + ": not a folder");
  }
  Watch(request).serve();
}

}  // namespace tidelock::sandbox::agent

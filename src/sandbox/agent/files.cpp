// File operations of the agent, as root: inside, nothing protects the guest from itself.

#include <dirent.h>
#include <fcntl.h>
#include <ftw.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "sandbox/agent/agent.hpp"

namespace tidelock::sandbox::agent {
void quit(int code, const std::string& text) {
  dprintf(STDERR_FILENO, "%s\n", text.c_str());
  _exit(code);
}

void quit_file(const char* step, const std::string& path, int error) {
  int code = kIo;
  if (error == ENOENT) {
    code = kNotFound;
  } else if (error == ENOSPC || error == EDQUOT || error == EFBIG || error == ENOMEM) {
    code = kExhausted;
  } else if (error == ELOOP || error == EISDIR || error == ENOTDIR || error == ENXIO || error == ENAMETOOLONG ||
             error == EINVAL || error == ETXTBSY) {
    code = kInvalid;
  }
  quit(code, std::string(step) + " " + path + ": " + strerror(error));
}

namespace {

constexpr std::size_t kMaxListing = 4U << 20;  // bytes of a folder's entries

void make_parents(const std::string& path, uid_t owner) {
  for (std::size_t slash = path.find('/', 1); slash != std::string::npos; slash = path.find('/', slash + 1)) {
    const std::string folder = path.substr(0, slash);
    if (mkdir(folder.c_str(), 0755) == 0) {
      if (chown(folder.c_str(), owner, owner) != 0) {
        quit_file("make folder", folder, errno);
      }
    } else if (errno != EEXIST) {
      quit_file("make folder", folder, errno);
    }
  }
}

void copy(int from, int to, const char* step, const std::string& path, std::uint64_t limit) {
  static char buffer[64U << 10];
  std::uint64_t total = 0;
  for (ssize_t got = 0; (got = read(from, buffer, sizeof buffer)) != 0;) {
    if (got < 0) {
      quit_file(step, path, errno);
    }
    total += static_cast<std::uint64_t>(got);
    if (total > limit) {
      quit(kExhausted, std::string(step) + " " + path + ": more than the " + std::to_string(limit) + " bytes expected");
    }
    for (ssize_t done = 0; done < got;) {
      const ssize_t put = write(to, buffer + done, static_cast<std::size_t>(got - done));
      if (put <= 0) {
        quit_file(step, path, put == 0 ? ENOSPC : errno);
      }
      done += put;
    }
  }
}

}  // namespace

void write_file(const vm::GuestRequest& request) {
  const uid_t owner = request.limit == vm::kAsRoot ? 0 : kUser;
  make_parents(request.path, owner);
  const char* path = request.path.c_str();
  const bool is_new = access(path, F_OK) != 0;
  const int file = open(path, O_WRONLY | O_CREAT | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, 0600);
  struct stat info {};
  if (file < 0 || fstat(file, &info) != 0) {
    quit_file("write", request.path, errno);
  }
  if (!S_ISREG(info.st_mode)) {
    quit(kInvalid, "write " + request.path + ": not a regular file");
  }
  const mode_t mode = request.mode != vm::kKeepMode ? request.mode & 0777 : is_new ? 0644 : info.st_mode & 07777;
  if ((is_new && fchown(file, owner, owner) != 0) || fchmod(file, mode) != 0 || ftruncate(file, 0) != 0) {
    quit_file("write", request.path, errno);
  }
  copy(STDIN_FILENO, file, "write", request.path, UINT64_MAX);
  _exit(0);
}

void read_file(const vm::GuestRequest& request) {
  const int file = open(request.path.c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  struct stat info {};
  if (file < 0 || fstat(file, &info) != 0) {
    quit_file("read", request.path, errno);
  }
  if (!S_ISREG(info.st_mode)) {
    quit(kInvalid, "read " + request.path + ": not a regular file");
  }
  copy(file, STDOUT_FILENO, "read", request.path, request.limit);
  _exit(0);
}

namespace {

// The name of an id, as /etc/passwd or /etc/group have it; the number when they do not. Read here, since what the C
// library would ask cannot be linked statically.
std::string name_of(const char* file, unsigned id) {
  FILE* in = fopen(file, "re");
  char line[1024];
  std::string out;
  while (in != nullptr && out.empty() && fgets(line, sizeof line, in) != nullptr) {
    char name[256];
    unsigned found = 0;
    if (sscanf(line, "%255[^:]:%*[^:]:%u", name, &found) == 2 && found == id) {
      out = name;
    }
  }
  if (in != nullptr) {
    fclose(in);
  }
  return out.empty() ? std::to_string(id) : out;
}

}  // namespace

void print(const std::string& text) {
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t put = write(STDOUT_FILENO, text.data() + done, text.size() - done);
    if (put <= 0) {
      _exit(kIo);
    }
    done += static_cast<std::size_t>(put);
  }
}

// A link is told as what it leads to, with its target.
bool append_entry(const std::string& path, std::string& out) {
  struct stat info {};
  if (lstat(path.c_str(), &info) != 0) {
    return false;
  }
  std::string target;
  if (S_ISLNK(info.st_mode)) {
    char text[PATH_MAX];
    const ssize_t size = readlink(path.c_str(), text, sizeof text);
    target.assign(text, static_cast<std::size_t>(size > 0 ? size : 0));
    struct stat behind {};
    if (stat(path.c_str(), &behind) == 0) {
      info = behind;
    }
  }
  const char* type = S_ISREG(info.st_mode) ? "f" : S_ISDIR(info.st_mode) ? "d" : "?";
  char mode[16];
  snprintf(mode, sizeof mode, "%o", info.st_mode);
  for (const std::string& field : {std::string(type), path, std::to_string(info.st_size), std::string(mode),
                                   name_of("/etc/passwd", info.st_uid), name_of("/etc/group", info.st_gid),
                                   std::to_string(info.st_mtim.tv_sec), std::to_string(info.st_mtim.tv_nsec), target}) {
    out.append(field).push_back('\0');
  }
  return true;
}

namespace {

void append_folder(const std::string& path, int depth, std::string& out) {
  DIR* folder = opendir(path.c_str());
  if (folder == nullptr) {
    quit_file("list", path, errno);
  }
  while (const dirent* entry = readdir(folder)) {
    const std::string name = entry->d_name;
    if (name == "." || name == "..") {
      continue;
    }
    const std::string inner = (path == "/" ? "" : path) + "/" + name;
    if (!append_entry(inner, out)) {
      continue;  // it went while we looked
    }
    if (out.size() > kMaxListing) {
      quit(kExhausted, "list " + path + ": more than " + std::to_string(kMaxListing) + " bytes of entries");
    }
    struct stat info {};
    if (depth > 1 && lstat(inner.c_str(), &info) == 0 && S_ISDIR(info.st_mode)) {
      append_folder(inner, depth - 1, out);
    }
  }
  closedir(folder);
}

void print_entry(const std::string& path) {
  std::string out;
  if (!append_entry(path, out)) {
    quit_file("look at", path, errno);
  }
  print(out);
}

void make_folder(const std::string& path, uid_t owner) {
  struct stat info {};
  if (stat(path.c_str(), &info) == 0) {
    quit(S_ISDIR(info.st_mode) ? kExists : kInvalid,
         path + (S_ISDIR(info.st_mode) ? " exists already" : " exists and is not a folder"));
  }
  make_parents(path + "/", owner);
  print_entry(path);
}

int remove_one(const char* path, const struct stat*, int, struct FTW*) {
  return remove(path);
}

}  // namespace

void run_file_tool(const vm::GuestRequest& request) {
  std::string texts = request.arguments;
  std::vector<char*> words = pointers(texts);
  words.resize(words.size() + 3, nullptr);
  const uid_t owner = (request.flags & vm::kAsRoot) != 0 ? 0 : kUser;
  const std::string operation = words[0] != nullptr ? words[0] : "";
  const std::string path = words[1] != nullptr ? words[1] : "";
  const char* more = words[1] != nullptr ? words[2] : nullptr;
  if (path.empty() || path[0] != '/') {
    quit(kInvalid, "'" + path + "' is not an absolute path");
  }
  if (operation == "stat") {
    print_entry(path);
  } else if (operation == "list") {
    std::string out;
    append_folder(path, more != nullptr ? atoi(more) : 1, out);
    print(out);
  } else if (operation == "mkdir") {
    make_folder(path, owner);
  } else if (operation == "move" && more != nullptr) {
    make_parents(more, owner);
    if (rename(path.c_str(), more) != 0) {
      quit_file("move", path, errno);
    }
    print_entry(more);
  } else if (operation == "remove") {
    struct stat info {};
    if (lstat(path.c_str(), &info) == 0 && nftw(path.c_str(), remove_one, 32, FTW_DEPTH | FTW_PHYS) != 0) {
      quit_file("remove", path, errno);
    }
  } else {
    quit(kInvalid, "there is no file operation '" + operation + "'");
  }
  _exit(0);
}

}  // namespace tidelock::sandbox::agent

#include "rl/harbor_dockerfile.hpp"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cctype>
#include <set>
#include <sstream>

#include "base/error.hpp"
#include "base/files.hpp"

namespace tidelock::rl {
namespace {

constexpr std::uint64_t kTreeLimit = 64ULL << 20;

int mode_of(const std::filesystem::path& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) fail_errno("stat", path.string());
  return static_cast<int>(status.st_mode & 0777);
}

std::string joined(const std::string& directory, const std::string& name) {
  return directory.ends_with('/') ? directory + name : fmt::format("{}/{}", directory, name);
}

struct Instruction {
  std::string name;  // in capitals
  std::vector<std::string> words;
  std::string rest;  // unsplit
  int line = 0;
};

class Reader {
 public:
  explicit Reader(const std::filesystem::path& path) : path_(path) { out_.directory = std::string("/"); }

  Dockerfile read() {
    for (const Instruction& instruction : instructions()) apply(instruction);
    if (out_.image.empty()) fail(ErrorCode::corrupt_data, "{}: no FROM", path_.string());
    return std::move(out_);
  }

 private:
  // Lines joined at a trailing backslash, without comments.
  std::vector<Instruction> instructions() const {
    std::vector<Instruction> result;
    std::istringstream lines(read_file(path_, 1 << 20));
    std::string line, pending;
    int number = 0, first = 0;
    while (std::getline(lines, line)) {
      ++number;
      while (!line.empty() && std::isspace(static_cast<unsigned char>(line.back())) != 0) line.pop_back();
      const std::size_t start = line.find_first_not_of(" \t");
      if (start == std::string::npos || line[start] == '#') continue;
      if (pending.empty()) first = number;
      const bool more = line.back() == '\\';
      if (more) line.pop_back();
      pending += line.substr(start);
      pending += ' ';
      if (more) continue;
      result.push_back(split(pending, first));
      pending.clear();
    }
    if (!pending.empty()) result.push_back(split(pending, first));
    return result;
  }

  static Instruction split(const std::string& text, int line) {
    Instruction instruction;
    instruction.line = line;
    std::istringstream words(text);
    words >> instruction.name;
    for (char& c : instruction.name) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    std::string word;
    while (words >> word) {
      if (!instruction.rest.empty()) instruction.rest += ' ';
      instruction.rest += word;
      instruction.words.push_back(std::move(word));
    }
    return instruction;
  }

  [[noreturn]] void refuse(const Instruction& at, const std::string& why) const {
    throw Error(ErrorCode::not_supported,
                fmt::format("{}:{}: {} {}: {}", path_.string(), at.line, at.name, at.rest, why),
                "Build the image elsewhere, unpack it into a directory and name that directory for the image.");
  }

  void apply(const Instruction& at) {
    if (at.name == "LABEL" || at.name == "EXPOSE" || at.name == "CMD") return;
    if (at.name != "FROM" && at.name != "WORKDIR" && at.name != "ENV" && at.name != "COPY")
      refuse(at, "this instruction needs an image build, which is not supported");
    if (at.rest.find('$') != std::string::npos) refuse(at, "variables are not supported");
    if (at.name == "FROM") {
      if (!out_.image.empty()) refuse(at, "a second stage is not supported");
      if (at.words.size() != 1) refuse(at, "expected one image name");
      out_.image = at.words[0];
      return;
    }
    if (out_.image.empty()) refuse(at, "it stands before FROM");
    if (at.name == "WORKDIR") {
      if (at.words.size() != 1) refuse(at, "expected one directory");
      out_.directory = absolute(at.words[0]);
      directories_.insert(out_.directory);
    } else if (at.name == "ENV") {
      environment(at);
    } else {
      copy(at);
    }
  }

  std::string absolute(const std::string& path) const {
    const auto full =
        path.starts_with('/') ? std::filesystem::path(path) : std::filesystem::path(out_.directory) / path;
    std::string text = full.lexically_normal().string();
    if (text.size() > 1 && text.ends_with('/')) text.pop_back();
    return text;
  }

  void environment(const Instruction& at) {
    if (at.rest.find_first_of("\"'\\") != std::string::npos) refuse(at, "quotes are not supported");
    if (at.words.empty()) refuse(at, "expected NAME=VALUE");
    if (at.words[0].find('=') == std::string::npos) {  // the old form: ENV NAME VALUE
      if (at.words.size() < 2) refuse(at, "expected NAME=VALUE");
      out_.environment[at.words[0]] = at.rest.substr(at.words[0].size() + 1);
      return;
    }
    for (const std::string& word : at.words) {
      const std::size_t equals = word.find('=');
      if (equals == std::string::npos || equals == 0) refuse(at, "expected NAME=VALUE");
      out_.environment[word.substr(0, equals)] = word.substr(equals + 1);
    }
  }

  void copy(const Instruction& at) {
    if (at.words.size() < 2) refuse(at, "expected a source and a destination");
    for (const std::string& word : at.words)
      if (word.starts_with("--") || word.find_first_of("*?[]\"") != std::string::npos)
        refuse(at, fmt::format("{} is not supported", word));
    const std::string& last = at.words.back();
    const std::string target = absolute(last);
    const bool into = at.words.size() > 2 || last.ends_with('/') || last == "." || directories_.count(target) != 0;
    for (std::size_t i = 0; i + 1 < at.words.size(); ++i) {
      const auto relative = std::filesystem::path(at.words[i]).relative_path().lexically_normal();
      if (!relative.empty() && *relative.begin() == "..") refuse(at, "the source lies outside the task");
      const auto source = path_.parent_path() / relative;
      if (std::filesystem::is_symlink(source)) refuse(at, "the source is a link");
      if (std::filesystem::is_directory(source)) {
        for (SandboxFile& file : read_tree(source, target))
          // COPY . takes the Dockerfile along, as Docker does.
          out_.files.push_back(std::move(file));
        directories_.insert(target);
      } else if (std::filesystem::is_regular_file(source)) {
        const std::string path = into ? joined(target, relative.filename().string()) : target;
        out_.files.push_back({path, read_file(source, kTreeLimit), mode_of(source)});
        if (into) directories_.insert(target);
      } else {
        refuse(at, fmt::format("there is no {}", source.string()));
      }
    }
  }

  std::filesystem::path path_;
  Dockerfile out_;
  std::set<std::string> directories_{"/"};  // known to exist in the image
};

}  // namespace

Dockerfile read_dockerfile(const std::filesystem::path& path) {
  return Reader(path).read();
}

std::vector<SandboxFile> read_tree(const std::filesystem::path& directory, const std::string& target) {
  std::vector<SandboxFile> files;
  std::uint64_t bytes = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory)) {
    if (entry.is_symlink() || (!entry.is_regular_file() && !entry.is_directory()))
      fail(ErrorCode::not_supported, "{}: links and special files are not supported", entry.path().string());
    if (!entry.is_regular_file()) continue;
    bytes += entry.file_size();
    if (bytes > kTreeLimit)
      fail(ErrorCode::exhausted, "{}: more than {} bytes of files", directory.string(), kTreeLimit);
    files.push_back({joined(target, std::filesystem::relative(entry.path(), directory).string()),
                     read_file(entry.path(), kTreeLimit), mode_of(entry.path())});
  }
  std::sort(files.begin(), files.end(), [](const auto& a, const auto& b) { return a.path < b.path; });
  return files;
}

}  // namespace tidelock::rl

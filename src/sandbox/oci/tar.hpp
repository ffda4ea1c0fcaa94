// Tar archives, read as a stream: ustar, GNU long names and pax records. What cannot be read safely is an error.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace tidelock::sandbox::oci {

// Gives the next bytes, up to `size`, and says how many; 0: there are no more. Throws what reading can throw.
using Source = std::function<std::size_t(char* to, std::size_t size)>;

struct TarEntry {
  enum class Kind { file, folder, symbolic_link, hard_link, fifo, device };
  Kind kind = Kind::file;
  std::string path;    // relative, without "." and ".." and without a slash at its end; empty: the root itself
  std::string target;  // of a symbolic link: as it is; of a hard link: like path
  std::uint64_t size = 0;
  std::uint32_t mode = 0;  // 07777
  std::uint32_t uid = 0, gid = 0;
  std::int64_t modified = 0;  // seconds since 1970
};

// A path of an archive as TarEntry has it. Throws Error{corrupt_data} for one that leads out ("..") or holds a zero
// byte, naming `what`; an absolute one counts from the root.
std::string inner_path(const std::string& path, const std::string& what);

// One pass. `what` names the archive in errors. Throws Error{corrupt_data} for what is no tar archive, one that ends
// early, and paths that lead out; Error{not_supported} for sparse files and kinds that are not known.
class TarReader {
 public:
  TarReader(Source source, std::string what) : source_(std::move(source)), what_(std::move(what)) {}
  bool next(TarEntry& entry);                       // skips what was not read of the last one's content
  std::size_t read(char* to, std::size_t size);     // of the entry's content; 0 at its end
  std::uint64_t offset() const { return offset_; }  // bytes taken from the source: before a read, where content begins

 private:
  struct Extra;
  void need(char* to, std::size_t size);
  bool read_block(char* block);
  std::string read_text(std::uint64_t size);
  void skip_content();
  void read_pax(Extra& extra, std::uint64_t size);
  [[noreturn]] void refuse(const std::string& why) const;

  Source source_;
  std::string what_;
  std::uint64_t offset_ = 0, left_ = 0, padding_ = 0;
};

}  // namespace tidelock::sandbox::oci

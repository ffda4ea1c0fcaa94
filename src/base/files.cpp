#include "base/files.hpp"

#include <fcntl.h>
#include <openssl/evp.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>

#include "base/error.hpp"

namespace tidelock {
namespace {

// Closes a descriptor on every way out.
struct Descriptor {
  int fd = -1;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

void write_all(int fd, const char* data, std::size_t size, const std::string& path) {
  while (size > 0) {
    const ssize_t n = ::write(fd, data, size);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_errno("cannot write", path);
    data += n;
    size -= static_cast<std::size_t>(n);
  }
}

constexpr std::array<std::uint32_t, 256> make_crc_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t c = i;
    for (int bit = 0; bit < 8; ++bit) c = (c & 1) ? 0x82F63B78U ^ (c >> 1) : c >> 1;
    table[i] = c;
  }
  return table;
}

}  // namespace

std::string read_file(const std::filesystem::path& path, std::uint64_t limit) {
  const Descriptor d{::open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  if (d.fd < 0) fail_errno("cannot open", path.string());
  std::string content;
  std::array<char, 65536> buffer;
  for (;;) {
    const ssize_t n = ::read(d.fd, buffer.data(), buffer.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_errno("cannot read", path.string());
    if (n == 0) return content;
    if (content.size() + static_cast<std::size_t>(n) > limit)
      fail(ErrorCode::exhausted, "{} is larger than the {} bytes allowed here", path.string(), limit);
    content.append(buffer.data(), static_cast<std::size_t>(n));
  }
}

void make_folder(const std::filesystem::path& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) {
    errno = error.value();
    fail_errno("cannot make the folder", path.string());
  }
}

void sync_directory(const std::filesystem::path& directory) {
  const Descriptor d{::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)};
  if (d.fd < 0 || ::fsync(d.fd) != 0) fail_errno("cannot sync directory", directory.string());
}

AtomicFile::AtomicFile(std::filesystem::path path) : path_(std::move(path)) {
  temporary_ = path_;
  temporary_ += ".tmp";
  fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd_ < 0) fail_errno("cannot create", temporary_.string());
}

AtomicFile::~AtomicFile() {
  if (fd_ >= 0) ::close(fd_);
  if (!committed_) ::unlink(temporary_.c_str());
}

void AtomicFile::write(std::span<const std::byte> bytes) {
  write_all(fd_, reinterpret_cast<const char*>(bytes.data()), bytes.size(), temporary_.string());
}

void AtomicFile::commit() {
  if (::fsync(fd_) != 0) fail_errno("cannot sync", temporary_.string());
  const int closed = ::close(fd_);
  fd_ = -1;
  if (closed != 0) fail_errno("cannot close", temporary_.string());
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail_errno("cannot rename onto", path_.string());
  committed_ = true;
  sync_directory(path_.has_parent_path() ? path_.parent_path() : ".");
}

void write_file_atomic(const std::filesystem::path& path, std::string_view content) {
  AtomicFile file(path);
  file.write(content);
  file.commit();
}

FolderLock::FolderLock(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "lock";
  fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fd_ < 0) fail_errno("cannot open", path.string());
  if (::flock(fd_, LOCK_EX | LOCK_NB) != 0) {
    const int cause = errno;
    std::array<char, 32> holder{};
    const ssize_t n = ::pread(fd_, holder.data(), holder.size() - 1, 0);
    ::close(fd_);
    errno = cause;
    if (cause != EWOULDBLOCK) fail_errno("cannot lock", path.string());
    fail(ErrorCode::invalid_argument, "{} is in use by process {}", folder.string(),
         n > 0 ? std::string(holder.data(), static_cast<std::size_t>(n)) : "?");
  }
  const std::string own = std::to_string(::getpid());
  if (::ftruncate(fd_, 0) != 0 || ::pwrite(fd_, own.data(), own.size(), 0) != static_cast<ssize_t>(own.size())) {
    const int cause = errno;
    ::close(fd_);
    errno = cause;
    fail_errno("cannot write", path.string());
  }
}

FolderLock::~FolderLock() {
  ::close(fd_);
}

MappedFile::MappedFile(const std::filesystem::path& path) {
  const Descriptor d{::open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  if (d.fd < 0) fail_errno("cannot open", path.string());
  struct stat info {};
  if (::fstat(d.fd, &info) != 0) fail_errno("cannot stat", path.string());
  if (!S_ISREG(info.st_mode)) fail(ErrorCode::io, "{} is not a regular file", path.string());
  size_ = static_cast<std::size_t>(info.st_size);
  if (size_ == 0) return;
  void* address = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, d.fd, 0);
  if (address == MAP_FAILED) fail_errno("cannot map", path.string());
  data_ = static_cast<const std::byte*>(address);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

std::array<std::byte, 32> sha256(std::span<const std::byte> bytes) {
  std::array<std::byte, 32> digest{};
  if (EVP_Digest(bytes.data(), bytes.size(), reinterpret_cast<unsigned char*>(digest.data()), nullptr, EVP_sha256(),
                 nullptr) != 1)
    fail(ErrorCode::internal, "SHA-256 is not available from OpenSSL");
  return digest;
}

std::string to_hex(std::span<const std::byte> bytes) {
  std::string hex;
  for (const std::byte b : bytes) hex += fmt::format("{:02x}", static_cast<unsigned>(b));
  return hex;
}

std::string sha256_hex(std::span<const std::byte> bytes) {
  return to_hex(sha256(bytes));
}

std::string sha256_hex(std::string_view bytes) {
  return sha256_hex(std::as_bytes(std::span(bytes.data(), bytes.size())));
}

std::uint32_t crc32c(std::string_view bytes) {
  static constexpr auto table = make_crc_table();
  std::uint32_t crc = 0xFFFFFFFFU;
  for (const char byte : bytes) crc = table[(crc ^ static_cast<unsigned char>(byte)) & 0xFF] ^ (crc >> 8);
  return ~crc;
}

}  // namespace tidelock

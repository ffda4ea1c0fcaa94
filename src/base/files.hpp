// Files and bytes: everything on disk is written whole or not at all.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace tidelock {

// Reads a whole file. Throws Error{io} when it cannot be opened or read, Error{exhausted} when it is larger than
// `limit` bytes.
std::string read_file(const std::filesystem::path& path, std::uint64_t limit = UINT64_MAX);

// Makes a folder with its parents, unless it is there. Throws Error{exhausted} when the disk is full, Error{io}.
void make_folder(const std::filesystem::path& path);

// Writes to `path`.tmp, syncs it, renames it over `path` and syncs the directory: after a crash or a full disk `path`
// holds either the old or the new content. Throws Error{io}; the temporary is removed on failure.
void write_file_atomic(const std::filesystem::path& path, std::string_view content);

// Like write_file_atomic for content that comes in parts.
class AtomicFile {
 public:
  explicit AtomicFile(std::filesystem::path path);
  ~AtomicFile();  // removes the temporary unless committed
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  void write(std::span<const std::byte> bytes);
  void write(std::string_view bytes) { write(std::as_bytes(std::span(bytes.data(), bytes.size()))); }
  void commit();

 private:
  std::filesystem::path path_, temporary_;
  int fd_ = -1;
  bool committed_ = false;
};

// Makes renames and removals inside `directory` durable. Throws Error{io}.
void sync_directory(const std::filesystem::path& directory);

// Keeps a folder to one process while it lives, by a lock on `folder`/lock, which ends with the process however that
// ends; the file stays. Throws Error{invalid_argument} naming the process that holds it.
class FolderLock {
 public:
  explicit FolderLock(const std::filesystem::path& folder);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  int fd_ = -1;
};

// A read-only memory map of a whole file. Owns the mapping.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

// Lower-case hexadecimal.
std::string to_hex(std::span<const std::byte> bytes);

// SHA-256 (OpenSSL), as bytes or as lower-case hexadecimal.
std::array<std::byte, 32> sha256(std::span<const std::byte> bytes);
std::string sha256_hex(std::span<const std::byte> bytes);
std::string sha256_hex(std::string_view bytes);

// CRC-32C (Castagnoli), as TFRecord frames use it.
std::uint32_t crc32c(std::string_view bytes);

}  // namespace tidelock

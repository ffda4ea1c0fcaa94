#include "sandbox/vm/qcow2.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "base/error.hpp"
#include "sandbox/wire.hpp"

namespace tidelock::sandbox::vm {
namespace {

constexpr std::uint64_t kClusterBits = 16, kCluster = 1U << kClusterBits;
constexpr std::uint64_t kL1Covers = kCluster * (kCluster / 8);  // bytes of disk behind one entry of the first table

// qcow2 is big-endian.
void put(std::string& out, std::size_t at, std::uint64_t value, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i) {
    out[at + i] = static_cast<char>(value >> (8 * (bytes - 1 - i)));
  }
}

}  // namespace

// Cluster 0: header. 1: refcount table (one entry). 2: refcount block. 3: L1 table, all zero: nothing written yet.
void create_overlay(const std::filesystem::path& path, std::uint64_t virtual_bytes) {
  const std::uint64_t l1_entries = (virtual_bytes + kL1Covers - 1) / kL1Covers;
  if (virtual_bytes == 0 || l1_entries * 8 > kCluster) {
    fail(ErrorCode::invalid_argument, "a disk of {} bytes, expected 1 to {}", virtual_bytes,
         kL1Covers * (kCluster / 8));
  }
  std::string image(4 * kCluster, '\0');
  put(image, 0, 0x514649FB, 4);  // "QFI" 0xfb
  put(image, 4, 3, 4);           // version
  put(image, 20, kClusterBits, 4);
  put(image, 24, virtual_bytes, 8);
  put(image, 36, l1_entries, 4);
  put(image, 40, 3 * kCluster, 8);  // where the L1 table is
  put(image, 48, 1 * kCluster, 8);  // where the refcount table is
  put(image, 56, 1, 4);             // its clusters
  put(image, 96, 4, 4);             // refcounts of 2^4 bits
  put(image, 100, 104, 4);          // length of the header
  put(image, 1 * kCluster, 2 * kCluster, 8);
  for (std::size_t cluster = 0; cluster < 4; ++cluster) {
    put(image, 2 * kCluster + 2 * cluster, 1, 2);
  }
  const FileDescriptor file(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!file) {
    fail_errno("create", path.string());
  }
  if (write(file.get(), image.data(), image.size()) != static_cast<ssize_t>(image.size())) {
    const int error = errno;
    unlink(path.c_str());
    fail(ErrorCode::exhausted, "cannot write {}: {}", path.string(), std::strerror(error));
  }
}

}  // namespace tidelock::sandbox::vm

#include "sandbox/vm/memory.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>

#include "base/error.hpp"
#include "sandbox/wire.hpp"

namespace tidelock::sandbox::vm {
namespace {

constexpr std::size_t kBatch = 512;  // pages a call; the kernel takes at most 1024 pieces
constexpr std::uint64_t kPresent = 1ULL << 63, kSwapped = 1ULL << 62, kOfFile = 1ULL << 61;

std::string process_file(pid_t pid, const char* name) {
  return fmt::format("/proc/{}/{}", pid, name);
}

}  // namespace

GuestMemory::GuestMemory(pid_t pid, const std::filesystem::path& file, std::uint64_t bytes) : pid_(pid), bytes_(bytes) {
  struct stat info {};
  if (stat(file.c_str(), &info) != 0) {
    fail_errno("look at", file.string());
  }
  std::ifstream maps(process_file(pid, "maps"));
  std::uint64_t found = 0;
  for (std::string line; std::getline(maps, line);) {
    std::uint64_t from = 0, to = 0, offset = 0, inode = 0;
    unsigned major_number = 0, minor_number = 0;
    if (std::sscanf(line.c_str(), "%" SCNx64 "-%" SCNx64 " %*s %" SCNx64 " %x:%x %" SCNu64, &from, &to, &offset,
                    &major_number, &minor_number, &inode) != 6 ||
        inode != info.st_ino || makedev(major_number, minor_number) != info.st_dev) {
      continue;
    }
    // The kernel may have split the mapping; its parts lie side by side in the file's order.
    if (offset == 0) {
      start_ = from;
    }
    if (start_ == 0 || from - start_ != offset) {
      fail(ErrorCode::io, "process {}: the guest's memory is not mapped in one piece", pid);
    }
    found += to - from;
  }
  if (found != bytes) {
    fail(ErrorCode::io, "process {}: {} bytes of {} are mapped, expected {}", pid, found, file.string(), bytes);
  }
}

std::vector<std::uint32_t> GuestMemory::private_pages() const {
  const std::string path = process_file(pid_, "pagemap");
  const FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) {
    fail_errno("open", path);
  }
  std::vector<std::uint64_t> entries(bytes_ / kPage);
  std::size_t done = 0;
  while (done < entries.size() * 8) {
    const ssize_t got = pread(file.get(), reinterpret_cast<char*>(entries.data()) + done, entries.size() * 8 - done,
                              static_cast<off_t>(start_ / kPage * 8 + done));
    if (got <= 0) {
      fail_errno("read", path);
    }
    done += static_cast<std::size_t>(got);
  }
  std::vector<std::uint32_t> pages;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const std::uint64_t entry = entries[i];
    // A swapped page of a file mapping is always a private copy: the file's own pages are not swapped but dropped.
    if ((entry & kSwapped) != 0 || ((entry & kPresent) != 0 && (entry & kOfFile) == 0)) {
      pages.push_back(static_cast<std::uint32_t>(i));
    }
  }
  return pages;
}

void GuestMemory::read(std::span<const std::uint32_t> pages, std::byte* data) const {
  std::array<iovec, kBatch> remote{};
  while (!pages.empty()) {
    const std::size_t count = std::min(pages.size(), kBatch);
    for (std::size_t i = 0; i < count; ++i) {
      // An address of the other process. NOLINTNEXTLINE(performance-no-int-to-ptr)
      remote[i] = {reinterpret_cast<void*>(start_ + std::uint64_t{pages[i]} * kPage), kPage};
    }
    const iovec local{data, count * kPage};
    if (process_vm_readv(pid_, &local, 1, remote.data(), count, 0) != static_cast<ssize_t>(count * kPage)) {
      fail(ErrorCode::io, "process {}: its memory cannot be read: {}", pid_, std::strerror(errno));
    }
    pages = pages.subspan(count);
    data += count * kPage;
  }
}

void GuestMemory::write(std::span<const std::uint32_t> pages, std::span<const std::byte* const> sources) const {
  std::array<iovec, kBatch> remote{}, local{};
  for (std::size_t at = 0; at < pages.size();) {
    const std::size_t count = std::min(pages.size() - at, kBatch);
    for (std::size_t i = 0; i < count; ++i) {
      // An address of the other process. NOLINTNEXTLINE(performance-no-int-to-ptr)
      remote[i] = {reinterpret_cast<void*>(start_ + std::uint64_t{pages[at + i]} * kPage), kPage};
      local[i] = {const_cast<std::byte*>(sources[at + i]), kPage};
    }
    if (process_vm_writev(pid_, local.data(), count, remote.data(), count, 0) != static_cast<ssize_t>(count * kPage)) {
      fail(ErrorCode::io, "process {}: its memory cannot be written: {}", pid_, std::strerror(errno));
    }
    at += count;
  }
}

std::uint64_t hash_page(const std::byte* page) {
  // Four independent lanes of multiply and rotate, folded at the end; a lane's step is invertible, so a change of one
  // word always changes the lane.
  constexpr std::uint64_t kOdd = 0x9E3779B97F4A7C15ULL, kOther = 0xC2B2AE3D27D4EB4FULL;
  std::array<std::uint64_t, 4> lanes{1, 2, 3, 4};
  for (std::size_t at = 0; at < kPage; at += 32) {
    for (std::size_t lane = 0; lane < 4; ++lane) {
      std::uint64_t word = 0;
      std::memcpy(&word, page + at + lane * 8, 8);
      lanes[lane] = std::rotl((lanes[lane] ^ word) * kOdd, 29);
    }
  }
  std::uint64_t hash = 0;
  for (const std::uint64_t lane : lanes) {
    hash = (std::rotl(hash, 23) ^ lane) * kOther;
    hash ^= hash >> 32;
  }
  return hash;
}

bool is_zero_page(const std::byte* page) {
  std::uint64_t first = 0;
  std::memcpy(&first, page, 8);
  return first == 0 && std::memcmp(page, page + 8, kPage - 8) == 0;
}

}  // namespace tidelock::sandbox::vm

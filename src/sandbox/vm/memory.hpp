// A guest's memory, seen from outside: one private mapping of a template's file inside a QEMU process.
//
// Pages that the guest has written are private to the process (anonymous copies); all others are still the file's.
// The kernel says which in /proc/PID/pagemap, so no dirty log is needed and no change to QEMU.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

namespace tidelock::sandbox::vm {

constexpr std::size_t kPage = 4096;

class GuestMemory {
 public:
  // Finds the mapping of `file` in the process. Throws Error{io} when there is none of `bytes` length.
  GuestMemory(pid_t pid, const std::filesystem::path& file, std::uint64_t bytes);
  std::uint64_t bytes() const { return bytes_; }
  // Page numbers, ascending, that differ or may differ from the file. Only meaningful while the guest is stopped.
  std::vector<std::uint32_t> private_pages() const;
  // Copies pages out of and into the process. `data` holds pages.size() pages.
  void read(std::span<const std::uint32_t> pages, std::byte* data) const;
  void write(std::span<const std::uint32_t> pages, std::span<const std::byte* const> sources) const;
  // How many pages of the mapping are resident and private: what this guest alone costs its host.
  std::uint64_t private_bytes() const { return private_pages().size() * kPage; }

 private:
  pid_t pid_;
  std::uint64_t start_ = 0, bytes_ = 0;
};

// 64 bits that tell a page's content: a filter before comparing, and a check against decay on disk.
std::uint64_t hash_page(const std::byte* page);
bool is_zero_page(const std::byte* page);

}  // namespace tidelock::sandbox::vm

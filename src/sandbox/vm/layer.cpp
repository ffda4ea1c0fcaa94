#include "sandbox/vm/layer.hpp"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "base/error.hpp"
#include "sandbox/vm/frame.hpp"
#include "sandbox/wire.hpp"

namespace tidelock::sandbox::vm {
namespace fs = std::filesystem;
namespace {

constexpr std::string_view kMagic = "TLPAGES1";
constexpr std::uint32_t kLayerVersion = 1, kZero = ~0U;
constexpr std::size_t kHeader = 32, kEntry = 16;
constexpr std::array<std::byte, kPage> kZeros{};

[[noreturn]] void fail_layer(const fs::path& path, const std::string& why) {
  fail(ErrorCode::corrupt_data, "page layer {}: {}", path.string(), why);
}

std::size_t align_page(std::size_t bytes) {
  return (bytes + kPage - 1) / kPage * kPage;
}

void write_all(int file, const fs::path& path, std::vector<iovec> parts) {
  constexpr std::size_t kMost = 1024;  // pieces in one call
  for (std::size_t at = 0; at < parts.size();) {
    const std::size_t count = std::min(parts.size() - at, kMost);
    ssize_t put = writev(file, parts.data() + at, static_cast<int>(count));
    if (put < 0) {
      const int error = errno;
      fail(error == ENOSPC || error == EDQUOT ? ErrorCode::exhausted : ErrorCode::io, "cannot write {}: {}",
           path.string(), std::strerror(error));
    }
    while (put > 0) {
      const auto taken = std::min(static_cast<std::size_t>(put), parts[at].iov_len);
      parts[at].iov_base = static_cast<char*>(parts[at].iov_base) + taken;
      parts[at].iov_len -= taken;
      put -= static_cast<ssize_t>(taken);
      at += parts[at].iov_len == 0 ? 1 : 0;
    }
  }
}

}  // namespace

PageLayer::PageLayer(const fs::path& path, std::uint64_t memory_bytes) : path_(path), file_(path) {
  const std::string_view bytes(reinterpret_cast<const char*>(file_.bytes().data()), file_.bytes().size());
  if (bytes.size() < kHeader || bytes.substr(0, 8) != kMagic || get_u32(bytes, 8) != kLayerVersion) {
    fail_layer(path, "not a page layer of version 1");
  }
  if (get_u32(bytes, 12) != kPage || get_u64(bytes, 16) != memory_bytes) {
    fail_layer(path, fmt::format("of a guest with {} bytes in pages of {}, expected {} in pages of {}",
                                 get_u64(bytes, 16), get_u32(bytes, 12), memory_bytes, kPage));
  }
  const std::uint64_t count = get_u64(bytes, 24), guest_pages = memory_bytes / kPage;
  if (count > guest_pages || bytes.size() < kHeader + count * kEntry + 4) {
    fail_layer(path, fmt::format("{} entries do not fit into {} bytes", count, bytes.size()));
  }
  const std::size_t index_end = kHeader + count * kEntry;
  if (get_u32(bytes, index_end) != crc32c(bytes.substr(0, index_end))) {
    fail_layer(path, "the checksum of its index does not match");
  }
  data_at_ = align_page(index_end + 4);
  std::uint32_t slots = 0;
  entries_.reserve(count);
  for (std::size_t at = kHeader; at < index_end; at += kEntry) {
    const Entry entry{get_u32(bytes, at), get_u32(bytes, at + 4), get_u64(bytes, at + 8)};
    const bool ascending = entries_.empty() || entries_.back().page < entry.page;
    if (entry.page >= guest_pages || !ascending || (entry.slot != kZero && entry.slot != slots++)) {
      fail_layer(path, fmt::format("entry {} is out of order", entries_.size()));
    }
    entries_.push_back(entry);
  }
  if (bytes.size() != data_at_ + std::size_t{slots} * kPage) {
    fail_layer(path, fmt::format("{} bytes, expected {}", bytes.size(), data_at_ + std::size_t{slots} * kPage));
  }
}

const std::byte* PageLayer::data(std::size_t i) const {
  const Entry& entry = entries_[i];
  return entry.slot == kZero ? kZeros.data() : file_.bytes().data() + data_at_ + std::size_t{entry.slot} * kPage;
}

std::ptrdiff_t PageLayer::find(std::uint32_t page) const {
  const auto at = std::lower_bound(entries_.begin(), entries_.end(), page,
                                   [](const Entry& entry, std::uint32_t wanted) { return entry.page < wanted; });
  return at != entries_.end() && at->page == page ? at - entries_.begin() : -1;
}

PageChain::PageChain(const fs::path& template_memory, const std::vector<fs::path>& layers) : base_(template_memory) {
  for (const fs::path& path : layers) {
    layers_.push_back(std::make_unique<PageLayer>(path, memory_bytes()));
  }
}

bool PageChain::holds(std::uint32_t page, const std::byte* data, std::uint64_t hash) const {
  for (auto layer = layers_.rbegin(); layer != layers_.rend(); ++layer) {
    const std::ptrdiff_t at = (*layer)->find(page);
    if (at >= 0) {
      const auto i = static_cast<std::size_t>(at);
      return (*layer)->hash(i) == hash && std::memcmp((*layer)->data(i), data, kPage) == 0;
    }
  }
  return std::memcmp(base_.bytes().data() + std::size_t{page} * kPage, data, kPage) == 0;
}

void PageChain::newest(std::vector<std::uint32_t>& pages, std::vector<const std::byte*>& contents) const {
  std::vector<const std::byte*> by_page(memory_bytes() / kPage, nullptr);
  for (auto layer = layers_.rbegin(); layer != layers_.rend(); ++layer) {
    for (std::size_t i = 0; i < (*layer)->size(); ++i) {
      const std::byte*& content = by_page[(*layer)->page(i)];
      if (content != nullptr) {
        continue;
      }
      content = (*layer)->data(i);
      if (hash_page(content) != (*layer)->hash(i)) {
        fail_layer((*layer)->path(), fmt::format("page {} does not have its checksum", (*layer)->page(i)));
      }
    }
  }
  pages.clear(), contents.clear();
  for (std::size_t page = 0; page < by_page.size(); ++page) {
    if (by_page[page] != nullptr) {
      pages.push_back(static_cast<std::uint32_t>(page));
      contents.push_back(by_page[page]);
    }
  }
}

LayerSize write_layer(const fs::path& path, const PageChain& chain, std::span<const std::uint32_t> pages,
                      const std::byte* data) {
  LayerSize size;
  std::string entries;
  std::vector<iovec> parts(1);
  for (std::size_t i = 0; i < pages.size(); ++i) {
    const std::byte* page = data + i * kPage;
    const std::uint64_t hash = hash_page(page);
    if (chain.holds(pages[i], page, hash)) {
      ++size.unchanged;
      continue;
    }
    const bool zero = is_zero_page(page);
    put_u32(entries, pages[i]);
    put_u32(entries, zero ? kZero : static_cast<std::uint32_t>(parts.size() - 1));
    put_u64(entries, hash);
    if (!zero) {
      parts.push_back({const_cast<std::byte*>(page), kPage});
    }
    ++size.pages;
  }
  std::string index(kMagic);
  put_u32(index, kLayerVersion);
  put_u32(index, kPage);
  put_u64(index, chain.memory_bytes());
  put_u64(index, size.pages);
  index += entries;
  put_u32(index, crc32c(index));
  index.resize(align_page(index.size()));
  parts[0] = {index.data(), index.size()};
  size.file_bytes = index.size() + (parts.size() - 1) * kPage;

  const FileDescriptor file(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!file) {
    fail_errno("create", path.string());
  }
  try {
    // Reserved first: a full disk is found before anything depends on the file.
    if (const int error = posix_fallocate(file.get(), 0, static_cast<off_t>(size.file_bytes)); error != 0) {
      fail(error == ENOSPC || error == EDQUOT ? ErrorCode::exhausted : ErrorCode::io,
           "cannot reserve {} bytes for {}: {}", size.file_bytes, path.string(), std::strerror(error));
    }
    write_all(file.get(), path, std::move(parts));
    if (fdatasync(file.get()) != 0) {
      fail_errno("sync", path.string());
    }
  } catch (const std::exception&) {
    unlink(path.c_str());
    throw;
  }
  return size;
}

}  // namespace tidelock::sandbox::vm

// Page layers: what a checkpoint adds to the memory it was taken on.
//
// File (little-endian): "TLPAGES1", u32 version 1, u32 page size, u64 bytes of guest memory, u64 count; then `count`
// entries of u32 page, u32 slot (~0: a page of zeros), u64 hash, ascending by page; u32 crc32c of all before it;
// zeros up to a multiple of 4096; then the pages of slots 0, 1, 2, ...
#pragma once

#include <filesystem>
#include <memory>
#include <span>
#include <vector>

#include "base/files.hpp"
#include "sandbox/vm/memory.hpp"

namespace tidelock::sandbox::vm {

class PageLayer {
 public:
  // Throws Error{corrupt_data} naming the file when it is not a whole layer of a guest of this size.
  PageLayer(const std::filesystem::path& path, std::uint64_t memory_bytes);
  std::size_t size() const { return entries_.size(); }
  std::uint32_t page(std::size_t i) const { return entries_[i].page; }
  std::uint64_t hash(std::size_t i) const { return entries_[i].hash; }
  const std::byte* data(std::size_t i) const;
  std::ptrdiff_t find(std::uint32_t page) const;  // -1: not here
  const std::filesystem::path& path() const { return path_; }

 private:
  struct Entry {
    std::uint32_t page, slot;
    std::uint64_t hash;
  };
  std::filesystem::path path_;
  MappedFile file_;
  std::vector<Entry> entries_;
  std::size_t data_at_ = 0;
};

// A template's memory with layers on it, the oldest first: what a page holds after the last of them.
class PageChain {
 public:
  PageChain(const std::filesystem::path& template_memory, const std::vector<std::filesystem::path>& layers);
  std::uint64_t memory_bytes() const { return base_.bytes().size(); }
  // Whether `data` is what the chain holds for this page; `hash` is that of `data`.
  bool holds(std::uint32_t page, const std::byte* data, std::uint64_t hash) const;
  // Every page that some layer holds and its newest content, checked against its hash: throws Error{corrupt_data}.
  void newest(std::vector<std::uint32_t>& pages, std::vector<const std::byte*>& contents) const;
  std::size_t depth() const { return layers_.size(); }

 private:
  MappedFile base_;
  std::vector<std::unique_ptr<PageLayer>> layers_;
};

struct LayerSize {
  std::size_t pages = 0;         // stored entries
  std::size_t unchanged = 0;     // left out, because the chain holds the same
  std::uint64_t file_bytes = 0;  // of the layer file
};

// Writes a layer of those `pages` (ascending, their content in `data`) that differ from `chain`. The file is reserved
// before it is written, and synced. Throws Error{exhausted} when the disk is full; nothing is left then.
LayerSize write_layer(const std::filesystem::path& path, const PageChain& chain, std::span<const std::uint32_t> pages,
                      const std::byte* data);

}  // namespace tidelock::sandbox::vm

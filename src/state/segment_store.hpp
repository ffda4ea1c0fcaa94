// Records on disk: append-only files ("segments") in a folder of their own, each record with checksums of its head and
// its content (record.hpp). A record is page-aligned, so that its room can be given back to the file system alone.
//
// Nothing is synced: what a crash of the machine tears is detected, not prevented. Every load verifies what it reads.
// Private to state/.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "base/files.hpp"
#include "state/disk_io.hpp"
#include "state/record.hpp"

namespace tidelock::state {

struct Location {
  std::uint32_t segment = 0;
  std::uint64_t offset = 0, bytes = 0;  // of the whole record
  bool operator==(const Location&) const = default;
};

struct NewRecord {
  RecordInfo info;
  std::vector<std::span<const std::byte>> parts;  // the content, which must stay as it is until append() returns
};

enum class LoadOutcome : std::uint8_t { ok, missing, corrupt, failed };  // failed: the system could not read

struct WantedRecord {
  RecordInfo info;
  Location location;
  std::vector<std::span<std::byte>> parts;  // where the content goes; undefined unless the outcome is ok
  LoadOutcome outcome = LoadOutcome::failed;
};

// What one thread needs for its transfers: two windows of page-aligned memory, of which one is on its way while the
// other is filled or emptied.
class DiskLane {
 public:
  static constexpr std::size_t kWindow = 8 << 20, kPiece = 1 << 20;

  explicit DiskLane(std::unique_ptr<DiskIo> with) : io(std::move(with)) {}
  std::span<std::byte> window(int which, std::size_t bytes);  // of the first kWindow bytes; allocated on first use

  std::unique_ptr<DiskIo> io;

 private:
  struct Free {
    void operator()(std::byte* p) const;
  };
  std::array<std::unique_ptr<std::byte[], Free>, 2> memory_;
  std::array<std::size_t, 2> size_{};
};

class SegmentStore {
 public:
  struct Found {
    RecordInfo info;
    Location location;
  };
  // Opens the folder, made if it is not there, for states of `identity`; those of another are removed, with a notice.
  // Cuts torn ends. Throws Error{invalid_argument} when the folder holds other things or belongs to another process,
  // Error{not_supported} for a format of another version and for file systems that take no holes, Error{io}.
  SegmentStore(std::filesystem::path folder, const Digest& identity, std::uint64_t segment_bytes);
  ~SegmentStore();
  SegmentStore(const SegmentStore&) = delete;
  SegmentStore& operator=(const SegmentStore&) = delete;

  // What was there when it was opened, oldest first; to be taken once. Contents are not verified yet.
  std::vector<Found> take_found() { return std::exchange(found_, {}); }
  std::uint64_t cut_bytes() const { return cut_bytes_; }  // that were torn or unreadable then

  // append() and discard() are for one thread, load() for any other, each with a lane of its own.
  // Writes records one behind the other. Throws Error{exhausted} on a full disk, Error{io}: then nothing was added.
  std::vector<Location> append(DiskLane& lane, std::span<const NewRecord> records);
  // Gives the room of records back.
  void discard(std::span<const Location> locations);
  // Reads and verifies all, in one pass over the disk; says in each what came of it.
  void load(DiskLane& lane, std::span<WantedRecord> records) const;

 private:
  struct File;
  std::shared_ptr<File> file(std::uint32_t segment) const;  // null: gone
  File& writable();
  std::shared_ptr<File> open_segment(std::uint32_t segment);
  void claim(const Digest& identity);
  void scan(std::uint32_t segment);

  const std::filesystem::path folder_;
  const Digest identity_;
  const std::uint64_t segment_bytes_;
  std::unique_ptr<FolderLock> lock_;
  std::vector<Found> found_;
  std::uint64_t cut_bytes_ = 0;
  mutable std::mutex mutex_;  // of files_
  std::map<std::uint32_t, std::shared_ptr<File>> files_;
  std::uint32_t current_ = 0;  // the segment that grows; 0: none yet
};

}  // namespace tidelock::state

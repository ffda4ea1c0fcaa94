#include "state/segment_store.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

#include "base/base.hpp"

namespace tidelock::state {
namespace {

namespace fs = std::filesystem;
constexpr std::string_view kFormat = "tidelock states, format 1";
constexpr std::align_val_t kAligned{kPage};

fs::path segment_path(const fs::path& folder, std::uint32_t segment) {
  return folder / fmt::format("segment-{:08}", segment);
}

// 0: not a segment's name.
std::uint32_t segment_number(const std::string& name) {
  constexpr std::string_view kPrefix = "segment-";
  if (!name.starts_with(kPrefix) || name.size() != kPrefix.size() + 8) return 0;
  std::uint32_t number = 0;
  for (const char c : name.substr(kPrefix.size())) {
    if (c < '0' || c > '9') return 0;
    number = number * 10 + static_cast<std::uint32_t>(c - '0');
  }
  return number;
}

[[noreturn]] void fail_io(int cause, const std::string& what, const fs::path& path) {
  fail(cause == ENOSPC || cause == EDQUOT ? ErrorCode::exhausted : ErrorCode::io, "cannot {} {}: {}", what,
       path.string(), std::strerror(cause));
}

}  // namespace

void DiskLane::Free::operator()(std::byte* p) const {
  ::operator delete[](p, kAligned);
}

std::span<std::byte> DiskLane::window(int which, std::size_t bytes) {
  const auto i = static_cast<std::size_t>(which);
  bytes = std::min(kWindow, (bytes + kPage - 1) / kPage * kPage);
  if (size_[i] < bytes) {
    memory_[i].reset(static_cast<std::byte*>(::operator new[](bytes, kAligned)));
    size_[i] = bytes;
  }
  return {memory_[i].get(), size_[i]};
}

struct SegmentStore::File {
  int fd = -1;
  std::uint64_t end = 0;   // where the next record goes; of the writing thread
  std::uint64_t live = 0;  // bytes of records that were not discarded; likewise
  ~File() {
    if (fd >= 0) ::close(fd);
  }
};

SegmentStore::SegmentStore(fs::path folder, const Digest& identity, std::uint64_t segment_bytes)
    : folder_(std::move(folder)), identity_(identity), segment_bytes_(segment_bytes) {
  claim(identity);
  std::vector<std::uint32_t> segments;
  for (const auto& entry : fs::directory_iterator(folder_))
    if (const std::uint32_t number = segment_number(entry.path().filename().string())) segments.push_back(number);
  std::sort(segments.begin(), segments.end());
  for (const std::uint32_t segment : segments) scan(segment);
  current_ = segments.empty() ? 0 : segments.back();
}

SegmentStore::~SegmentStore() = default;

// Makes the folder this store's own: nothing else in it, one process at a time, states of one identity.
void SegmentStore::claim(const Digest& identity) {
  std::error_code error;
  const bool made = fs::create_directories(folder_, error);
  if (made) fs::permissions(folder_, fs::perms::owner_all, error);  // what lies there comes of clients' prompts
  if (error) fail(ErrorCode::io, "cannot make the folder {}: {}", folder_.string(), error.message());
  const fs::path title = folder_ / "store";
  const std::string wanted = fmt::format("{}\n{}\n", kFormat, to_hex(identity));
  const bool known = fs::exists(title);
  if (!known)
    for (const auto& entry : fs::directory_iterator(folder_))
      if (const std::string name = entry.path().filename().string(); name != "lock" && name != "store.tmp")
        throw Error(ErrorCode::invalid_argument,
                    fmt::format("{} holds {}, which is none of ours", folder_.string(), name),
                    "name a folder that is empty or not there yet");
  lock_ = std::make_unique<FolderLock>(folder_);
  const std::string title_text = known ? read_file(title, 4096) : "";
  if (title_text == wanted) return;
  if (known && !title_text.starts_with(fmt::format("{}\n", kFormat)))
    throw Error(ErrorCode::not_supported,
                fmt::format("{} was written by another version: \"{}\"", folder_.string(),
                            title_text.substr(0, title_text.find('\n'))),
                "name another folder, or remove this one");
  std::size_t removed = 0;
  for (const auto& entry : fs::directory_iterator(folder_))
    if (segment_number(entry.path().filename().string()) != 0) removed += fs::remove(entry.path()) ? 1 : 0;
  if (removed > 0)
    spdlog::warn("{} held states of another model: {} file{} removed", folder_.string(), removed,
                 removed == 1 ? "" : "s");
  write_file_atomic(title, wanted);
}

std::shared_ptr<SegmentStore::File> SegmentStore::open_segment(std::uint32_t segment) {
  const fs::path path = segment_path(folder_, segment);
  auto file = std::make_shared<File>();
  constexpr int kFlags = O_RDWR | O_CREAT | O_CLOEXEC;
  file->fd = ::open(path.c_str(), kFlags | O_DIRECT, 0600);
  if (file->fd < 0 && errno == EINVAL) file->fd = ::open(path.c_str(), kFlags, 0600);  // e.g. tmpfs
  if (file->fd < 0) fail_io(errno, "open", path);
  return file;
}

// Finds the records of a segment. What is no record is passed over page by page; behind the last one the file is cut.
void SegmentStore::scan(std::uint32_t segment) {
  const fs::path path = segment_path(folder_, segment);
  const auto opened = open_segment(segment);
  struct stat info {};
  if (::fstat(opened->fd, &info) != 0) fail_io(errno, "look at", path);
  const auto size = static_cast<std::uint64_t>(info.st_size);
  DiskLane lane(make_disk_io(IoKind::plain));
  const auto page = lane.window(0, kPage).first(kPage);
  std::uint64_t offset = 0, passed_over = 0;
  while (offset < size) {
    const off_t data = ::lseek(opened->fd, static_cast<off_t>(offset), SEEK_DATA);
    if (data < 0) break;  // a hole up to the end
    offset = std::max(offset, static_cast<std::uint64_t>(data) / kPage * kPage);
    IoRequest request{IoOp::read, opened->fd, offset, page};
    lane.io->start(std::span(&request, 1));
    if (request.result < 0) fail_io(static_cast<int>(-request.result), "read", path);
    const auto head = request.result < static_cast<std::int64_t>(kHeadBytes)
                          ? std::nullopt
                          : read_head(page.first<kHeadBytes>(), identity_);
    const std::uint64_t bytes = head ? record_bytes(head->content_bytes) : kPage;
    if (head && offset + bytes <= size) {
      found_.push_back({head->info, {segment, offset, bytes}});
      opened->end = offset + bytes;
      opened->live += bytes;
      offset += bytes;
    } else {
      passed_over += std::min(kPage, size - offset);
      offset += kPage;
    }
  }
  cut_bytes_ += passed_over;
  if (opened->live == 0) {
    if (::unlink(path.c_str()) != 0) fail_io(errno, "remove", path);
    return;
  }
  if (opened->end < size && ::ftruncate(opened->fd, static_cast<off_t>(opened->end)) != 0) fail_io(errno, "cut", path);
  files_.emplace(segment, opened);
}

std::shared_ptr<SegmentStore::File> SegmentStore::file(std::uint32_t segment) const {
  const std::lock_guard lock(mutex_);
  const auto found = files_.find(segment);
  return found == files_.end() ? nullptr : found->second;
}

SegmentStore::File& SegmentStore::writable() {
  const auto current = file(current_);
  if (current && current->end < segment_bytes_) return *current;
  const auto opened = open_segment(current_ + 1);
  ++current_;
  const std::lock_guard lock(mutex_);
  return *files_.emplace(current_, opened).first->second;
}

namespace {

// Records as one stream of bytes. A record's content is hashed when its turn comes, while those before it are written.
class RecordSource {
 public:
  RecordSource(std::span<const NewRecord> records, const Digest& identity) : records_(records), identity_(identity) {
    for (const NewRecord& record : records) {
      std::uint64_t content = 0;
      for (const auto part : record.parts) content += part.size();
      contents_.push_back(content);
      total_ += record_bytes(content);
    }
  }
  std::uint64_t total() const { return total_; }
  std::uint64_t bytes(std::size_t record) const { return record_bytes(contents_[record]); }

  // As many of the next bytes as fit. Returns their number.
  std::size_t take(std::span<std::byte> to) {
    std::size_t taken = 0;
    while (taken < to.size()) {
      if (piece_ == pieces_.size()) {
        if (next_ == records_.size()) break;
        begin(next_++);
      }
      const auto from = pieces_[piece_].subspan(used_);
      const std::size_t n = std::min(from.size(), to.size() - taken);
      if (n > 0) std::memcpy(to.data() + taken, from.data(), n);
      taken += n;
      used_ += n;
      if (n == from.size()) {
        ++piece_;
        used_ = 0;
      }
    }
    return taken;
  }

 private:
  void begin(std::size_t i) {
    const NewRecord& record = records_[i];
    hasher_.reset();
    for (const auto part : record.parts) hasher_.add(part);
    head_ = write_head(record.info, identity_, contents_[i], hasher_.result());
    pieces_.assign(1, head_);
    pieces_.insert(pieces_.end(), record.parts.begin(), record.parts.end());
    pieces_.push_back(std::span(kZeros).first(record_bytes(contents_[i]) - kHeadBytes - contents_[i]));
    piece_ = 0;
  }

  static constexpr std::array<std::byte, kPage> kZeros{};
  const std::span<const NewRecord> records_;
  const Digest& identity_;
  std::vector<std::uint64_t> contents_;  // bytes, by record
  std::uint64_t total_ = 0;
  ContentHasher hasher_;
  RecordHead head_{};                               // of the record whose turn it is
  std::vector<std::span<const std::byte>> pieces_;  // likewise
  std::size_t next_ = 0, piece_ = 0, used_ = 0;
};

std::vector<IoRequest> requests_of(IoOp op, int fd, std::uint64_t offset, std::span<std::byte> bytes) {
  std::vector<IoRequest> requests;
  for (std::size_t at = 0; at < bytes.size(); at += DiskLane::kPiece)
    requests.push_back({op, fd, offset + at, bytes.subspan(at, std::min(DiskLane::kPiece, bytes.size() - at))});
  return requests;
}

// 0, or the errno of the first that did not move all it was to move.
int first_failure(std::span<const IoRequest> requests) {
  for (const IoRequest& request : requests)
    if (request.result < std::ssize(request.bytes))
      return request.result < 0 ? static_cast<int>(-request.result) : ENOSPC;
  return 0;
}

}  // namespace

std::vector<Location> SegmentStore::append(DiskLane& lane, std::span<const NewRecord> records) {
  File& to = writable();
  RecordSource source(records, identity_);
  std::array<std::vector<IoRequest>, 2> on_the_way;
  std::uint64_t at = to.end;
  int failure = 0;
  for (int turn = 0; failure == 0; turn ^= 1) {
    auto& requests = on_the_way[static_cast<std::size_t>(turn)];
    lane.io->wait(requests);
    failure = first_failure(requests);
    requests.clear();
    const auto window = lane.window(turn, source.total());
    const std::size_t n = source.take(window);
    if (n == 0 || failure != 0) break;
    requests = requests_of(IoOp::write, to.fd, at, window.first(n));
    lane.io->start(requests);
    at += n;
  }
  for (auto& requests : on_the_way) {
    lane.io->wait(requests);
    if (failure == 0) failure = first_failure(requests);
  }
  if (failure != 0) {
    // What the next start would find behind the end must not look like records.
    if (::ftruncate(to.fd, static_cast<off_t>(to.end)) != 0)
      spdlog::warn("{}: {}", folder_.string(), std::strerror(errno));
    fail_io(failure, "write to", segment_path(folder_, current_));
  }
  std::vector<Location> locations;
  for (std::size_t i = 0; i < records.size(); ++i) {
    const std::uint64_t bytes = source.bytes(i);
    locations.push_back({current_, to.end, bytes});
    to.end += bytes;
    to.live += bytes;
  }
  return locations;
}

void SegmentStore::discard(std::span<const Location> locations) {
  std::vector<Location> sorted(locations.begin(), locations.end());
  std::sort(sorted.begin(), sorted.end(), [](const Location& a, const Location& b) {
    return std::pair(a.segment, a.offset) < std::pair(b.segment, b.offset);
  });
  for (std::size_t i = 0; i < sorted.size();) {
    Location run = sorted[i++];  // records side by side go in one call
    for (; i < sorted.size() && sorted[i].segment == run.segment && sorted[i].offset == run.offset + run.bytes; ++i)
      run.bytes += sorted[i].bytes;
    const auto from = file(run.segment);
    if (!from) continue;
    from->live -= run.bytes;
    if (from->live == 0) {
      ::unlink(segment_path(folder_, run.segment).c_str());
      const std::lock_guard lock(mutex_);
      files_.erase(run.segment);
    } else if (::fallocate(from->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(run.offset),
                           static_cast<off_t>(run.bytes)) != 0) {
      spdlog::warn("{}: cannot give back part of a file: {}", folder_.string(), std::strerror(errno));
    }
  }
}

namespace {

// Takes the bytes of records one after the other, as they come from the disk, and verifies them.
class RecordReader {
 public:
  explicit RecordReader(const Digest& identity) : identity_(identity) {}

  void begin(WantedRecord& record) {
    record_ = &record;
    record.outcome = LoadOutcome::ok;
    seen_ = content_ = 0;
    hasher_.reset();
    part_ = filled_ = 0;
  }
  // The next bytes of the record; `result`: how far they are true (IoRequest::result).
  void take(std::span<const std::byte> bytes, std::int64_t result) {
    if (result < std::ssize(bytes)) record_->outcome = result < 0 ? LoadOutcome::failed : LoadOutcome::missing;
    if (record_->outcome == LoadOutcome::ok) read(bytes);
    seen_ += bytes.size();
    if (seen_ == record_->location.bytes && record_->outcome == LoadOutcome::ok &&
        (content_ != 0 || hasher_.result() != head_.content_hash))
      record_->outcome = LoadOutcome::corrupt;
  }

 private:
  void read(std::span<const std::byte> bytes) {
    if (seen_ == 0) {
      read_first(bytes.first<kHeadBytes>());
      bytes = bytes.subspan(kHeadBytes);
    }
    if (record_->outcome != LoadOutcome::ok) return;
    bytes = bytes.first(std::min<std::size_t>(bytes.size(), content_));
    hasher_.add(bytes);
    content_ -= bytes.size();
    while (!bytes.empty()) {
      const auto to = record_->parts[part_].subspan(filled_);
      const std::size_t n = std::min(to.size(), bytes.size());
      if (n > 0) std::memcpy(to.data(), bytes.data(), n);
      bytes = bytes.subspan(n);
      filled_ += n;
      if (n == to.size()) {
        ++part_;
        filled_ = 0;
      }
    }
  }
  void read_first(std::span<const std::byte, kHeadBytes> bytes) {
    const auto head = read_head(bytes, identity_);
    std::uint64_t room = 0;
    for (const auto part : record_->parts) room += part.size();
    const bool empty = std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
    if (!head || head->info != record_->info || head->content_bytes != room) {
      record_->outcome = empty ? LoadOutcome::missing : LoadOutcome::corrupt;
      return;
    }
    head_ = *head;
    content_ = head->content_bytes;
  }

  const Digest& identity_;
  WantedRecord* record_ = nullptr;
  std::uint64_t seen_ = 0, content_ = 0;  // bytes of the record so far; of the content still to come
  std::size_t part_ = 0, filled_ = 0;
  ReadHead head_;
  ContentHasher hasher_;
};

// Bytes of one record on their way, as part of a request.
struct Piece {
  WantedRecord* record;
  bool first;
  std::size_t request, offset, bytes;
};

struct Source {
  WantedRecord* record;
  int fd;
};

// The windows in which records are read: pieces that lie side by side on disk go in one request.
class ReadPlan {
 public:
  explicit ReadPlan(std::vector<Source> order) : order_(std::move(order)) {}

  void fill(std::span<std::byte> window, std::vector<IoRequest>& requests, std::vector<Piece>& pieces) {
    requests.clear();
    pieces.clear();
    std::size_t used = 0;
    while (next_ < order_.size() && used < window.size()) {
      const auto [record, fd] = order_[next_];
      const std::uint64_t offset = record->location.offset + within_, left = record->location.bytes - within_;
      if (requests.empty() || requests.back().fd != fd ||
          requests.back().offset + requests.back().bytes.size() != offset ||
          requests.back().bytes.size() == DiskLane::kPiece)
        requests.push_back({IoOp::read, fd, offset, window.subspan(used, 0)});
      IoRequest& request = requests.back();
      const std::size_t n =
          std::min({static_cast<std::size_t>(left), DiskLane::kPiece - request.bytes.size(), window.size() - used});
      pieces.push_back({record, within_ == 0, requests.size() - 1, request.bytes.size(), n});
      request.bytes = {request.bytes.data(), request.bytes.size() + n};
      used += n;
      within_ += n;
      if (n == left) {
        ++next_;
        within_ = 0;
      }
    }
  }

 private:
  const std::vector<Source> order_;
  std::size_t next_ = 0;
  std::uint64_t within_ = 0;  // of the next record
};

}  // namespace

void SegmentStore::load(DiskLane& lane, std::span<WantedRecord> records) const {
  std::vector<Source> order;
  std::map<std::uint32_t, std::shared_ptr<File>> open;  // stays so, whatever is discarded meanwhile
  std::uint64_t total = 0;
  for (WantedRecord& record : records) {
    record.outcome = LoadOutcome::missing;
    auto& from = open.try_emplace(record.location.segment, nullptr).first->second;
    if (!from) from = file(record.location.segment);
    if (!from) continue;
    order.push_back({&record, from->fd});
    total += record.location.bytes;
  }
  std::sort(order.begin(), order.end(), [](const Source& a, const Source& b) {
    return std::pair(a.record->location.segment, a.record->location.offset) <
           std::pair(b.record->location.segment, b.record->location.offset);
  });
  ReadPlan plan(std::move(order));
  std::array<std::vector<IoRequest>, 2> requests;
  std::array<std::vector<Piece>, 2> pieces;
  const auto begin = [&](std::size_t turn) {
    plan.fill(lane.window(static_cast<int>(turn), total), requests[turn], pieces[turn]);
    lane.io->start(requests[turn]);
  };
  RecordReader reader(identity_);
  begin(0);
  for (std::size_t turn = 0; !requests[turn].empty(); turn ^= 1) {
    begin(turn ^ 1);
    lane.io->wait(requests[turn]);
    for (const Piece& piece : pieces[turn]) {
      const IoRequest& request = requests[turn][piece.request];
      if (piece.first) reader.begin(*piece.record);
      const std::int64_t result =
          request.result < 0 ? request.result
                             : std::max<std::int64_t>(request.result - static_cast<std::int64_t>(piece.offset), 0);
      reader.take(request.bytes.subspan(piece.offset, piece.bytes), result);
    }
  }
}

}  // namespace tidelock::state

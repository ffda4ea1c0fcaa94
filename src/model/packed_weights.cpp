#include "model/packed_weights.hpp"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "base/base.hpp"
#include "base/content_hasher.hpp"
#include "base/memory.hpp"
#include "model/plan.hpp"

namespace tidelock::model {
namespace {

constexpr std::string_view kMagic = "TLPACKED";
constexpr std::uint32_t kVersion = 1;
constexpr std::uint64_t kAlignment = 64, kPage = 4096;

struct Extent {
  std::uint64_t offset = 0, bytes = 0;  // into the data while a layout, into the file in its table
  ContentHash hash{};
};

struct Head {
  std::array<char, 8> magic;
  std::uint32_t version, zero;
  std::uint64_t count, file_bytes;
  std::array<char, 64> key;
};
static_assert(sizeof(Extent) == 32 && sizeof(Head) == 96);

std::uint64_t round_up(std::uint64_t n, std::uint64_t to) {
  return (n + to - 1) / to * to;
}

std::uint64_t header_bytes(std::uint64_t count) {
  return round_up(sizeof(Head) + count * sizeof(Extent) + sizeof(ContentHash), kPage);
}

bool is_matrix(const Parameter& p) {
  return p.kind != ParameterKind::vector && p.kind != ParameterKind::conv;
}

Format format_of(const WeightSource& source, const Model& model, ParameterId id, int piece) {
  const Parameter& p = model.parameter(id);
  return p.kind == ParameterKind::router ? Format::f32 : source.format(id, std::min(piece, piece_count(p) - 1));
}

// Where each parameter's matrices and rows lie; one entry per parameter, by offsets into the data.
struct Layout {
  std::vector<Extent> extents;
  std::uint64_t bytes = 0;
};

Layout lay_out(const WeightSource& source, const Model& model) {
  Layout layout;
  for (std::size_t i = 0; i < model.parameters().size(); ++i) {
    const auto id = static_cast<ParameterId>(i);
    Extent extent{layout.bytes, 0, {}};
    if (is_matrix(model.parameter(id)))
      extent.bytes = packed_parameter_bytes(
          model, id, [&](ParameterId of, int piece) { return format_of(source, model, of, piece); });
    layout.extents.push_back(extent);
    layout.bytes += round_up(extent.bytes, kAlignment);
  }
  return layout;
}

// What a file of packed weights must have been made from to be this model's.
std::string key_of(const WeightSource& source, const Model& model) {
  std::string all = fmt::format("{} {}\n{}\n", numerics::kContractName, kVersion, config_to_json(model.config()));
  for (std::size_t i = 0; i < model.parameters().size(); ++i) {
    const auto id = static_cast<ParameterId>(i);
    const Parameter& p = model.parameter(id);
    if (!is_matrix(p)) continue;
    all += fmt::format("{} {} {}\n", p.name, numerics::format_name(format_of(source, model, id, 0)),
                       numerics::format_name(format_of(source, model, id, 1)));
  }
  for (const std::filesystem::path& file : source.files()) {
    struct stat info {};
    if (::stat(file.c_str(), &info) != 0) fail_errno("cannot stat", file.string());
    all += fmt::format("{} {} {}.{:09}\n", file.filename().string(), info.st_size, info.st_mtim.tv_sec,
                       info.st_mtim.tv_nsec);
  }
  return sha256_hex(all);
}

// Memory of a whole number of pages, anonymous or of a file. Owns the mapping.
class Mapping {
 public:
  Mapping(std::uint64_t bytes, int protection, int flags, int fd, const std::string& what) : size_(bytes) {
    void* address = ::mmap(nullptr, bytes, protection, flags, fd, 0);
    if (address == MAP_FAILED) fail_errno("cannot map", what);
    data_ = static_cast<std::byte*>(address);
  }
  ~Mapping() { ::munmap(data_, size_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  std::byte* data() const { return data_; }
  std::span<std::byte> bytes() const { return {data_, size_}; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_;
};

// Decoding reads every weight once a token: with small pages it would wait for the page walks.
std::shared_ptr<Mapping> weight_memory(std::uint64_t bytes) {
  auto memory = std::make_shared<Mapping>(round_up(std::max<std::uint64_t>(bytes, 1), kPage), PROT_READ | PROT_WRITE,
                                          MAP_PRIVATE | MAP_ANONYMOUS, -1, fmt::format("{} bytes of weights", bytes));
  ::madvise(memory->data(), memory->bytes().size(), MADV_HUGEPAGE);  // a wish: small pages work too
  return memory;
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int fd() const { return fd_; }

 private:
  int fd_;
};

ContentHash hash_of(std::span<const std::byte> bytes) {
  ContentHasher hasher;
  hasher.add(bytes);
  return hasher.result();
}

void for_parameters(const Model& model, Team& team, const std::function<void(ParameterId)>& body) {
  team.parallel(std::ssize(model.parameters()), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) body(static_cast<ParameterId>(i));
  });
}

// Packs every matrix into `to`, as the layout says.
void pack_into(const WeightSource& source, Model& model, const Layout& layout, std::byte* to, Team& team) {
  for_parameters(model, team, [&](ParameterId id) {
    const Extent& extent = layout.extents[static_cast<std::size_t>(id)];
    if (extent.bytes != 0) model.place(id, {to + extent.offset, extent.bytes});
    load_parameter(source, id, model);
  });
}

// ---- the file -------------------------------------------------------------------------------------------------------

enum class Found : std::uint8_t { usable, missing, stale };

// Reads `bytes` at `offset`; false when the file ends before.
bool read_at(int fd, std::uint64_t offset, std::byte* to, std::uint64_t bytes, const std::string& name) {
  while (bytes > 0) {
    const ssize_t n = ::pread(fd, to, std::min<std::uint64_t>(bytes, 1U << 30), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_errno("cannot read", name);
    if (n == 0) return false;
    to += n, offset += static_cast<std::uint64_t>(n), bytes -= static_cast<std::uint64_t>(n);
  }
  return true;
}

class PackedFile {
 public:
  PackedFile(std::filesystem::path path, std::string key, const Layout& layout)
      : path_(std::move(path)), name_(path_.string()), key_(std::move(key)), layout_(layout) {}

  // Opens the file and compares its header. Throws Error{invalid_argument} for a file that is not one of packed
  // weights.
  Found open() {
    fd_ = std::make_unique<Descriptor>(::open(path_.c_str(), O_RDONLY | O_CLOEXEC));
    if (fd_->fd() < 0 && errno == ENOENT) return Found::missing;
    if (fd_->fd() < 0) fail_errno("cannot open", name_);
    Head head{};
    if (!read_at(fd_->fd(), 0, reinterpret_cast<std::byte*>(&head), sizeof head, name_) ||
        std::memcmp(head.magic.data(), kMagic.data(), kMagic.size()) != 0)
      throw Error(ErrorCode::invalid_argument, fmt::format("{} is not a file of packed weights", name_),
                  "give --packed a name of its own: the file is made there");
    if (head.version != kVersion || std::string_view(head.key.data(), head.key.size()) != key_ ||
        head.count != layout_.extents.size() || head.file_bytes != file_bytes())
      return Found::stale;
    return read_table(head) ? Found::usable : Found::stale;
  }

  // Packs into a new file beside this one, which takes its name when it is whole.
  void make(const WeightSource& source, Model& model, Team& team) const {
    const std::string temporary = name_ + ".tmp";
    const Descriptor file(lock_temporary(temporary));
    if (::ftruncate(file.fd(), 0) != 0) fail_errno("cannot truncate", temporary);
    // All room before the first byte: a write through a mapping cannot say that the disk is full.
    if (const int error = ::posix_fallocate(file.fd(), 0, static_cast<off_t>(file_bytes())); error != 0) {
      ::unlink(temporary.c_str());
      throw Error(error == ENOSPC || error == EFBIG || error == EDQUOT ? ErrorCode::exhausted : ErrorCode::io,
                  fmt::format("{}: no room for {} of packed weights ({})", temporary, bytes_text(file_bytes()),
                              std::strerror(error)));
    }
    try {
      fill(source, model, file.fd(), temporary, team);
      if (::fsync(file.fd()) != 0) fail_errno("cannot sync", temporary);
      if (::rename(temporary.c_str(), path_.c_str()) != 0) fail_errno("cannot rename onto", name_);
    } catch (...) {
      ::unlink(temporary.c_str());
      throw;
    }
    sync_directory(path_.has_parent_path() ? path_.parent_path() : ".");
  }

  // Reads the data into memory and hands it to the model; false when it is not what was written.
  bool read(const WeightSource& source, Model& model, Team& team) const {
    const auto memory = weight_memory(layout_.bytes);
    std::atomic<bool> sound = true;
    for_parameters(model, team, [&](ParameterId id) {
      const Extent& place = layout_.extents[static_cast<std::size_t>(id)];
      const Extent& stored = table_[static_cast<std::size_t>(id)];
      if (place.bytes == 0 || !sound) return;
      const std::span<std::byte> to(memory->data() + place.offset, place.bytes);
      if (!read_at(fd_->fd(), stored.offset, to.data(), to.size(), name_) || hash_of(to) != stored.hash) sound = false;
    });
    if (sound) adopt(source, model, memory, memory->data(), false);
    return sound;
  }

  void map(const WeightSource& source, Model& model) const {
    const auto memory = std::make_shared<Mapping>(file_bytes(), PROT_READ, MAP_SHARED, fd_->fd(), name_);
    adopt(source, model, memory, memory->data() + header_bytes(layout_.extents.size()), true);
  }

 private:
  std::uint64_t file_bytes() const { return header_bytes(layout_.extents.size()) + round_up(layout_.bytes, kPage); }

  bool read_table(const Head& head) {
    std::vector<std::byte> header(sizeof head + layout_.extents.size() * sizeof(Extent) + sizeof(ContentHash));
    struct stat info {};
    if (::fstat(fd_->fd(), &info) != 0) fail_errno("cannot stat", name_);
    if (static_cast<std::uint64_t>(info.st_size) != file_bytes()) return false;
    if (!read_at(fd_->fd(), 0, header.data(), header.size(), name_)) return false;
    const std::size_t before = header.size() - sizeof(ContentHash);
    const ContentHash hash = hash_of(std::span(header).first(before));
    if (std::memcmp(hash.data(), header.data() + before, sizeof hash) != 0) return false;
    table_.resize(layout_.extents.size());
    std::memcpy(table_.data(), header.data() + sizeof head, table_.size() * sizeof(Extent));
    for (std::size_t i = 0; i < table_.size(); ++i)
      if (table_[i].bytes != layout_.extents[i].bytes ||
          table_[i].offset != layout_.extents[i].offset + header_bytes(table_.size()))
        return false;
    return true;
  }

  // The temporary, locked: it belongs to this process until it is renamed or the process ends.
  static int lock_temporary(const std::string& temporary) {
    const int fd = ::open(temporary.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0) fail_errno("cannot create", temporary);
    struct stat opened {
    }, named{};
    if (::flock(fd, LOCK_EX | LOCK_NB) == 0 && ::fstat(fd, &opened) == 0 && ::stat(temporary.c_str(), &named) == 0 &&
        opened.st_ino == named.st_ino)
      return fd;
    ::close(fd);
    throw Error(ErrorCode::invalid_argument, fmt::format("{} is being made by another process", temporary),
                "wait until it is done");
  }

  void fill(const WeightSource& source, Model& model, int fd, const std::string& temporary, Team& team) const {
    const Mapping memory(file_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, temporary);
    const std::uint64_t count = layout_.extents.size(), data_at = header_bytes(count);
    pack_into(source, model, layout_, memory.data() + data_at, team);
    std::vector<Extent> table = layout_.extents;
    for_parameters(model, team, [&](ParameterId id) {
      Extent& extent = table[static_cast<std::size_t>(id)];
      extent.offset += data_at;
      extent.hash = hash_of({memory.data() + extent.offset, extent.bytes});
      model.place(id, {});
    });
    Head head{};
    std::memcpy(head.magic.data(), kMagic.data(), kMagic.size());
    head.version = kVersion, head.count = count, head.file_bytes = file_bytes();
    std::memcpy(head.key.data(), key_.data(), head.key.size());
    std::byte* to = memory.data();
    std::memcpy(to, &head, sizeof head);
    std::memcpy(to + sizeof head, table.data(), count * sizeof(Extent));
    const std::size_t before = sizeof head + count * sizeof(Extent);
    const ContentHash hash = hash_of({to, before});
    std::memcpy(to + before, hash.data(), sizeof hash);
  }

  void adopt(const WeightSource& source, Model& model, std::shared_ptr<const void> keeper, const std::byte* data,
             bool mapped) const {
    for (std::size_t i = 0; i < layout_.extents.size(); ++i) {
      const auto id = static_cast<ParameterId>(i);
      const Extent& extent = layout_.extents[i];
      if (extent.bytes == 0)
        load_parameter(source, id, model);
      else
        model.adopt(id, format_of(source, model, id, 0), format_of(source, model, id, 1),
                    {data + extent.offset, extent.bytes});
    }
    model.keep(std::move(keeper), mapped);
  }

  std::filesystem::path path_;
  std::string name_, key_;
  const Layout& layout_;
  std::unique_ptr<Descriptor> fd_;
  std::vector<Extent> table_;  // offsets into the file
};

bool use(const PackedFile& file, const WeightSource& source, Model& model, bool map, Team& team) {
  if (!map) return file.read(source, model, team);
  file.map(source, model);
  return true;
}

}  // namespace

std::unique_ptr<Model> load_packed(WeightSource& source, const PackedOptions& options, Team& team) {
  if (options.map && options.file.empty())
    throw Error(ErrorCode::invalid_argument, "weights that are mapped need a file of packed weights",
                "give --packed FILE: it is made there when it is missing, as large as tidelock info says");
  auto model = std::make_unique<Model>(source.config(), false);
  source.bind(*model);
  const Layout layout = lay_out(source, *model);
  if (!options.map)
    check_memory(
        *model, [&](ParameterId id, int piece) { return format_of(source, *model, id, piece); }, source.path(),
        available_memory());
  if (options.file.empty()) {
    const auto memory = weight_memory(layout.bytes);
    pack_into(source, *model, layout, memory->data(), team);
    model->keep(memory, false);
    return model;
  }
  PackedFile file(options.file, key_of(source, *model), layout);
  const Found found = file.open();
  if (found == Found::usable && use(file, source, *model, options.map, team)) return model;
  spdlog::info("{}: {}; packing {}", options.file.string(),
               found == Found::missing ? "not there yet" : "made from another checkpoint, or damaged",
               bytes_text(layout.bytes));
  file.make(source, *model, team);
  if (file.open() != Found::usable || !use(file, source, *model, options.map, team))
    fail(ErrorCode::io, "{} does not hold what was written to it", options.file.string());
  return model;
}

}  // namespace tidelock::model

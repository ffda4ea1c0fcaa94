#include "sandbox/oci/tar.hpp"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <optional>

#include "base/error.hpp"

namespace tidelock::sandbox::oci {
namespace {

constexpr std::size_t kBlock = 512;
constexpr std::size_t kMaxText = 1U << 20;  // of a long name or of pax records
constexpr std::size_t kMaxPath = 4096;

std::string field(const char* block, std::size_t at, std::size_t size) {
  return {block + at, strnlen(block + at, size)};
}

// Octal text, or with the highest bit set a big-endian number. Nothing for anything else and for negative ones.
std::optional<std::uint64_t> number(const char* block, std::size_t at, std::size_t size) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(block + at);
  std::uint64_t out = 0;
  if ((bytes[0] & 0x80U) != 0) {
    for (std::size_t i = 0; i < size; ++i) {
      if (out >> 55U != 0 || (i == 0 && bytes[0] != 0x80U)) {
        return std::nullopt;
      }
      out = out << 8U | (i == 0 ? 0U : bytes[i]);
    }
    return out;
  }
  std::size_t i = 0;
  while (i < size && bytes[i] == ' ') {
    ++i;
  }
  for (; i < size && bytes[i] >= '0' && bytes[i] <= '7'; ++i) {
    out = out * 8 + (bytes[i] - '0');
  }
  return i == size || bytes[i] == 0 || bytes[i] == ' ' ? std::optional(out) : std::nullopt;
}

bool checksum_fits(const char* block) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < kBlock; ++i) {
    sum += i >= 148 && i < 156 ? ' ' : static_cast<unsigned char>(block[i]);
  }
  return number(block, 148, 8) == sum;
}

std::optional<TarEntry::Kind> kind_of(char type) {
  switch (type) {
    case '0':
    case '\0':
    case '7':
      return TarEntry::Kind::file;
    case '1':
      return TarEntry::Kind::hard_link;
    case '2':
      return TarEntry::Kind::symbolic_link;
    case '3':
    case '4':
      return TarEntry::Kind::device;
    case '5':
      return TarEntry::Kind::folder;
    case '6':
      return TarEntry::Kind::fifo;
    default:
      return std::nullopt;
  }
}

}  // namespace

// What records before an entry say of it.
struct TarReader::Extra {
  std::optional<std::string> path, target;
  std::optional<std::uint64_t> size, uid, gid;
};

std::string inner_path(const std::string& path, const std::string& what) {
  if (path.find('\0') != std::string::npos || path.size() > kMaxPath) {
    fail(ErrorCode::corrupt_data, "{}: a path with a zero byte, or of {} bytes", what, path.size());
  }
  std::string out;
  for (std::size_t at = 0; at < path.size();) {
    const std::size_t end = std::min(path.find('/', at), path.size());
    const std::string part = path.substr(at, end - at);
    at = end + 1;
    if (part == "..") {
      fail(ErrorCode::corrupt_data, "{}: the path '{}' leads out of the archive", what, path);
    }
    if (!part.empty() && part != ".") {
      out += (out.empty() ? "" : "/") + part;
    }
  }
  return out;
}

void TarReader::refuse(const std::string& why) const {
  fail(ErrorCode::corrupt_data, "{}: at byte {}: {}", what_, offset_, why);
}

void TarReader::need(char* to, std::size_t size) {
  while (size > 0) {
    const std::size_t got = source_(to, size);
    if (got == 0) {
      refuse("the archive ends early");
    }
    to += got, size -= got, offset_ += got;
  }
}

// False at the end: two blocks of zeros, or nothing more.
bool TarReader::read_block(char* block) {
  for (int empty = 0; empty < 2; ++empty) {
    const std::size_t got = source_(block, kBlock);
    if (got == 0) {
      return false;
    }
    offset_ += got;
    need(block + got, kBlock - got);
    if (std::any_of(block, block + kBlock, [](char c) { return c != 0; })) {
      return true;
    }
  }
  return false;
}

std::string TarReader::read_text(std::uint64_t size) {
  if (size > kMaxText) {
    refuse(fmt::format("a name or record of {} bytes; at most {} are read", size, kMaxText));
  }
  std::string out(size, '\0');
  need(out.data(), out.size());
  char rest[kBlock];
  need(rest, (kBlock - size % kBlock) % kBlock);
  return out;
}

// "LENGTH KEY=VALUE\n", one after the other.
void TarReader::read_pax(Extra& extra, std::uint64_t size) {
  const std::string text = read_text(size);
  for (std::size_t at = 0; at < text.size();) {
    std::size_t length = 0;
    const char* end = text.data() + text.size();
    const auto parsed = std::from_chars(text.data() + at, end, length);
    const std::size_t blank = static_cast<std::size_t>(parsed.ptr - text.data());
    const std::size_t equals = text.find('=', blank);
    if (parsed.ec != std::errc() || length == 0 || length > text.size() - at || text[at + length - 1] != '\n' ||
        blank >= text.size() || text[blank] != ' ' || equals == std::string::npos || equals >= at + length) {
      refuse("a pax record that cannot be read");
    }
    const std::string key = text.substr(blank + 1, equals - blank - 1);
    const std::string value = text.substr(equals + 1, at + length - 1 - equals - 1);
    at += length;
    std::optional<std::uint64_t>* wanted = key == "size"  ? &extra.size
                                           : key == "uid" ? &extra.uid
                                           : key == "gid" ? &extra.gid
                                                          : nullptr;
    if (wanted != nullptr) {
      std::uint64_t found = 0;
      const auto whole = std::from_chars(value.data(), value.data() + value.size(), found);
      if (whole.ec != std::errc() || whole.ptr != value.data() + value.size()) {
        refuse("the pax record " + key + "=" + value.substr(0, 40) + " is not a number");
      }
      *wanted = found;
    } else if (key == "path") {
      extra.path = value;
    } else if (key == "linkpath") {
      extra.target = value;
    } else if (key.starts_with("GNU.sparse.")) {
      fail(ErrorCode::not_supported, "{}: a sparse file; pack the archive without sparse files", what_);
    }
  }
}

void TarReader::skip_content() {
  char part[16U << 10];
  while (left_ + padding_ > 0) {
    const std::size_t take = static_cast<std::size_t>(std::min<std::uint64_t>(left_ + padding_, sizeof part));
    need(part, take);
    const std::uint64_t of_content = std::min<std::uint64_t>(left_, take);
    left_ -= of_content;
    padding_ -= take - of_content;
  }
}

bool TarReader::next(TarEntry& entry) {
  skip_content();
  Extra extra;
  char block[kBlock];
  while (read_block(block)) {
    if (!checksum_fits(block)) {
      refuse("not a tar header: its checksum is wrong");
    }
    const auto size = number(block, 124, 12), mode = number(block, 100, 8), uid = number(block, 108, 8),
               gid = number(block, 116, 8), modified = number(block, 136, 12);
    if (!size || !mode || !uid || !gid || *size > 1ULL << 50U) {
      refuse("a header with numbers that cannot be read");
    }
    const char type = block[156];
    if (type == 'x') {
      read_pax(extra, *size);
    } else if (type == 'g') {
      read_text(*size);
    } else if (type == 'L' || type == 'K') {
      std::string text = read_text(*size);
      text.resize(strnlen(text.data(), text.size()));
      (type == 'L' ? extra.path : extra.target) = text;
    } else {
      const auto kind = kind_of(type);
      if (!kind) {
        fail(ErrorCode::not_supported, "{}: an entry of kind '{}', which is not known", what_, type);
      }
      const std::string prefix = std::memcmp(block + 257, "ustar\0", 6) == 0 ? field(block, 345, 155) : "";
      const std::string name = (prefix.empty() ? "" : prefix + "/") + field(block, 0, 100);
      entry = {};
      entry.kind = *kind;
      const std::string path = extra.path.value_or(name);
      if (entry.kind == TarEntry::Kind::file && path.ends_with('/')) {
        entry.kind = TarEntry::Kind::folder;  // as the first tars wrote them
      }
      entry.path = inner_path(path, what_);
      entry.target = extra.target.value_or(field(block, 157, 100));
      if (entry.kind == TarEntry::Kind::hard_link) {
        entry.target = inner_path(entry.target, what_);
      }
      if (entry.target.find('\0') != std::string::npos || entry.target.size() >= kMaxPath) {
        refuse("a link's target with a zero byte, or of 4096 bytes and more");
      }
      entry.size = entry.kind == TarEntry::Kind::file ? extra.size.value_or(*size) : 0;
      if (entry.size > 1ULL << 50U || (entry.kind == TarEntry::Kind::folder && *size > 1ULL << 20U)) {
        refuse("an entry of a size that cannot be");
      }
      entry.mode = static_cast<std::uint32_t>(*mode & 07777U);
      entry.uid = static_cast<std::uint32_t>(extra.uid.value_or(*uid));
      entry.gid = static_cast<std::uint32_t>(extra.gid.value_or(*gid));
      entry.modified = static_cast<std::int64_t>(modified.value_or(0));
      // Links and folders have no content, whatever their header says; hard links of some pax writers have.
      left_ = entry.kind == TarEntry::Kind::file ? entry.size : 0;
      padding_ = (kBlock - left_ % kBlock) % kBlock;
      return true;
    }
  }
  return false;
}

std::size_t TarReader::read(char* to, std::size_t size) {
  const std::size_t take = static_cast<std::size_t>(std::min<std::uint64_t>(left_, size));
  if (take == 0) {
    return 0;
  }
  const std::size_t got = source_(to, take);
  if (got == 0) {
    refuse("the archive ends early");
  }
  offset_ += got;
  left_ -= got;
  return got;
}

}  // namespace tidelock::sandbox::oci

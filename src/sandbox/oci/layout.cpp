#include "sandbox/oci/layout.hpp"

#include <fcntl.h>
#include <openssl/evp.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cstring>

#include "base/error.hpp"

namespace tidelock::sandbox::oci {
namespace fs = std::filesystem;
using Json = nlohmann::json;
namespace {

constexpr std::uint64_t kMaxJson = 4U << 20;
constexpr std::size_t kMaxLayers = 128;
constexpr std::size_t kMaxFiles = 100'000;  // of an archive of a layout
constexpr int kMaxDepth = 3;                // of indexes within indexes

// SHA-256 of what comes in parts.
class Hash {
 public:
  Hash() : context_(EVP_MD_CTX_new()) {
    if (context_ == nullptr || EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) != 1) {
      fail(ErrorCode::internal, "cannot begin a SHA-256");
    }
  }
  void add(const char* bytes, std::size_t size) { EVP_DigestUpdate(context_.get(), bytes, size); }
  std::string digest() {
    std::array<std::byte, 32> out{};
    EVP_DigestFinal_ex(context_.get(), reinterpret_cast<unsigned char*>(out.data()), nullptr);
    return "sha256:" + to_hex(out);
  }

 private:
  struct Free {
    void operator()(EVP_MD_CTX* context) const { EVP_MD_CTX_free(context); }
  };
  std::unique_ptr<EVP_MD_CTX, Free> context_;
};

// The hexadecimal digits of a digest. Only SHA-256 is taken: it names a file, so nothing else may stand in it.
std::string digits_of(const std::string& digest, const std::string& where) {
  const std::string head = "sha256:";
  std::string digits = digest.starts_with(head) ? digest.substr(head.size()) : "";
  if (digits.size() != 64 || digits.find_first_not_of("0123456789abcdef") != std::string::npos) {
    fail(ErrorCode::corrupt_data, "{}: the digest '{}'; expected sha256: and 64 hexadecimal digits", where,
         digest.substr(0, 100));
  }
  return digits;
}

Descriptor descriptor_of(const Json& json, const std::string& where) {
  const bool fits = json.is_object() && json.contains("digest") && json["digest"].is_string() &&
                    json.contains("size") && json["size"].is_number_unsigned();
  if (!fits) {
    fail(ErrorCode::corrupt_data, "{}: a descriptor without digest and size", where);
  }
  Descriptor out{
      json.contains("mediaType") && json["mediaType"].is_string() ? json["mediaType"].get<std::string>() : "",
      json["digest"], json["size"]};
  digits_of(out.digest, where);
  return out;
}

std::string text_of(const Json& json, const char* key) {
  const auto found = json.is_object() ? json.find(key) : json.end();
  return found != json.end() && found->is_string() ? found->get<std::string>() : "";
}

const Json& part_of(const Json& json, const char* key) {
  static const Json kNone;
  const auto found = json.is_object() ? json.find(key) : json.end();
  return found != json.end() ? *found : kNone;
}

// Of an index's manifest; those that tell no platform are for every one.
bool for_us(const Json& manifest) {
  const Json& platform = part_of(manifest, "platform");
  return !platform.is_object() || (text_of(platform, "os") == "linux" && text_of(platform, "architecture") == "amd64");
}

ImageConfig config_of(const Json& json, const std::string& where) {
  ImageConfig out;
  const Json& config = part_of(json, "config");
  for (const Json& variable : part_of(config, "Env")) {
    const std::string text = variable.is_string() ? variable.get<std::string>() : "";
    const std::size_t equals = text.find('=');
    if (equals == 0 || equals == std::string::npos || text.find('\0') != std::string::npos) {
      fail(ErrorCode::corrupt_data, "{}: config.Env: expected NAME=VALUE, found '{}'", where, text.substr(0, 100));
    }
    out.environment[text.substr(0, equals)] = text.substr(equals + 1);
  }
  out.directory = text_of(config, "WorkingDir");
  out.user = text_of(config, "User");
  for (const Json& digest : part_of(part_of(json, "rootfs"), "diff_ids")) {
    out.diff_digests.push_back(digest.is_string() ? digest.get<std::string>() : "");
    digits_of(out.diff_digests.back(), where + ": rootfs.diff_ids");
  }
  return out;
}

// Unpacks gzip from `below`, of several members too.
class Gunzip {
 public:
  Gunzip(Source below, std::string what) : below_(std::move(below)), what_(std::move(what)) {
    if (inflateInit2(&stream_, 15 + 16) != Z_OK) {
      fail(ErrorCode::exhausted, "{}: no memory to uncompress it", what_);
    }
  }
  ~Gunzip() { inflateEnd(&stream_); }
  Gunzip(const Gunzip&) = delete;
  Gunzip& operator=(const Gunzip&) = delete;

  std::size_t read(char* to, std::size_t size) {
    stream_.next_out = reinterpret_cast<Bytef*>(to);
    stream_.avail_out = static_cast<uInt>(std::min<std::size_t>(size, 1U << 30));
    const uInt room = stream_.avail_out;
    while (stream_.avail_out == room) {
      if (stream_.avail_in == 0) {
        stream_.next_in = reinterpret_cast<Bytef*>(part_);
        stream_.avail_in = static_cast<uInt>(below_(part_, sizeof part_));
        if (stream_.avail_in == 0) {
          if (!between_) {
            fail(ErrorCode::corrupt_data, "{}: its gzip stream ends early", what_);
          }
          return 0;
        }
      }
      if (between_ && inflateReset(&stream_) != Z_OK) {
        fail(ErrorCode::internal, "{}: cannot go on with the next gzip member", what_);
      }
      between_ = false;
      const int result = inflate(&stream_, Z_NO_FLUSH);
      between_ = result == Z_STREAM_END;
      if (result != Z_OK && result != Z_STREAM_END && result != Z_BUF_ERROR) {
        fail(ErrorCode::corrupt_data, "{}: not a gzip stream ({})", what_,
             stream_.msg != nullptr ? stream_.msg : std::to_string(result));
      }
    }
    return room - stream_.avail_out;
  }

 private:
  Source below_;
  std::string what_;
  z_stream stream_{};
  bool between_ = false;  // a member has ended
  char part_[64U << 10];
};

Source range(std::shared_ptr<FileDescriptor> file, std::uint64_t at, std::uint64_t size, std::string what) {
  return [file = std::move(file), at, left = size, what = std::move(what)](char* to, std::size_t room) mutable {
    const std::size_t take = static_cast<std::size_t>(std::min<std::uint64_t>(room, left));
    const ssize_t got = take == 0 ? 0 : pread(file->get(), to, take, static_cast<off_t>(at));
    if (got < 0) {
      fail_errno("read", what);
    }
    at += static_cast<std::uint64_t>(got), left -= static_cast<std::uint64_t>(got);
    return static_cast<std::size_t>(got);
  };
}

}  // namespace

Source gunzip(Source below, const std::string& what) {
  auto state = std::make_shared<Gunzip>(std::move(below), what);
  return [state](char* to, std::size_t size) { return state->read(to, size); };
}

Source source_of(std::string_view bytes) {
  return [bytes](char* to, std::size_t size) mutable {
    const std::size_t take = bytes.copy(to, size);
    bytes.remove_prefix(take);
    return take;
  };
}

std::string gunzip_all(std::string_view bytes, std::uint64_t limit, const std::string& what) {
  const Source source = gunzip(source_of(bytes), what);
  std::string out;
  char part[64U << 10];
  for (std::size_t got = 0; (got = source(part, sizeof part)) > 0;) {
    if (out.size() + got > limit) {
      fail(ErrorCode::exhausted, "{}: more than {} bytes when it is uncompressed", what, limit);
    }
    out.append(part, got);
  }
  return out;
}

bool is_layout(const fs::path& path) {
  std::error_code none;
  return fs::is_regular_file(path, none) || fs::is_regular_file(path / "oci-layout", none);
}

Layout::Layout(const fs::path& path) : path_(path) {
  std::error_code none;
  archive_ = fs::is_regular_file(path, none);
  if (!archive_ && !fs::is_directory(path, none)) {
    fail(ErrorCode::not_found, "{}: expected an OCI image layout, a folder or a tar archive of one", path.string());
  }
  if (archive_) {
    index_archive();
  }
  const Json marker = read_json(open_file("oci-layout"), "oci-layout");
  if (!text_of(marker, "imageLayoutVersion").starts_with("1.")) {
    fail(ErrorCode::not_supported, "{}: oci-layout: version '{}', expected 1.0.0", path.string(),
         text_of(marker, "imageLayoutVersion"));
  }
}

void Layout::index_archive() {
  auto file = std::make_shared<FileDescriptor>(open(path_.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat info {};
  if (!*file || fstat(file->get(), &info) != 0) {
    fail_errno("open", path_.string());
  }
  char head[2] = {};
  if (pread(file->get(), head, 2, 0) == 2 && head[0] == '\x1f' && head[1] == '\x8b') {
    throw Error(ErrorCode::not_supported, path_.string() + ": a compressed archive of an image layout",
                "uncompress it; its layers may stay compressed");
  }
  TarReader archive(range(file, 0, static_cast<std::uint64_t>(info.st_size), path_.string()), path_.string());
  TarEntry entry;
  while (archive.next(entry)) {
    if (entry.kind == TarEntry::Kind::file) {
      places_[entry.path] = {archive.offset(), entry.size};
    }
    if (places_.size() > kMaxFiles) {
      fail(ErrorCode::corrupt_data, "{}: more than {} files; expected an image layout", path_.string(), kMaxFiles);
    }
  }
  if (!places_.contains("oci-layout")) {
    throw Error(ErrorCode::corrupt_data, path_.string() + ": no file oci-layout in it: not an OCI image layout",
                "`docker save` of version 25 and newer, `skopeo copy ... oci-archive:FILE` and `podman save --format "
                "oci-archive` write one");
  }
}

Layout::File Layout::open_file(const std::string& name) const {
  const std::string shown = path_.string() + ": " + name;
  File out;
  if (archive_) {
    const auto found = places_.find(name);
    if (found == places_.end()) {
      fail(ErrorCode::not_found, "{}: it is not in the archive", shown);
    }
    out.descriptor = std::make_shared<FileDescriptor>(open(path_.c_str(), O_RDONLY | O_CLOEXEC));
    out.offset = found->second.offset, out.size = found->second.size;
  } else {
    out.descriptor = std::make_shared<FileDescriptor>(open((path_ / name).c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  }
  struct stat info {};
  if (!*out.descriptor && errno == ENOENT) {
    fail(ErrorCode::not_found, "{}: it is not in the layout", shown);
  }
  if (!*out.descriptor || fstat(out.descriptor->get(), &info) != 0) {
    fail_errno("open", shown);
  }
  if (!S_ISREG(info.st_mode)) {
    fail(ErrorCode::corrupt_data, "{}: not a regular file", shown);
  }
  if (!archive_) {
    out.size = static_cast<std::uint64_t>(info.st_size);
  }
  return out;
}

Layout::File Layout::open_blob(const Descriptor& blob) const {
  const std::string name = "blobs/sha256/" + digits_of(blob.digest, path_.string());
  File out = open_file(name);
  if (out.size != blob.size) {
    fail(ErrorCode::corrupt_data, "{}: {}: {} bytes, its descriptor tells {}", path_.string(), name, out.size,
         blob.size);
  }
  const Source source = range(out.descriptor, out.offset, out.size, path_.string());
  Hash hash;
  char part[64U << 10];
  for (std::size_t got = 0; (got = source(part, sizeof part)) > 0;) {
    hash.add(part, got);
  }
  if (const std::string found = hash.digest(); found != blob.digest) {
    fail(ErrorCode::corrupt_data, "{}: {}: its content has the digest {}", path_.string(), name, found);
  }
  return out;
}

Json Layout::read_json(const File& file, const std::string& name) const {
  if (file.size > kMaxJson) {
    fail(ErrorCode::corrupt_data, "{}: {}: {} bytes of JSON; at most {} are read", path_.string(), name, file.size,
         kMaxJson);
  }
  const Source source = range(file.descriptor, file.offset, file.size, path_.string());
  std::string text;
  char part[16U << 10];
  for (std::size_t got = 0; (got = source(part, sizeof part)) > 0;) {
    text.append(part, got);
  }
  Json out = Json::parse(text, nullptr, false);
  if (!out.is_object()) {
    fail(ErrorCode::corrupt_data, "{}: {}: not a JSON object", path_.string(), name);
  }
  return out;
}

Descriptor Layout::find_manifest(const Json& index, const std::string& name, int depth) const {
  const Json& manifests = part_of(index, "manifests");
  std::vector<const Json*> fitting;
  std::string names;
  for (const Json& one : manifests) {
    const std::string its = text_of(part_of(one, "annotations"), "org.opencontainers.image.ref.name");
    names += (names.empty() ? "" : ", ") + (its.empty() ? "(no name)" : its.substr(0, 100));
    if (for_us(one) && (name.empty() || its == name)) {
      fitting.push_back(&one);
    }
  }
  if (fitting.size() != 1) {
    fail(ErrorCode::not_found, "{}: {} images for linux/amd64{}, expected one; there are: {}", path_.string(),
         fitting.size(), name.empty() ? "" : " with the name '" + name + "'", names.substr(0, 500));
  }
  Descriptor found = descriptor_of(*fitting.front(), path_.string());
  if (found.media_type == "application/vnd.oci.image.index.v1+json" ||
      found.media_type == "application/vnd.docker.distribution.manifest.list.v2+json") {
    if (depth == kMaxDepth) {
      fail(ErrorCode::corrupt_data, "{}: indexes in indexes in indexes", path_.string());
    }
    return find_manifest(read_json(open_blob(found), found.digest), "", depth + 1);
  }
  return found;
}

Image Layout::image(const std::string& name) {
  const Descriptor chosen = find_manifest(read_json(open_file("index.json"), "index.json"), name, 0);
  const Json manifest = read_json(open_blob(chosen), chosen.digest);
  Image out;
  out.digest = chosen.digest;
  const Descriptor config = descriptor_of(part_of(manifest, "config"), path_.string() + ": config");
  out.config = config_of(read_json(open_blob(config), config.digest), path_.string() + ": config");
  for (const Json& layer : part_of(manifest, "layers")) {
    out.layers.push_back(descriptor_of(layer, path_.string() + ": layers"));
  }
  if (out.layers.empty() || out.layers.size() > kMaxLayers || out.layers.size() != out.config.diff_digests.size()) {
    fail(ErrorCode::corrupt_data, "{}: {} layers and {} digests of their content; expected as many of both, 1 to {}",
         path_.string(), out.layers.size(), out.config.diff_digests.size(), kMaxLayers);
  }
  return out;
}

Layout::Layer Layout::open_layer(const Descriptor& layer, const std::string& diff_digest) {
  const bool zipped = layer.media_type == "application/vnd.oci.image.layer.v1.tar+gzip" ||
                      layer.media_type == "application/vnd.docker.image.rootfs.diff.tar.gzip";
  if (!zipped && layer.media_type != "application/vnd.oci.image.layer.v1.tar") {
    throw Error(ErrorCode::not_supported,
                fmt::format("{}: a layer of type '{}'", path_.string(), layer.media_type.substr(0, 100)),
                "layers are read as tar and as tar+gzip; write the image again with gzip");
  }
  const std::string what = path_.string() + ": layer " + layer.digest;
  const File blob = open_blob(layer);
  Source source = range(blob.descriptor, blob.offset, blob.size, what);
  if (zipped) {
    source = gunzip(std::move(source), what);
  }
  const auto hash = std::make_shared<Hash>();
  Layer out;
  out.source = [source, hash](char* to, std::size_t size) {
    const std::size_t got = source(to, size);
    hash->add(to, got);
    return got;
  };
  out.check_end = [counted = out.source, hash, diff_digest, what] {
    char part[16U << 10];
    while (counted(part, sizeof part) > 0) {
    }
    if (const std::string found = hash->digest(); found != diff_digest) {
      fail(ErrorCode::corrupt_data, "{}: uncompressed it has the digest {}, its image tells {}", what, found,
           diff_digest);
    }
  };
  return out;
}

}  // namespace tidelock::sandbox::oci

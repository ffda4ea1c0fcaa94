// OCI image layouts, as folders or as tar archives of one: which image there is, what its settings are, its layers.
//
// Everything is read through its descriptor: a blob whose size or SHA-256 is not the one told is an error, before any
// of it is used. The host needs no network and no registry: an image that is not in the layout cannot be had.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/files.hpp"
#include "sandbox/oci/tar.hpp"
#include "sandbox/wire.hpp"

namespace tidelock::sandbox::oci {

struct Descriptor {
  std::string media_type, digest;  // sha256:HEX
  std::uint64_t size = 0;
};

// What an image says of the processes that run in it.
struct ImageConfig {
  std::map<std::string, std::string> environment;
  std::string directory, user;            // empty: none was told
  std::vector<std::string> diff_digests;  // of the layers, uncompressed
};

struct Image {
  std::string digest;  // of the manifest: names the image by its content
  ImageConfig config;
  std::vector<Descriptor> layers;  // the lowest first
};

// Whether `path` is to be read as an image layout: a folder with a file oci-layout, or a file.
bool is_layout(const std::filesystem::path& path);

// Uncompresses gzip, of one member or several. Throws Error{corrupt_data}, naming `what`.
Source gunzip(Source below, const std::string& what);

// Of what is in memory: as a source, and uncompressed as a whole. Throws Error{exhausted} for more than `limit` bytes.
Source source_of(std::string_view bytes);
std::string gunzip_all(std::string_view bytes, std::uint64_t limit, const std::string& what);

// A layout that is open for reading. Not thread-safe.
class Layout {
 public:
  // Throws Error{not_found, corrupt_data, not_supported}, naming what is missing.
  explicit Layout(const std::filesystem::path& path);

  // The one image for linux/amd64. `name`: of several, the one whose annotation org.opencontainers.image.ref.name it
  // is. Throws Error{not_found} when there is none or more than one, telling the names.
  Image image(const std::string& name = "");

  // A layer's tar archive, uncompressed. Its blob is checked first, its uncompressed digest by `check_end`.
  struct Layer {
    Source source;
    std::function<void()> check_end;  // reads on to the end; throws Error{corrupt_data}
  };
  Layer open_layer(const Descriptor& layer, const std::string& diff_digest);

 private:
  struct Place {  // of a file of an archive
    std::uint64_t offset = 0, size = 0;
  };
  struct File {
    std::shared_ptr<FileDescriptor> descriptor;
    std::uint64_t offset = 0, size = 0;
  };
  void index_archive();
  File open_file(const std::string& name) const;  // Error{not_found}
  File open_blob(const Descriptor& blob) const;   // checked
  nlohmann::json read_json(const File& file, const std::string& name) const;
  Descriptor find_manifest(const nlohmann::json& index, const std::string& name, int depth) const;

  std::filesystem::path path_;
  bool archive_ = false;
  std::map<std::string, Place> places_;
};

}  // namespace tidelock::sandbox::oci

// Layers become a root file system in a folder.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "sandbox/oci/layout.hpp"

namespace tidelock::sandbox::oci {

struct UnpackLimits {
  std::uint64_t bytes = 64ULL << 30;  // of all files together, before what later layers take away
  std::uint64_t entries = 4'000'000;
};

// Applies one layer to the folder `root`. Whatever the archive holds, nothing outside `root` is read or written: names
// are looked up with the root as the top of the file system. Whiteouts take away what lower layers have. Owners are
// kept when the caller is root. Devices are left out, since a guest has its own; how many is the result. Extended
// attributes (capabilities of files) are not kept. Counts `limits` down. Throws Error{corrupt_data, exhausted, io}.
std::size_t apply_layer(const Source& layer, const std::string& what, const std::filesystem::path& root,
                        UnpackLimits& limits);

// The image's layers, into the new folder `root`.
void unpack(Layout& layout, const Image& image, const std::filesystem::path& root, UnpackLimits limits = {});

// What a guest needs of every root, where it is missing: folders to mount on, /root, /tmp, and /bin/bash for clients
// that ask for it by this name, as another name of /bin/sh.
void complete_root(const std::filesystem::path& root);

}  // namespace tidelock::sandbox::oci

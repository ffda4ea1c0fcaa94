// Weights in the kernels' form that lie together: in memory, packed from a checkpoint or read from a file of packed
// weights; or in that file, mapped, when they are larger than memory.
//
// A file of packed weights spares the packing: it holds the bytes that the kernels read, in the order of the model's
// parameters, each at a multiple of 64, with a checksum. It belongs to one checkpoint: its key names the config, the
// numeric contract, the format of every matrix, and size and time of change of the checkpoint's files. It can always be
// made again; vectors (norms, biases, convolutions) and the vocabulary still come from the checkpoint.
//
//   "TLPACKED"  u32 version 1  u32 0  u64 count  u64 bytes of the file  char key[64]
//   count x { u64 offset; u64 bytes; u8 xxh3[16] }   by parameter; 0 bytes for vectors
//   u8 xxh3[16] of all before it, then zeros to a multiple of 4096, then the data
#pragma once

#include <filesystem>
#include <memory>

#include "base/team.hpp"
#include "model/weight_source.hpp"

namespace tidelock::model {

struct PackedOptions {
  std::filesystem::path file;  // of packed weights; made when it is missing, stale or damaged. Empty: none
  bool map = false;            // run from the mapped file; pages come when they are touched and may be dropped again
};

// load_model (model.hpp) for running only, by all threads of the team. Binds `source`. Throws Error{exhausted} when the
// weights do not fit the memory (unless mapped) or the disk, Error{invalid_argument} for `map` without a file, for a
// file that holds something else and while another process makes it.
std::unique_ptr<Model> load_packed(WeightSource& source, const PackedOptions& options, Team& team);

}  // namespace tidelock::model

// TensorBoard event files, written and read without protobuf.
//
// TFRecord frames: u64 length, u32 masked CRC-32C of the length, data, u32 masked CRC-32C of the data (little endian);
// masked(crc) = (crc >> 15 | crc << 17) + 0xa282ead8. Data is the protobuf message Event {1: wall_time double, 2: step
// int64, 3: file_version string, 5: summary {1: value {1: tag string, 2: simple_value float}}}; the first one holds
// file_version "brain.Event:2".
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace tidelock::rl {

struct TensorBoardEvent {
  double wall_time = 0;  // seconds since 1970
  std::int64_t step = 0;
  std::string file_version;                           // of the first event only
  std::vector<std::pair<std::string, float>> values;  // tag, value
};

// Appends events to the newest events.out.tfevents.* in a folder, or starts one there.
class TensorBoardWriter {
 public:
  // resumed_step >= 0: events after that step, and a half-written last frame, are cut off first. Throws Error{io}.
  TensorBoardWriter(const std::filesystem::path& directory, std::int64_t resumed_step);
  ~TensorBoardWriter();
  TensorBoardWriter(const TensorBoardWriter&) = delete;
  TensorBoardWriter& operator=(const TensorBoardWriter&) = delete;
  void write(const TensorBoardEvent& event);
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  int fd_ = -1;
};

// The bytes of one frame.
std::string tensorboard_frame(const TensorBoardEvent& event);

struct TensorBoardFile {
  std::vector<TensorBoardEvent> events;
  std::vector<std::uint64_t> ends;  // byte offset after each event
  bool torn = false;                // bytes follow the last whole frame
};
// Reads all whole frames. A frame whose checksum is wrong is Error{corrupt_data} naming its offset, unless nothing but
// it follows (a torn tail).
TensorBoardFile read_tensorboard(const std::filesystem::path& path);

}  // namespace tidelock::rl

#include "rl/tensorboard.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstring>
#include <optional>

#include "base/error.hpp"
#include "base/files.hpp"

namespace tidelock::rl {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is written as the machine stores it");

std::uint32_t masked_crc(std::string_view bytes) {
  const std::uint32_t crc = crc32c(bytes);
  return std::rotr(crc, 15) + 0xA282EAD8U;
}

template <typename T>
void put(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void put_varint(std::string& out, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  out += static_cast<char>(value);
}

enum Wire : std::uint64_t { varint = 0, fixed64 = 1, bytes = 2, fixed32 = 5 };

void put_key(std::string& out, std::uint64_t field, Wire wire) {
  put_varint(out, field << 3 | wire);
}

void put_bytes(std::string& out, std::uint64_t field, std::string_view value) {
  put_key(out, field, Wire::bytes);
  put_varint(out, value.size());
  out += value;
}

// Fields of a protobuf message, one after another. Throws Error{corrupt_data} on anything cut short.
class Fields {
 public:
  explicit Fields(std::string_view data) : data_(data) {}
  bool next() {
    if (data_.empty()) return false;
    const std::uint64_t key = read_varint();
    field = key >> 3;
    switch (key & 7) {
      case Wire::varint:
        number = read_varint();
        break;
      case Wire::fixed64:
        text = take(8);
        break;
      case Wire::fixed32:
        text = take(4);
        break;
      case Wire::bytes:
        text = take(read_varint());
        break;
      default:
        fail(ErrorCode::corrupt_data, "event: wire type {}", key & 7);
    }
    return true;
  }
  template <typename T>
  T fixed() const {
    T value{};
    if (text.size() != sizeof value) fail(ErrorCode::corrupt_data, "event: field {} has the wrong type", field);
    std::memcpy(&value, text.data(), sizeof value);
    return value;
  }
  std::uint64_t field = 0, number = 0;
  std::string_view text;

 private:
  std::string_view take(std::uint64_t size) {
    if (size > data_.size()) fail(ErrorCode::corrupt_data, "event: a field is cut short");
    const std::string_view taken = data_.substr(0, size);
    data_.remove_prefix(size);
    return taken;
  }
  std::uint64_t read_varint() {
    std::uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const auto byte = static_cast<unsigned char>(take(1)[0]);
      value |= std::uint64_t{byte & 0x7FU} << shift;
      if (byte < 0x80) return value;
    }
    fail(ErrorCode::corrupt_data, "event: a number without end");
  }
  std::string_view data_;
};

std::pair<std::string, float> parse_value(std::string_view data) {
  std::pair<std::string, float> value{"", 0.0F};
  for (Fields f(data); f.next();) {
    if (f.field == 1) value.first = f.text;
    if (f.field == 2) value.second = f.fixed<float>();
  }
  return value;
}

TensorBoardEvent parse_event(std::string_view data) {
  TensorBoardEvent event;
  for (Fields f(data); f.next();) {
    if (f.field == 1) event.wall_time = f.fixed<double>();
    if (f.field == 2) event.step = static_cast<std::int64_t>(f.number);
    if (f.field == 3) event.file_version = f.text;
    if (f.field != 5) continue;
    for (Fields summary(f.text); summary.next();)
      if (summary.field == 1) event.values.push_back(parse_value(summary.text));
  }
  return event;
}

constexpr std::size_t kHeader = 12, kFooter = 4;

// The data of the frame at the start of `bytes`, or nothing when it is not whole or a checksum is wrong.
std::optional<std::string_view> frame_data(std::string_view bytes) {
  if (bytes.size() < kHeader + kFooter) return std::nullopt;
  std::uint64_t length = 0;
  std::uint32_t length_crc = 0, data_crc = 0;
  std::memcpy(&length, bytes.data(), 8);
  std::memcpy(&length_crc, bytes.data() + 8, 4);
  if (length_crc != masked_crc(bytes.substr(0, 8)) || length > bytes.size() - kHeader - kFooter) return std::nullopt;
  std::memcpy(&data_crc, bytes.data() + kHeader + length, 4);
  const std::string_view data = bytes.substr(kHeader, length);
  if (data_crc != masked_crc(data)) return std::nullopt;
  return data;
}

double now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// The newest event file of the folder by name (names start with the time), or a new name.
std::filesystem::path event_file(const std::filesystem::path& directory) {
  std::filesystem::path newest;
  for (const auto& entry : std::filesystem::directory_iterator(directory))
    if (entry.path().filename().string().starts_with("events.out.tfevents.")) newest = std::max(newest, entry.path());
  if (!newest.empty()) return newest;
  std::array<char, 256> host{};
  if (::gethostname(host.data(), host.size() - 1) != 0) host[0] = '\0';
  return directory / fmt::format("events.out.tfevents.{:010}.{}.{}.0", static_cast<std::int64_t>(now()),
                                 host[0] == '\0' ? "host" : host.data(), ::getpid());
}

}  // namespace

std::string tensorboard_frame(const TensorBoardEvent& event) {
  std::string data;
  put_key(data, 1, Wire::fixed64);
  put(data, event.wall_time);
  if (event.step != 0) {
    put_key(data, 2, Wire::varint);
    put_varint(data, static_cast<std::uint64_t>(event.step));
  }
  if (!event.file_version.empty()) put_bytes(data, 3, event.file_version);
  if (!event.values.empty()) {
    std::string summary;
    for (const auto& [tag, number] : event.values) {
      std::string value;
      put_bytes(value, 1, tag);
      put_key(value, 2, Wire::fixed32);
      put(value, number);
      put_bytes(summary, 1, value);
    }
    put_bytes(data, 5, summary);
  }
  std::string frame;
  put(frame, std::uint64_t{data.size()});
  put(frame, masked_crc(frame));
  frame += data;
  put(frame, masked_crc(data));
  return frame;
}

TensorBoardFile read_tensorboard(const std::filesystem::path& path) {
  const std::string content = read_file(path);
  TensorBoardFile file;
  std::size_t at = 0;
  while (at < content.size()) {
    const auto data = frame_data(std::string_view(content).substr(at));
    if (!data) {
      // Torn: the last frame was being written. A broken frame with whole ones after it is damage.
      std::uint64_t length = 0;
      if (content.size() - at >= kHeader) std::memcpy(&length, content.data() + at, 8);
      const std::uint64_t rest = content.size() - at;
      if (rest >= kHeader && length < rest - kHeader && rest - kHeader - length > kFooter)
        fail(ErrorCode::corrupt_data, "{}: the checksum of the frame at byte {} is wrong", path.string(), at);
      file.torn = true;
      break;
    }
    file.events.push_back(parse_event(*data));
    at += kHeader + data->size() + kFooter;
    file.ends.push_back(at);
  }
  return file;
}

TensorBoardWriter::TensorBoardWriter(const std::filesystem::path& directory, std::int64_t resumed_step) {
  std::filesystem::create_directories(directory);
  if (resumed_step < 0)
    for (const auto& entry : std::filesystem::directory_iterator(directory))
      if (entry.path().filename().string().starts_with("events.out.tfevents.")) std::filesystem::remove(entry.path());
  path_ = event_file(directory);
  if (std::filesystem::exists(path_)) {
    const TensorBoardFile file = read_tensorboard(path_);
    std::uint64_t keep = 0;
    for (std::size_t i = 0; i < file.events.size() && file.events[i].step <= resumed_step; ++i) keep = file.ends[i];
    std::filesystem::resize_file(path_, keep);
  }
  fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (fd_ < 0) fail_errno("open", path_.string());
  if (std::filesystem::file_size(path_) == 0) {
    TensorBoardEvent first;
    first.wall_time = now();
    first.file_version = "brain.Event:2";
    write(first);
  }
}

TensorBoardWriter::~TensorBoardWriter() {
  if (fd_ >= 0) ::close(fd_);
}

void TensorBoardWriter::write(const TensorBoardEvent& event) {
  const std::string frame = tensorboard_frame(event);
  const ssize_t written = ::write(fd_, frame.data(), frame.size());
  if (written < 0) fail_errno("write", path_.string());
  if (static_cast<std::size_t>(written) != frame.size())
    fail(ErrorCode::io, "{}: {} of {} bytes written: the disk is full", path_.string(), written, frame.size());
}

}  // namespace tidelock::rl

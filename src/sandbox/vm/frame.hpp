// The wire between the program and the agent in a guest: frames on one byte stream that may be cut anywhere.
//
// A snapshot is taken, a program killed, a VM copied: at any byte the other side may be replaced by one that knows
// nothing of what was under way. So frames find themselves again: each is stuffed so that it holds no zero byte
// (consistent overhead byte stuffing) and ends with one; what is cut, joined or damaged fails its checksum and is
// thrown away. Inside: crc32 of the rest (u32), type (u8), stream (u32), payload; numbers are little-endian.
//
// Shared with the agent, which is built without exceptions: nothing here throws.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace tidelock::sandbox::vm {

constexpr std::size_t kNonce = 16;               // bytes of `hello` that `welcome` repeats
constexpr std::size_t kMaxPayload = 32U << 10;   // of one frame
constexpr std::size_t kMaxRequest = 4U << 20;    // of a request that comes in several frames
constexpr std::size_t kInputWindow = 64U << 10;  // bytes of standard input under way and not yet acknowledged
constexpr std::size_t kOutputWindow = 256U
                                      << 10;  // bytes of a stream's output not yet acknowledged: then its pipes wait

enum class FrameType : std::uint8_t {
  // program -> agent
  hello = 1,    // 16 random bytes, u32 0; what came before on this connection is void, all streams are forgotten
  request,      // a part of a GuestRequest
  request_end,  // its last part: it starts
  input,        // bytes of standard input
  input_end,
  kill,   // ends the stream's processes; `exited` follows
  clock,  // u64 nanoseconds since 1970 and up to 64 random bytes: a copy must not repeat its original
  // agent -> program
  welcome,    // the 16 bytes of hello, u32 the agent's version; agents older than versions send back the 0
  output,     // bytes of standard output
  error,      // bytes of standard error
  input_ack,  // u32: bytes of input taken
  exited,     // i32 exit code, i32 signal
  failed,     // text: why a request could not start
  clock_set,
  // program -> agent, about processes that outlive a connection; an older agent passes over them
  output_ack,  // u32: bytes of output and error taken
  signal,      // u32: to the process group of the stream
  attach,      // u32 pid: the process speaks on this stream from now; `started` or `failed` follows
  list,        // `listing` frames and a `listing_end` follow
  // agent -> program
  started,      // u32 pid, u32 ProcessFlag
  listing,      // a part of the list: for each process u32 pid, u32 length, the request that started it
  listing_end,  // its last part
  // program -> agent, since version 1
  resize,  // u32: the size of the stream's terminal, as pack_size makes it
  // Since version 3. u32 a TCP port of the guest's loopback: the stream becomes a connection to it. `started` or
  // `failed` follows; input and output are its bytes, input_end closes one way, `exited` says that the other side has
  // ended, kill resets it, and so does whatever makes the agent forget its streams.
  connect,
};

// What an agent can do more than the first ones: an agent stays what it was for as long as its sandbox lives.
constexpr std::uint32_t kAgentTerminals = 1, kAgentWatches = 2, kAgentPorts = 3;
constexpr std::uint32_t kAgentVersion = kAgentPorts;

// Rows and columns of a terminal, in a frame `resize` and in GuestRequest::mode.
constexpr std::uint32_t pack_size(std::uint16_t rows, std::uint16_t columns) {
  return std::uint32_t{rows} << 16 | columns;
}

constexpr const char* kPortClosed = "nothing listens on this port";  // of `failed`

struct Frame {
  FrameType type{};
  std::uint32_t stream = 0;
  std::string payload;
};

inline void put_u32(std::string& out, std::uint32_t value) {
  for (int i = 0; i < 4; ++i) {
    out.push_back(static_cast<char>(value >> (8 * i)));
  }
}
inline void put_u64(std::string& out, std::uint64_t value) {
  put_u32(out, static_cast<std::uint32_t>(value));
  put_u32(out, static_cast<std::uint32_t>(value >> 32));
}
inline std::uint32_t get_u32(std::string_view bytes, std::size_t at) {
  std::uint32_t value = 0;
  for (std::size_t i = 0; i < 4; ++i) {
    value |= std::uint32_t{static_cast<unsigned char>(bytes[at + i])} << (8 * i);
  }
  return value;
}
inline std::uint64_t get_u64(std::string_view bytes, std::size_t at) {
  return get_u32(bytes, at) | std::uint64_t{get_u32(bytes, at + 4)} << 32;
}

constexpr std::array<std::uint32_t, 256> make_crc_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) {
      value = (value & 1) != 0 ? 0xEDB88320U ^ (value >> 1) : value >> 1;
    }
    table[i] = value;
  }
  return table;
}

inline std::uint32_t frame_crc(std::string_view bytes) {
  static constexpr std::array<std::uint32_t, 256> kTable = make_crc_table();
  std::uint32_t crc = ~0U;
  for (const char c : bytes) {
    crc = kTable[(crc ^ static_cast<unsigned char>(c)) & 255U] ^ (crc >> 8);
  }
  return ~crc;
}

// Appends the stuffed form of `bytes` and the closing zero.
inline void stuff(std::string_view bytes, std::string& out) {
  constexpr std::size_t kRun = 254;
  while (true) {
    const std::size_t zero = std::min(bytes.find('\0'), bytes.size());
    const std::size_t run = std::min(zero, kRun);
    out.push_back(static_cast<char>(run + 1));
    out.append(bytes.substr(0, run));
    if (run == bytes.size()) {
      break;
    }
    bytes.remove_prefix(run == kRun ? run : run + 1);
  }
  out.push_back('\0');
}

// The reverse, without the closing zero; false for what no stuffing makes.
inline bool unstuff(std::string_view bytes, std::string& out) {
  out.clear();
  while (!bytes.empty()) {
    const std::size_t run = static_cast<unsigned char>(bytes[0]) - std::size_t{1};
    if (bytes[0] == 0 || bytes.size() < run + 1) {
      return false;
    }
    out.append(bytes.substr(1, run));
    bytes.remove_prefix(run + 1);
    if (run != 254 && !bytes.empty()) {
      out.push_back('\0');
    }
  }
  return true;
}

// `payload` of at most kMaxPayload bytes.
inline void append_frame(std::string& out, FrameType type, std::uint32_t stream, std::string_view payload = {}) {
  std::string body;
  body.push_back(static_cast<char>(type));
  put_u32(body, stream);
  body.append(payload);
  std::string whole;
  put_u32(whole, frame_crc(body));
  stuff(whole.append(body), out);
}

// Takes bytes as they come, gives frames. Memory is bounded by the largest frame, whatever comes.
class FrameReader {
 public:
  void feed(std::string_view bytes) { buffer_.append(bytes); }
  void forget() { buffer_.clear(), at_ = 0, skipping_ = false; }
  // The next whole frame; false when more bytes are needed. Damaged frames are passed over.
  bool next(Frame& frame) {
    while (true) {
      const std::size_t end = buffer_.find('\0', at_);
      if (end == std::string::npos) {
        buffer_.erase(0, at_);
        at_ = 0;
        if (buffer_.size() > kMaxStuffed) {
          buffer_.clear();
          skipping_ = true;
        }
        return false;
      }
      const std::string_view stuffed = std::string_view(buffer_).substr(at_, end - at_);
      at_ = end + 1;
      if (!skipping_ && stuffed.size() <= kMaxStuffed && unstuff(stuffed, plain_) && plain_.size() >= kHeader &&
          plain_.size() <= kHeader + kMaxPayload &&
          get_u32(plain_, 0) == frame_crc(std::string_view(plain_).substr(4))) {
        frame.type = static_cast<FrameType>(plain_[4]);
        frame.stream = get_u32(plain_, 5);
        frame.payload.assign(plain_, kHeader);
        return true;
      }
      skipping_ = false;
    }
  }

 private:
  static constexpr std::size_t kHeader = 9;
  static constexpr std::size_t kMaxStuffed = (kHeader + kMaxPayload) + (kHeader + kMaxPayload) / 254 + 2;
  std::string buffer_, plain_;
  std::size_t at_ = 0;
  bool skipping_ = false;
};

// A command ends with the connection that started it, as far as anybody hears of it; a process stays, can be attached
// to, signalled and listed, and how it ended is told for kEndedSeconds.
// A watch is a command that says `started` and tells changes below a folder until its standard input ends.
enum class GuestKind : std::uint8_t {
  command = 0,
  write_file = 1,
  read_file = 2,
  process = 3,
  file_tool = 4,
  watch = 5,
};

constexpr int kEndedSeconds = 30;
constexpr std::uint32_t kAsRoot = 1;              // in GuestRequest::flags
constexpr std::uint32_t kOpenInput = 2;           // there, and in `started`
constexpr std::uint32_t kHasEnded = 4;            // in `started`: `exited` follows
constexpr std::uint32_t kTerminal = 8;            // in both: a terminal is its input, output and error
constexpr std::uint32_t kRecursive = 16;          // of a watch: folders below, too
constexpr std::uint32_t kWithEntries = 32;        // of a watch: each change comes with what the file is then
constexpr std::uint32_t kKeepMode = 0xFFFFFFFFU;  // write_file: a file that exists keeps its mode, a new one has 0644
constexpr std::size_t kMaxListedRequest = 16U << 10;  // of a process; longer ones are listed without arguments

// What the agent is asked to start. A file is written from standard input and read to standard output; exit codes are
// those of FileExit. The arguments of a file_tool are one of: stat PATH, list PATH DEPTH, mkdir PATH, move FROM TO,
// remove PATH; it prints for each entry kFileFields texts, each followed by a zero byte.
struct GuestRequest {
  GuestKind kind = GuestKind::command;
  std::uint32_t mode = 0;       // write_file; process: the size of its terminal
  std::uint32_t processes = 0;  // command, process: the most its user may have
  std::uint64_t limit = 0;      // read_file: bytes; write_file: kAsRoot when what is new belongs to root
  std::string path;             // command, process: its directory; files: the file; watch: the folder
  std::string arguments;        // each followed by a zero byte
  std::string environment;      // NAME=value, each followed by a zero byte
  // from here on only of process, file_tool and watch, so that the agents of older templates can read the others
  std::uint32_t flags = 0;
  std::string tag;
};

// What a watch prints: texts, each followed by a zero byte. First kWatchReady; then for each change one letter of
// kChanges (create, write, remove, rename, chmod), the path below the folder ("." for itself), the number of texts that
// follow (0 or kFileFields), those. It ends when changes were lost, or there is too much to watch.
constexpr const char* kWatchReady = "ready";
constexpr std::string_view kChanges = "cwrna";
constexpr std::size_t kMaxChange = 64U << 10;  // bytes of one

// type (f, d or ?), path, size, mode (octal, with the bits of the type), owner, group, seconds, nanoseconds, target of
// a link
constexpr std::size_t kFileFields = 9;

inline std::string encode_request(const GuestRequest& request) {
  std::string out;
  out.push_back(static_cast<char>(request.kind));
  put_u32(out, request.mode);
  put_u32(out, request.processes);
  put_u64(out, request.limit);
  for (const std::string* text : {&request.path, &request.arguments, &request.environment}) {
    put_u32(out, static_cast<std::uint32_t>(text->size()));
    out.append(*text);
  }
  if (request.kind >= GuestKind::process) {
    put_u32(out, request.flags);
    out.append(request.tag);
  }
  return out;
}

inline bool decode_request(std::string_view bytes, GuestRequest& request) {
  if (bytes.size() < 17 || bytes[0] < 0 || bytes[0] > 5) {
    return false;
  }
  request.kind = static_cast<GuestKind>(bytes[0]);
  request.mode = get_u32(bytes, 1);
  request.processes = get_u32(bytes, 5);
  request.limit = get_u64(bytes, 9);
  bytes.remove_prefix(17);
  for (std::string* text : {&request.path, &request.arguments, &request.environment}) {
    if (bytes.size() < 4 || bytes.size() - 4 < get_u32(bytes, 0)) {
      return false;
    }
    const std::size_t length = get_u32(bytes, 0);
    text->assign(bytes.substr(4, length));
    bytes.remove_prefix(4 + length);
  }
  if (request.kind < GuestKind::process) {
    return bytes.empty();
  }
  if (bytes.size() < 4) {
    return false;
  }
  request.flags = get_u32(bytes, 0);
  request.tag = bytes.substr(4);
  return true;
}

}  // namespace tidelock::sandbox::vm

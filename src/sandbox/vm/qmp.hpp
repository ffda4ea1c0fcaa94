// QMP: how the program commands a QEMU process. One JSON object a line over a Unix socket.
#pragma once

#include <chrono>
#include <nlohmann/json.hpp>
#include <string>

#include "sandbox/wire.hpp"

namespace tidelock::sandbox::vm {

// Connects to a Unix socket in a directory, however long the directory's path is. Throws Error{io}.
FileDescriptor connect_socket(const std::string& path);
// Binds and listens likewise.
FileDescriptor listen_socket(const std::string& path);

class Qmp {
 public:
  using Json = nlohmann::json;
  Qmp() = default;
  // Connects and negotiates. Throws Error{io} when nothing answers within `patience`.
  explicit Qmp(const std::string& socket_path, std::chrono::milliseconds patience = std::chrono::seconds(20));
  // Runs one command, returns its answer. Throws Error{io} with QEMU's words when it is refused, when the process has
  // gone, and when it does not answer in 30 s. `descriptor` travels with the command (getfd, add-fd).
  Json execute(const std::string& command, const Json& arguments = Json::object(), int descriptor = -1);
  // Waits for an event of this name; false when `patience` passes first.
  bool await_event(const std::string& name, std::chrono::milliseconds patience);
  bool connected() const { return static_cast<bool>(socket_); }

 private:
  Json receive(std::chrono::steady_clock::time_point deadline);
  FileDescriptor socket_;
  std::string buffer_;
  std::vector<Json> events_;
};

}  // namespace tidelock::sandbox::vm

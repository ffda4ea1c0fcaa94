// serve/e2b/: sandboxes behind the E2B API, for the unmodified E2B clients. docs/e2b.md is its users' page.
//
// One port carries the control plane and what reaches into sandboxes, told apart by the headers E2b-Sandbox-Id and
// E2b-Sandbox-Port or by the host PORT-ID.anything. A connection is a coroutine of the HTTP server (../http.hpp);
// whatever waits for a sandbox waits on a thread of a pool.
//
//   server.cpp     which request goes where, who is let in
//   streams.cpp    processes and watched folders as streams      watchers.cpp   folders that clients ask about
//   ports.cpp      HTTP and WebSocket to ports of sandboxes      proxy.cpp      what is changed on the way
//   control.cpp    the control plane           sandboxes.cpp  the sandboxes behind it, their time-outs
//   envd_*.cpp     files and processes         connect.cpp    the protocol that they speak
//   record.cpp     records on disk, lists      text.cpp       encodings
//   templates.cpp  builds of templates         template_request.cpp  what clients ask of them
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>

#include "sandbox/sandbox.hpp"
#include "serve/http_options.hpp"

namespace tidelock::serve::e2b {

struct E2bOptions : HttpOptions {
  std::filesystem::path directory;                        // the runtime's; records of the API live in its folder e2b
  std::filesystem::path keys;                             // empty: everybody is let in
  std::map<std::string, std::string> templates;           // name -> image
  std::map<std::string, std::string> images;              // what builds may start from: name -> image
  int memory_mib = 256, disk_mib = 256, processes = 128;  // of every sandbox
};

// Serves until SIGINT or SIGTERM; sandboxes go on. The runtime must be able to keep sandboxes and to run processes.
// Throws Error{not_supported} otherwise, Error{invalid_argument, io} for an address that cannot be listened on.
void serve_e2b(std::unique_ptr<sandbox::Runtime> runtime, const E2bOptions& options);

}  // namespace tidelock::serve::e2b

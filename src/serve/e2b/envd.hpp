// What clients reach inside a sandbox: files and processes, as E2B's envd offers them. Private to serve/e2b.
#pragma once

#include <map>
#include <string>

#include "sandbox/sandbox.hpp"
#include "serve/e2b/connect.hpp"
#include "serve/e2b/record.hpp"

namespace tidelock::serve::e2b {

// A request without HTTP's machinery.
struct Request {
  std::string method, path, body;
  std::map<std::string, std::string> query;  // decoded
  std::string content_type, host;
  std::string authorization, content_encoding;
  bool file_metadata = false;  // a header X-Metadata-... is there
};

// Whose rights a call has: of `Authorization: Basic base64(NAME:)`, or of a name. Throws RpcError{unauthenticated}.
bool is_root(const std::string& name);
bool is_root_of(const std::string& authorization);

// A path as envd's clients write it: absolute, or from the user's home; "~" is that home. Without a slash at its end.
// Throws RpcError{invalid_argument} for none.
std::string guest_path(const std::string& path);

Json entry_json(const sandbox::FileEntry& entry);

// GET and POST /files.
Reply answer_files(sandbox::Sandbox& box, const Request& request);
// POST /filesystem.Filesystem/METHOD and the unary methods of /process.Process. Throws RpcError, Error.
Reply answer_filesystem(sandbox::Sandbox& box, const std::string& method, const Request& request);
Reply answer_process(sandbox::Sandbox& box, const std::string& method, const Request& request);

// Of the streams Start and Connect.
sandbox::ProcessRequest parse_start(const Json& message, const SandboxRecord& record, bool root);
// What its template says where the call does not: the folder, and the user of a call that names none.
sandbox::ProcessRequest with_defaults(sandbox::ProcessRequest request, const sandbox::Defaults& defaults, bool no_user);
int select_process(sandbox::Sandbox& box, const Json& message);  // its pid

// What a sandbox's processor, memory and disk do now. Runs a command in it.
struct Usage {
  double cpu_percent = 0;
  std::int64_t memory_total = 0, memory_used = 0, memory_cache = 0, disk_total = 0, disk_used = 0;  // bytes
};
Usage measure(sandbox::Sandbox& box);
// From what the command printed. Throws Error{not_supported} when the guest does not tell.
Usage parse_usage(const std::string& text);

// multipart/form-data: its parts. Throws RpcError{invalid_argument}.
struct Part {
  std::string name, filename, content;
};
std::vector<Part> parse_multipart(const std::string& content_type, std::string_view body);

}  // namespace tidelock::serve::e2b

// Files: /files and filesystem.Filesystem.
#include <algorithm>

#include "base/base.hpp"
#include "sandbox/oci/layout.hpp"
#include "serve/api_error.hpp"
#include "serve/e2b/envd.hpp"
#include "serve/e2b/text.hpp"

namespace tidelock::serve::e2b {
namespace {

using sandbox::FileCommand;
using sandbox::FileEntry;
using Operation = FileCommand::Operation;

constexpr std::uint64_t kMaxRead = 64ULL << 20;  // bytes of a file that is read; they are in memory for a while

std::string permissions_of(const FileEntry& entry) {
  std::string out = entry.type == FileEntry::Type::folder ? "d" : "-";
  for (int shift = 6; shift >= 0; shift -= 3)
    for (int bit = 2; bit >= 0; --bit) out.push_back((entry.mode >> (shift + bit) & 1U) != 0 ? "xwr"[bit] : '-');
  return out;
}

std::string name_of(const std::string& path) {
  return path.substr(path.find_last_of('/') + 1);
}

std::string required_text(const Json& message, const char* name) {
  const auto found = message.find(name);
  if (found == message.end() || found->is_null()) return "";
  if (!found->is_string()) throw RpcError("invalid_argument", fmt::format("{}: expected a string", name));
  return found->get<std::string>();
}

int depth_of(const Json& message) {
  const Json depth = message.value("depth", Json(1));
  if (!depth.is_number_integer() || depth.get<std::int64_t>() < 0 || depth.get<std::int64_t>() > 100)
    throw RpcError("invalid_argument", "depth: expected 0 to 100");
  return std::max(1, depth.get<int>());
}

Json written(const std::string& path) {
  return {{"path", path}, {"name", name_of(path)}, {"type", "file"}};
}

std::string query_of(const Request& request, const char* name) {
  const auto found = request.query.find(name);
  return found == request.query.end() ? "" : found->second;
}

// The body of an upload, which may be gzip.
std::string uncompressed(const Request& request) {
  if (request.content_encoding.empty() || request.content_encoding == "identity") return request.body;
  if (request.content_encoding != "gzip")
    throw ApiError(501, "", fmt::format("uploads with Content-Encoding {} are not read", request.content_encoding));
  try {
    return sandbox::oci::gunzip_all(request.body, kMaxRead, "the body");
  } catch (const Error& error) {
    throw ApiError(error.code() == ErrorCode::exhausted ? 413 : 400, "", error.what());
  }
}

}  // namespace

Json entry_json(const FileEntry& entry) {
  const char* type = entry.type == FileEntry::Type::file     ? "FILE_TYPE_FILE"
                     : entry.type == FileEntry::Type::folder ? "FILE_TYPE_DIRECTORY"
                                                             : "FILE_TYPE_UNSPECIFIED";
  Json out{{"name", name_of(entry.path)},
           {"type", type},
           {"path", entry.path},
           {"size", std::to_string(entry.size)},
           {"mode", entry.mode & 07777U},
           {"permissions", permissions_of(entry)},
           {"owner", entry.owner},
           {"group", entry.group},
           {"modifiedTime", rfc3339(entry.seconds, entry.nanoseconds)}};
  if (!entry.target.empty()) out["symlinkTarget"] = entry.target;
  return out;
}

std::string guest_path(const std::string& path) {
  std::string out = path;
  if (out == "~" || out.starts_with("~/")) out.erase(0, std::min<std::size_t>(2, out.size()));
  if (path.empty()) throw RpcError("invalid_argument", "path: expected one, found none");
  if (!out.starts_with('/')) out = "/root/" + out;
  while (out.size() > 1 && out.back() == '/') out.pop_back();
  return out;
}

std::vector<Part> parse_multipart(const std::string& content_type, std::string_view body) {
  const auto parameter = [](std::string_view text, std::string_view name) {
    const std::size_t at = text.find(std::string(name) + "=");
    if (at == std::string_view::npos) return std::string();
    text.remove_prefix(at + name.size() + 1);
    if (!text.starts_with('"')) return std::string(text.substr(0, text.find_first_of("; \r\n")));
    std::string out;
    for (std::size_t i = 1; i < text.size() && text[i] != '"'; ++i) {
      i += text[i] == '\\' && i + 1 < text.size() ? 1 : 0;
      out.push_back(text[i]);
    }
    return out;
  };
  const std::string boundary = parameter(content_type, "boundary");
  const RpcError broken("invalid_argument", "the body is not multipart/form-data as its content type says");
  if (boundary.empty() || boundary.size() > 200) throw broken;
  const std::string line = "--" + boundary, between = "\r\n" + line;
  if (!body.starts_with(line)) throw broken;
  body.remove_prefix(line.size());
  std::vector<Part> out;
  while (!body.starts_with("--")) {
    const std::size_t header_end = body.find("\r\n\r\n");
    const std::size_t end = body.find(between, header_end == std::string_view::npos ? body.size() : header_end + 2);
    if (end == std::string_view::npos || out.size() >= 10'000) throw broken;
    const std::string_view header = body.substr(0, header_end);
    // Without the blank, "filename" would be found for "name".
    Part part{parameter(header, " name"), parameter(header, " filename"), ""};
    part.content = end > header_end + 4 ? body.substr(header_end + 4, end - header_end - 4) : "";
    out.push_back(std::move(part));
    body.remove_prefix(end + between.size());
  }
  return out;
}

Reply answer_files(sandbox::Sandbox& box, const Request& request) {
  const bool root = is_root(query_of(request, "username"));
  const std::string path = query_of(request, "path");
  if (request.method == "GET") {
    const std::string full = guest_path(path);
    const FileEntry entry = box.files({.operation = Operation::stat, .path = full}).at(0);
    if (entry.type != FileEntry::Type::file)
      throw RpcError("invalid_argument", fmt::format("path '{}' is not a file", full));
    if (entry.size > kMaxRead)
      throw ApiError(413, "", fmt::format("{} has {} bytes; at most {} are read at once", full, entry.size, kMaxRead));
    return {200, box.read_file(full, kMaxRead), "application/octet-stream"};
  }
  if (request.method != "POST") throw ApiError(405, "", "/files takes GET and POST");
  const std::string body = uncompressed(request);
  if (request.file_metadata) throw ApiError(501, "", "X-Metadata-...: files keep no metadata here");
  Json out = Json::array();
  const auto write = [&](const std::string& to, std::string_view content) {
    const std::string full = guest_path(to);
    box.files({.operation = Operation::write, .path = full, .content = content, .root = root});
    out.push_back(written(full));
  };
  if (request.content_type.starts_with("application/octet-stream")) {
    write(path, body);
  } else if (request.content_type.starts_with("multipart/form-data")) {
    const std::vector<Part> parts = parse_multipart(request.content_type, body);
    if (!path.empty() && parts.size() > 1)
      throw RpcError("invalid_argument", fmt::format("one path for {} files; name them each", parts.size()));
    for (const Part& part : parts) write(path.empty() ? part.filename : path, part.content);
  } else {
    throw ApiError(415, "", "expected application/octet-stream or multipart/form-data");
  }
  return json_reply(200, out);
}

Reply answer_filesystem(sandbox::Sandbox& box, const std::string& method, const Request& request) {
  const bool root = is_root_of(request.authorization);
  const Json message = parse_message(request.body);
  const auto one = [&](Operation operation) {
    const auto entries =
        box.files({.operation = operation, .path = guest_path(required_text(message, "path")), .root = root});
    return Json{{"entry", entry_json(entries.at(0))}};
  };
  Json out = Json::object();
  if (method == "Stat") {
    out = one(Operation::stat);
  } else if (method == "MakeDir") {
    out = one(Operation::make_folder);
  } else if (method == "Move") {
    const auto entries = box.files({.operation = Operation::move,
                                    .path = guest_path(required_text(message, "source")),
                                    .to = guest_path(required_text(message, "destination")),
                                    .root = root});
    out["entry"] = entry_json(entries.at(0));
  } else if (method == "ListDir") {
    auto entries = box.files(
        {.operation = Operation::list, .path = guest_path(required_text(message, "path")), .depth = depth_of(message)});
    std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) { return a.path < b.path; });
    out["entries"] = Json::array();
    for (const FileEntry& entry : entries) out["entries"].push_back(entry_json(entry));
  } else if (method == "Remove") {
    box.files({.operation = Operation::remove, .path = guest_path(required_text(message, "path"))});
  } else {
    throw RpcError("unimplemented", fmt::format("filesystem.Filesystem/{} is not built here", method.substr(0, 60)));
  }
  return json_reply(200, out);
}

}  // namespace tidelock::serve::e2b

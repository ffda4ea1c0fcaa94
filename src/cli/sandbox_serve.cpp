#include "cli/sandbox_serve.hpp"

#include <charconv>
#include <cstdio>

#include "base/base.hpp"
#include "sandbox/sandbox.hpp"
#include "serve/e2b/e2b.hpp"

namespace tidelock::cli {
namespace {

// HOST:PORT; an IPv6 address stands in brackets.
void parse_listen(const std::string& text, serve::HttpOptions& out) {
  const std::size_t colon = text.rfind(':');
  const char* end = text.data() + text.size();
  out.host = text.substr(0, std::min(colon, text.size()));
  if (out.host.size() > 2 && out.host.front() == '[' && out.host.back() == ']')
    out.host = out.host.substr(1, out.host.size() - 2);
  if (colon == std::string::npos || out.host.empty() ||
      std::from_chars(text.data() + colon + 1, end, out.port).ptr != end || colon + 1 == text.size())
    fail(ErrorCode::invalid_argument, "--listen {}: expected ADDRESS:PORT, for instance 127.0.0.1:3000", text);
}

void add_named(std::map<std::string, std::string>& to, const char* option, const std::vector<std::string>& texts) {
  for (const std::string& text : texts) {
    const std::size_t equals = text.find('=');
    if (equals == std::string::npos || equals == 0 || equals + 1 == text.size())
      fail(ErrorCode::invalid_argument, "{} {}: expected NAME=IMAGE", option, text);
    to[text.substr(0, equals)] = text.substr(equals + 1);
  }
}

}  // namespace

void add_sandbox_serve(CLI::App& app, SandboxServeOptions& o) {
  app.add_option("--listen", o.listen, "IP address and port; port 0: any free one, which is printed")
      ->capture_default_str();
  app.add_option("--api-key-file", o.keys, "file of keys: SHA256 NAME a line; without it everybody is let in");
  app.add_option("--template", o.templates,
                 "NAME=IMAGE: busybox, a folder that holds a root file system, or an OCI image layout")
      ->capture_default_str();
  app.add_option("--image", o.images, "NAME=IMAGE: what clients may build from, by the name that they use for it")
      ->capture_default_str();
  app.add_option("--memory", o.memory_mib, "MiB of memory of every sandbox")
      ->check(CLI::Range(96, 65536))
      ->capture_default_str();
  app.add_option("--disk", o.disk_mib, "MiB that every sandbox may write")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--processes", o.processes, "the most processes of a sandbox's user")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  app.add_option("--pool", o.pool, "QEMU processes kept ready")->check(CLI::Range(0, 64))->capture_default_str();
  app.add_option("--max-body", o.max_body_mib, "MiB of a request's body, uploads included; more get 413")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
}

int serve_sandboxes(const std::string& directory, const std::string& accelerator, const SandboxServeOptions& o) {
  serve::e2b::E2bOptions options;
  parse_listen(o.listen, options);
  options.directory = directory;
  options.keys = o.keys;
  options.memory_mib = o.memory_mib, options.disk_mib = o.disk_mib, options.processes = o.processes;
  options.body_bytes = static_cast<std::uint64_t>(o.max_body_mib) << 20;
  add_named(options.templates, "--template", o.templates);
  add_named(options.images, "--image", o.images);
  options.listening = [&](std::uint16_t port) {
    fmt::print("sandboxes at http://{}:{}\n", options.host, port);
    std::fflush(stdout);
  };
  sandbox::MicrovmOptions microvms;
  microvms.directory = directory;
  microvms.accelerator = accelerator;
  microvms.pool = o.pool;
  serve_e2b(sandbox::make_microvm_runtime(microvms), options);
  return 0;
}

}  // namespace tidelock::cli

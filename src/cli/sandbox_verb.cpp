#include <unistd.h>

#include <cstdio>
#include <ctime>
#include <iostream>
#include <iterator>

#include "base/base.hpp"
#include "cli/cli.hpp"
#include "cli/sandbox_build.hpp"
#include "cli/sandbox_serve.hpp"
#include "cli/sandbox_shell.hpp"
#include "sandbox/sandbox.hpp"

namespace tidelock::cli {
namespace {

struct SandboxOptions {
  std::string directory, id, name, image = "busybox", snapshot, accelerator = "auto", workdir, from, to;
  std::uint64_t memory_mib = 256, disk_mib = 64;
  int processes = 64, count = 1;
  double timeout = 60;
  bool input = false, root = false;
  std::vector<std::string> command, environment;
  BuildRequest build;
};

std::unique_ptr<sandbox::Runtime> open_runtime(const SandboxOptions& o) {
  sandbox::MicrovmOptions options;
  options.directory = o.directory;
  options.accelerator = o.accelerator;
  return sandbox::make_microvm_runtime(options);
}

sandbox::Spec spec_of(const SandboxOptions& o) {
  sandbox::Spec spec;
  spec.image = o.image;
  spec.snapshot = o.snapshot;
  spec.limits.memory_bytes = o.memory_mib << 20;
  spec.limits.disk_bytes = o.disk_mib << 20;
  spec.limits.processes = o.processes;
  return spec;
}

// Where a command runs: where it was said, or where the sandbox's template says.
std::string directory_for(const SandboxOptions& o, sandbox::Sandbox& box) {
  return !o.workdir.empty() ? o.workdir : box.defaults().working_directory();
}

void write_through(std::FILE* file, std::string_view bytes) {
  if (std::fwrite(bytes.data(), 1, bytes.size(), file) != bytes.size() || std::fflush(file) != 0)
    fail(ErrorCode::io, "cannot write what the command printed");
}

int exec(const SandboxOptions& o) {
  const auto runtime = open_runtime(o);
  sandbox::ExecRequest request;
  request.argv = o.command;
  const auto box = runtime->open(o.id);
  request.directory = directory_for(o, *box);
  request.timeout = std::chrono::milliseconds(static_cast<long>(o.timeout * 1000));
  request.output_limit = 0;  // printed as it comes, not kept
  for (const std::string& text : o.environment) {
    const std::size_t equals = text.find('=');
    if (equals == std::string::npos) fail(ErrorCode::invalid_argument, "--env {}: expected NAME=VALUE", text);
    request.environment[text.substr(0, equals)] = text.substr(equals + 1);
  }
  if (o.input) request.input.assign(std::istreambuf_iterator<char>(std::cin), {});
  request.on_output = [](sandbox::Stream stream, std::string_view bytes) {
    write_through(stream == sandbox::Stream::standard_output ? stdout : stderr, bytes);
  };
  const sandbox::ExecResult result = box->exec(request);
  if (result.timed_out) {
    std::fprintf(stderr, "tidelock: ended after %g s\n", o.timeout);
    return 124;
  }
  return result.exit_code;
}

// Of seconds since 1970; "-" for 0.
std::string local_time(std::int64_t seconds) {
  char out[32] = "-";
  const std::time_t time = seconds;
  std::tm parts{};
  if (time != 0 && localtime_r(&time, &parts) != nullptr) std::strftime(out, sizeof out, "%Y-%m-%d %H:%M:%S", &parts);
  return out;
}

int list(const SandboxOptions& o) {
  std::printf("%-9s %-26s %-9s %-26s %7s %9s  %s\n", "KIND", "NAME", "STATE", "FROM", "MEMORY", "PRIVATE", "CREATED");
  for (const sandbox::Listing& entry : open_runtime(o)->list()) {
    std::printf("%-9s %-26s %-9s %-26s %6lluM %8.1fM  %s\n", entry.kind.c_str(), entry.name.c_str(),
                entry.state.empty() ? "-" : entry.state.c_str(), entry.origin.empty() ? "-" : entry.origin.c_str(),
                static_cast<unsigned long long>(entry.memory_bytes >> 20),
                static_cast<double>(entry.private_bytes) / (1 << 20), local_time(entry.created).c_str());
  }
  return 0;
}

// What a terminal shows and does not obey: a log holds what clients wrote.
std::string printable(std::string_view text) {
  std::string out;
  for (std::size_t at = 0; at < text.size(); ++at) {
    const auto byte = static_cast<unsigned char>(text[at]);
    const bool high_control = byte == 0xC2 && at + 1 < text.size() && static_cast<unsigned char>(text[at + 1]) < 0xA0;
    if (byte < 0x20 || byte == 0x7F || high_control)
      out += fmt::format("\\x{:02x}", high_control ? static_cast<unsigned char>(text[++at]) : byte);
    else
      out += text[at];
  }
  return out;
}

int print_log(const SandboxOptions& o) {
  for (const sandbox::LogEntry& entry : open_runtime(o)->log(o.id)) {
    std::string line = fmt::format("{}.{:03} {:<5} {}", local_time(entry.time / 1000), entry.time % 1000,
                                   sandbox::log_level_name(entry.level), entry.message);
    for (const auto& [name, text] : entry.fields) line += fmt::format("  {}={}", name, text);
    std::puts(printable(line).c_str());
  }
  return 0;
}

int create(const SandboxOptions& o) {
  const auto runtime = open_runtime(o);
  const auto box = runtime->create(spec_of(o));
  box->keep();
  std::puts(box->id().c_str());
  return 0;
}

int fork(const SandboxOptions& o) {
  const auto runtime = open_runtime(o);
  for (const auto& box : runtime->open(o.id)->fork(o.count)) {
    box->keep();
    std::puts(box->id().c_str());
  }
  return 0;
}

int remove(const SandboxOptions& o) {
  const auto runtime = open_runtime(o);
  if (!o.name.empty()) {
    runtime->remove_snapshot(o.name);
    return 0;
  }
  if (o.id.empty()) fail(ErrorCode::invalid_argument, "sandbox rm: expected a sandbox, or --snapshot NAME");
  runtime->open(o.id)->remove();
  return 0;
}

// The one verb of `app` that was given.
struct Verb {
  CLI::App* app;
  std::function<int()> run;
};

}  // namespace

Action add_sandbox(CLI::App& app) {
  auto o = std::make_shared<SandboxOptions>();
  app.require_subcommand(1);
  app.add_option("--dir,--directory", o->directory,
                 "state directory: templates, layers, disks, journal; made at first use")
      ->required();
  app.add_option("--accelerator", o->accelerator, "of new templates: auto, kvm or tcg")
      ->check(CLI::IsMember({"auto", "kvm", "tcg"}));
  auto verbs = std::make_shared<std::vector<Verb>>();
  const auto add = [&](const char* name, const char* help, std::function<int()> run) {
    CLI::App* sub = app.add_subcommand(name, help);
    sub->fallthrough();
    verbs->push_back({sub, std::move(run)});
    return sub;
  };
  const auto on_box = [o](void (*act)(sandbox::Sandbox&, const SandboxOptions&)) {
    return [o, act] {
      const auto runtime = open_runtime(*o);
      act(*runtime->open(o->id), *o);
      return 0;
    };
  };
  const auto shape = [&](CLI::App* sub) {
    sub->add_option("--image", o->image,
                    "busybox, a folder that holds a root file system, or an OCI image layout (folder or tar archive)");
    sub->add_option("--memory", o->memory_mib, "MiB of memory")->check(CLI::Range(96, 65536));
    sub->add_option("--disk", o->disk_mib, "MiB that the guest may write")->check(CLI::Range(1, 1 << 20));
  };
  const auto need_id = [&](CLI::App* sub) { sub->add_option("sandbox", o->id, "its name")->required(); };
  CLI::App* build = add("build", "boots an image once, so that create is quick; with --name: builds a template", [o] {
    const auto runtime = open_runtime(*o);
    if (!o->build.name.empty() || !o->build.recipe.empty()) return build_named(*runtime, spec_of(*o), o->build);
    runtime->build(spec_of(*o));
    return 0;
  });
  shape(build);
  build->add_option("recipe", o->build.recipe, "file of steps: FROM, ENV, WORKDIR, USER, COPY, RUN, START, READY");
  build->add_option("--name", o->build.name, "of the template, for create --template");
  build->add_option("--context", o->build.context, "folder of COPY's files; the recipe's when it is not given");
  build->add_flag("--no-cache", o->build.no_cache, "does every step again");
  CLI::App* make = add("create", "starts a sandbox and prints its name", [o] { return create(*o); });
  shape(make);
  make->add_option("--from,--template", o->snapshot, "a snapshot or template to start from, instead of an image");
  make->add_option("--processes", o->processes, "the most processes of its user")->check(CLI::Range(1, 100000));
  CLI::App* run = add("exec", "runs a command; resumes the sandbox first when it is paused", [o] { return exec(*o); });
  need_id(run);
  run->add_option("command", o->command, "program and arguments, after --")->required();
  run->add_option("--timeout", o->timeout, "seconds")->check(CLI::Range(0.0, 1e7));
  run->add_option("--env", o->environment, "NAME=VALUE");
  run->add_option("--workdir", o->workdir, "where it runs");
  run->add_flag("--stdin", o->input, "hands standard input to the command");
  CLI::App* shell = add("shell", "a terminal in the sandbox; resumes it first when it is paused", [o] {
    const auto runtime = open_runtime(*o);
    const std::vector<std::string> login{"/bin/sh", "-i", "-l"};
    const auto box = runtime->open(o->id);
    return run_shell(*box, o->command.empty() ? login : o->command, o->root || box->defaults().root,
                     directory_for(*o, *box));
  });
  need_id(shell);
  shell->add_option("command", o->command, "program and arguments, after --; a login shell when there are none");
  shell->add_option("--workdir", o->workdir, "where it runs");
  shell->add_flag("--root", o->root, "as the sandbox's root");
  const auto on_files = [o](int (*act)(sandbox::Sandbox&, const std::string&, const std::string&)) {
    return [o, act] { return act(*open_runtime(*o)->open(o->id), o->from, o->to); };
  };
  CLI::App* up = add("upload", "copies a file into the sandbox", on_files(upload));
  need_id(up);
  up->add_option("from", o->from, "file here; -: standard input")->required();
  up->add_option("to", o->to, "absolute path there; its folders are made")->required();
  CLI::App* down = add("download", "copies a file out of the sandbox", on_files(download));
  need_id(down);
  down->add_option("from", o->from, "absolute path there")->required();
  down->add_option("to", o->to, "file here; -: standard output")->required();
  need_id(add("pause", "writes memory to disk and ends the process: nothing stays resident",
              on_box([](sandbox::Sandbox& box, const SandboxOptions&) { box.pause(); })));
  need_id(add("resume", "goes on where it was paused",
              on_box([](sandbox::Sandbox& box, const SandboxOptions&) { box.resume(); })));
  need_id(add("checkpoint", "keeps the present state for revert; the sandbox runs on",
              on_box([](sandbox::Sandbox& box, const SandboxOptions&) { box.checkpoint(); })));
  CLI::App* revert = add("revert", "back to the last checkpoint, or to a snapshot",
                         on_box([](sandbox::Sandbox& box, const SandboxOptions& given) { box.revert(given.name); }));
  need_id(revert);
  revert->add_option("--snapshot", o->name, "its name");
  CLI::App* copies =
      add("fork", "copies a sandbox with its memory; prints the copies' names", [o] { return fork(*o); });
  need_id(copies);
  copies->add_option("--count", o->count, "copies")->check(CLI::Range(1, 100));
  CLI::App* snapshot =
      add("snapshot", "keeps the present state under a name, for create --from and revert",
          on_box([](sandbox::Sandbox& box, const SandboxOptions& given) { box.snapshot(given.name); }));
  need_id(snapshot);
  snapshot->add_option("name", o->name, "its name")->required();
  add("ls", "sandboxes, snapshots and templates", [o] { return list(*o); });
  need_id(add("logs", "what happened to a sandbox: made, paused, copied, lost", [o] { return print_log(*o); }));
  const auto serve_options = std::make_shared<SandboxServeOptions>();
  CLI::App* serve = add("serve", "an HTTP server of the E2B API; sandboxes outlive it",
                        [o, serve_options] { return serve_sandboxes(o->directory, o->accelerator, *serve_options); });
  add_sandbox_serve(*serve, *serve_options);
  CLI::App* gone = add("rm", "ends a sandbox and removes all that is only its own", [o] { return remove(*o); });
  gone->add_option("sandbox", o->id, "its name");
  gone->add_option("--snapshot", o->name, "removes a snapshot instead");
  return [verbs] {
    for (const Verb& verb : *verbs)
      if (verb.app->parsed()) return verb.run();
    return 2;
  };
}

}  // namespace tidelock::cli

#include "sandbox/build/builder.hpp"

#include <algorithm>
#include <condition_variable>
#include <csignal>
#include <mutex>
#include <set>
#include <thread>

#include "base/base.hpp"
#include "sandbox/build/archive.hpp"
#include "sandbox/oci/layout.hpp"

namespace tidelock::sandbox {
namespace {

using Kind = BuildStep::Kind;
using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kLook{200};        // at the stop flag, while nothing happens
constexpr std::chrono::milliseconds kReadyEvery{500};  // between two tries of READY
constexpr std::chrono::seconds kStartWithoutReady{2};  // what START gets when nothing tells that it is ready
constexpr std::size_t kInputPart = 32U << 10;

// In a guest: takes an archive on standard input; $1 from, $2 to, $3 owner, $4 mode.
constexpr const char* kCopyScript = R"sh(set -e
from=$1 to=$2 owner=$3 mode=$4
tmp=/tmp/.tidelock-copy
rm -rf "$tmp"; mkdir "$tmp"; cd "$tmp"
tar -xof -
chown -R "$owner" .
if [ -n "$mode" ]; then find . -type f -exec chmod "$mode" {} +; fi
make() { if [ ! -d "$1" ]; then mkdir -p "$1"; chown "$owner" "$1"; fi; }
put() {
  if [ -d "$1" ] && [ ! -L "$1" ]; then make "$to"; cp -a "$1/." "$to/"; return; fi
  case "$to" in
    */) make "$to"; cp -a "$1" "$to" ;;
    *) if [ -d "$to" ]; then cp -a "$1" "$to/"; else make "$(dirname "$to")"; cp -a "$1" "$to"; fi ;;
  esac
}
IFS=
for one in $from; do
  if [ ! -e "$one" ] && [ ! -L "$one" ]; then echo "there is no '$one' among the files that were given" >&2; exit 1; fi
  put "$one"
done
cd /; rm -rf "$tmp"
)sh";

// Wakes the builder when a process has something to tell.
struct Bell {
  std::mutex mutex;
  std::condition_variable changed;
  bool rung = false;
  void ring() {
    const std::lock_guard lock(mutex);
    rung = true;
    changed.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex);
    changed.wait_for(lock, kLook, [this] { return rung; });
    rung = false;
  }
};

// The recipe's steps, with what each is known by: all that led to it.
struct Plan {
  std::vector<std::string> keys;      // [i]: after i steps
  std::vector<std::string> archives;  // [i]: of step i, if it is a COPY
  std::vector<Defaults> defaults;     // [i]: after i steps
  std::string final_key;
};

std::string text_of(const Defaults& defaults) {
  std::string out = defaults.directory + '\0' + (defaults.root ? "root" : "user");
  for (const auto& [name, value] : defaults.environment) {
    out.append(1, '\0').append(name).append(1, '=').append(value);
  }
  return out;
}

std::string next_key(const std::string& key, const std::string& what) {
  return sha256_hex(key + '\n' + what).substr(0, 40);
}

Plan plan_of(const BuildRecipe& recipe, const BuildOptions& options, const std::string& base, const Defaults& first) {
  Plan out;
  out.keys.push_back(next_key(base, text_of(first)));
  out.defaults.push_back(first);
  out.archives.resize(recipe.steps.size());
  for (std::size_t i = 0; i < recipe.steps.size(); ++i) {
    const BuildStep& step = recipe.steps[i];
    check_step(step);
    std::string what = std::to_string(static_cast<int>(step.kind));
    for (const std::string& argument : step.arguments) {
      what += '\0' + argument;
    }
    if (step.kind == Kind::copy) {
      if (!options.files) {
        fail(ErrorCode::invalid_argument, "{}: this build has no files", describe(step));
      }
      out.archives[i] = checked_archive(options.files(step));
      what += '\0' + sha256_hex(out.archives[i]);
    }
    if (step.force || recipe.force) {  // never the name of what is there
      what += '\0' + std::to_string(Clock::now().time_since_epoch().count());
    }
    out.keys.push_back(next_key(out.keys.back(), what));
    out.defaults.push_back(after_step(out.defaults.back(), step));
  }
  out.final_key =
      next_key(out.keys.back(), recipe.start + '\0' + recipe.ready + '\0' + text_of(out.defaults.back()) +
                                    (recipe.force ? std::to_string(Clock::now().time_since_epoch().count()) : ""));
  return out;
}

std::string snapshot_of(const std::string& key) {
  return kStepPrefix + key;
}

std::set<std::string> snapshots(Runtime& runtime) {
  std::set<std::string> out;
  for (const Listing& one : runtime.list()) {
    if (one.kind == "snapshot") {
      out.insert(one.name);
    }
  }
  return out;
}

class Builder {
 public:
  Builder(Runtime& runtime, const BuildRecipe& recipe, const BuildOptions& options)
      : runtime_(runtime), recipe_(recipe), options_(options) {}

  BuildResult run() {
    need_sense();
    Defaults first;
    std::string base = recipe_.snapshot;
    Spec spec;
    spec.limits = options_.limits;
    spec.passing = true;
    if (recipe_.snapshot.empty()) {
      spec.image = recipe_.image;
      base = runtime_.build(spec);
      first = image_defaults();
    } else {
      base = base_snapshot(first);
    }
    const Plan plan = plan_of(recipe_, options_, base, first);
    const std::set<std::string> there = snapshots(runtime_);
    BuildResult result;
    if (!there.contains(snapshot_of(plan.final_key))) {
      std::size_t begin = recipe_.steps.size();
      while (begin > 0 && !there.contains(snapshot_of(plan.keys[begin]))) {
        --begin;
      }
      spec.snapshot = begin > 0 ? snapshot_of(plan.keys[begin]) : recipe_.snapshot;
      while (begin > 0 && begin < recipe_.steps.size() && !changes_files(recipe_.steps[begin])) {
        ++begin;  // what they say is in the plan
      }
      result = {.done = static_cast<int>(recipe_.steps.size() - begin), .cached = static_cast<int>(begin)};
      build(plan, begin, spec, there);
    } else {
      result.cached = static_cast<int>(recipe_.steps.size());
      log(0, "nothing has changed");
    }
    runtime_.name_snapshot(snapshot_of(plan.final_key), options_.name);
    forget_old_steps();
    return result;
  }

 private:
  void need_sense() const {
    if (options_.name.empty() || options_.name.starts_with(kStepPrefix)) {
      fail(ErrorCode::invalid_argument, "a template's name: '{}'; expected one that does not begin with '{}'",
           options_.name, kStepPrefix);
    }
    if (recipe_.image.empty() == recipe_.snapshot.empty()) {
      fail(ErrorCode::invalid_argument, "a build starts from an image or from a template; expected one of them");
    }
  }

  // What an image layout says of its processes.
  Defaults image_defaults() const {
    Defaults out;
    if (oci::is_layout(recipe_.image)) {
      const oci::ImageConfig config = oci::Layout(recipe_.image).image().config;
      out.environment = config.environment;
      out.directory = config.directory.empty() ? "" : resolve_path("/", config.directory);
    }
    return out;
  }

  // What the snapshot holds, by a name that stays when its own is given to something else.
  std::string base_snapshot(Defaults& first) {
    std::string layer;
    for (const Listing& one : runtime_.list()) {
      if (one.kind == "snapshot" && one.name == recipe_.snapshot) {
        layer = one.origin;
      }
    }
    if (layer.empty()) {
      fail(ErrorCode::not_found, "there is no template or snapshot '{}'", recipe_.snapshot);
    }
    first = runtime_.snapshot_defaults(recipe_.snapshot);
    return "layer " + layer;
  }

  void build(const Plan& plan, std::size_t begin, const Spec& spec, const std::set<std::string>& there) {
    if (!spec.snapshot.empty() && spec.snapshot != recipe_.snapshot) {
      log(0, fmt::format("{} of {} steps were done before", begin, recipe_.steps.size()));
    }
    const std::unique_ptr<Sandbox> box = runtime_.create(spec);
    box_ = box.get();
    find_shell();
    if (recipe_.snapshot.empty() && spec.snapshot.empty() && !plan.defaults[0].directory.empty()) {
      make_folder(0, plan.defaults[0]);
    }
    for (std::size_t i = begin; i < recipe_.steps.size(); ++i) {
      const int number = static_cast<int>(i) + 1;
      log(number, describe(recipe_.steps[i]));
      try {
        perform(recipe_.steps[i], number, plan.defaults[i], plan.defaults[i + 1], plan.archives[i]);
        if (changes_files(recipe_.steps[i]) && !there.contains(snapshot_of(plan.keys[i + 1]))) {
          box->snapshot(snapshot_of(plan.keys[i + 1]));
        }
      } catch (const Error& error) {
        throw BuildError(number, error.code(), fmt::format("{}: {}", describe(recipe_.steps[i]), error.what()),
                         error.remedy());
      }
    }
    try {
      start(plan.defaults.back());
      box->set_defaults(plan.defaults.back());
      box->snapshot(snapshot_of(plan.final_key));
    } catch (const Error& error) {
      throw BuildError(0, error.code(), error.what(), error.remedy());
    }
  }

  static bool changes_files(const BuildStep& step) { return step.kind != Kind::env && step.kind != Kind::user; }

  void perform(const BuildStep& step, int number, const Defaults& before, const Defaults& after,
               const std::string& archive) {
    Defaults who = before;
    if (step.kind == Kind::run) {
      if (step.arguments.size() > 1 && !step.arguments[1].empty()) {
        who.root = step.arguments[1] == "root";
      }
      expect_done(number, {shell_, "-c", step.arguments[0]}, who, "");
    } else if (step.kind == Kind::workdir) {
      make_folder(number, after);
    } else if (step.kind == Kind::copy) {
      const bool named = step.arguments.size() > 2 && !step.arguments[2].empty();
      const bool root = named ? step.arguments[2] == "root" : before.root;
      std::string to = resolve_path(before.working_directory(), step.arguments[1]);
      to += step.arguments[1].ends_with('/') && to != "/" ? "/" : "";
      who.root = true, who.directory = "/", who.environment.clear();
      expect_done(number,
                  {"/bin/sh", "-c", kCopyScript, "copy", step.arguments[0], to, root ? "0:0" : "1000:1000",
                   step.arguments.size() > 3 ? step.arguments[3] : ""},
                  who, archive);
    }
  }

  void make_folder(int number, const Defaults& wanted) {
    Defaults who;
    who.root = true, who.directory = "/";
    expect_done(number,
                {"/bin/sh", "-c", "[ -d \"$1\" ] || { mkdir -p \"$1\" && chown \"$2\" \"$1\"; }", "make",
                 wanted.directory, wanted.root ? "0:0" : "1000:1000"},
                who, "");
  }

  void find_shell() {
    ExecRequest request;
    request.argv = {"/bin/sh", "-c", "[ -x /bin/bash ]"};
    request.directory = "/";
    request.timeout = std::chrono::seconds(60);
    shell_ = box_->exec(request).exit_code == 0 ? "/bin/bash" : "/bin/sh";
  }

  ProcessRequest request_of(std::vector<std::string> argv, const Defaults& who) const {
    ProcessRequest out;
    out.argv = std::move(argv);
    out.environment = who.environment;
    out.directory = who.working_directory();
    out.root = who.root;
    return out;
  }

  void expect_done(int number, std::vector<std::string> argv, const Defaults& who, const std::string& input) {
    const int code = run_process(number, std::move(argv), who, input, Clock::now() + options_.step_patience);
    if (code != 0) {
      fail(ErrorCode::invalid_argument, "ended with code {}{}", code, last_.empty() ? "" : ": " + last_);
    }
  }

  int run_process(int number, std::vector<std::string> argv, const Defaults& who, const std::string& input,
                  Clock::time_point deadline) {
    ProcessRequest request = request_of(std::move(argv), who);
    request.open_input = !input.empty();
    const std::shared_ptr<ProcessListener> listener = box_->start(request);
    const auto bell = std::make_shared<Bell>();
    listener->on_event([bell] { bell->ring(); });
    last_.clear();
    try {
      for (std::size_t at = 0; at < input.size(); at += kInputPart) {
        need_go_on(deadline);
        box_->write_input(listener->pid(), std::string_view(input).substr(at, kInputPart));
      }
      if (!input.empty()) {
        box_->close_input(listener->pid());
      }
    } catch (const Error& error) {
      if (error.code() != ErrorCode::not_found) {  // it has ended, and says why
        throw;
      }
    }
    std::string rest;
    while (true) {
      if (const std::optional<int> code = hear(*listener, number, rest)) {
        return *code;
      }
      try {
        need_go_on(deadline);
      } catch (const Error&) {
        box_->signal(listener->pid(), SIGKILL);
        throw;
      }
      bell->wait();
    }
  }

  // What a process has told since; its exit code when it has ended.
  std::optional<int> hear(ProcessListener& listener, int number, std::string& rest) {
    while (const std::optional<ProcessEvent> event = listener.take()) {
      if (event->kind == ProcessEvent::Kind::lost) {
        fail(ErrorCode::io, "the microVM that builds has ended");
      }
      rest += event->bytes;
      const bool ended = event->kind == ProcessEvent::Kind::ended;
      say(number, rest, ended);
      if (ended) {
        return event->exit_code;
      }
    }
    return std::nullopt;
  }

  void need_go_on(Clock::time_point deadline) const {
    if (options_.stop != nullptr && *options_.stop) {
      fail(ErrorCode::exhausted, "the build was told to end");
    }
    if (Clock::now() >= deadline) {
      fail(ErrorCode::exhausted, "not done in time");
    }
  }

  // Whole lines, and at the end what is left.
  void say(int number, std::string& text, bool all) {
    for (std::size_t end = 0; (end = text.find('\n')) != std::string::npos || text.size() > 4096;) {
      const std::size_t cut = std::min({end, text.size(), std::size_t{4096}});
      log(number, text.substr(0, cut));
      text.erase(0, cut + (cut == end ? 1 : 0));
    }
    if (all && !text.empty()) {
      log(number, text);
      text.clear();
    }
  }

  void log(int number, const std::string& line) {
    if (!line.empty()) {
      last_ = line;
    }
    if (options_.log) {
      options_.log(number, line);
    }
  }

  void start(const Defaults& who) {
    if (recipe_.start.empty()) {
      return;
    }
    log(0, "START " + recipe_.start);
    const std::shared_ptr<ProcessListener> listener = box_->start(request_of({shell_, "-c", recipe_.start}, who));
    const Clock::time_point begun = Clock::now();
    const Clock::time_point deadline = begun + options_.ready_patience;
    std::string rest;
    bool ended = false;
    while (true) {
      const std::optional<int> code = hear(*listener, 0, rest);
      if (code.value_or(0) != 0) {
        fail(ErrorCode::invalid_argument, "START ended with code {}{}", *code, last_.empty() ? "" : ": " + last_);
      }
      ended = ended || code;
      if (recipe_.ready.empty() ? ended || Clock::now() >= begun + kStartWithoutReady : ready(who, deadline)) {
        return;
      }
      need_go_on(deadline);
      std::this_thread::sleep_for(kReadyEvery);
    }
  }

  bool ready(const Defaults& who, Clock::time_point deadline) {
    const int code = run_process(0, {shell_, "-c", recipe_.ready}, who, "", deadline);
    log(0, fmt::format("READY ended with code {}", code));
    return code == 0;
  }

  void forget_old_steps() {
    std::vector<std::pair<std::int64_t, std::string>> steps;
    for (const Listing& one : runtime_.list()) {
      if (one.kind == "snapshot" && one.name.starts_with(kStepPrefix)) {
        steps.emplace_back(one.created, one.name);
      }
    }
    std::sort(steps.rbegin(), steps.rend());
    for (std::size_t i = static_cast<std::size_t>(options_.kept_steps); i < steps.size(); ++i) {
      runtime_.remove_snapshot(steps[i].second);
    }
  }

  Runtime& runtime_;
  const BuildRecipe& recipe_;
  const BuildOptions& options_;
  Sandbox* box_ = nullptr;
  std::string shell_ = "/bin/sh";
  std::string last_;  // line that was told
};

}  // namespace

BuildResult build_template(Runtime& runtime, const BuildRecipe& recipe, const BuildOptions& options) {
  return Builder(runtime, recipe, options).run();
}

}  // namespace tidelock::sandbox

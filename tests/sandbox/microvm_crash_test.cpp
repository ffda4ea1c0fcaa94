// MicroVMs whose program is killed, or whose disk is full, at any step of any operation: what was is still there, or
// what was asked for is complete. Every step with TIDELOCK_SOAK, otherwise a few drawn at random.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <unistd.h>

#include <random>

#include "sandbox/microvm_support.hpp"
#include "sandbox/microvm_victim.hpp"
#include "sandbox/vm/store.hpp"
#include "sandbox/wire.hpp"

namespace tidelock::sandbox::testing {
namespace {

// What a directory says that there is.
struct View {
  std::map<std::string, std::string> boxes;  // id -> state
  std::set<std::string> snapshots;
  bool operator==(const View&) const = default;
};

View view_of(Runtime& runtime) {
  View out;
  for (const Listing& entry : runtime.list()) {
    if (entry.kind == "sandbox") {
      out.boxes[entry.name] = entry.state;
    } else if (entry.kind == "snapshot") {
      out.snapshots.insert(entry.name);
    }
  }
  return out;
}

struct Operation {
  const char* name;
  bool on_snapshot;                                                      // its subject is the snapshot `origin`
  std::function<View(const View& before, const std::string& id)> after;  // copies that it makes are called "?1", "?2"
};

View with(View view, const std::string& id, const std::string& state) {
  view.boxes[id] = state;
  return view;
}

const std::vector<Operation>& operations() {
  static const std::vector<Operation> all{
      {"create", false, [](const View& before, const std::string&) { return with(before, "?1", "running"); }},
      {"pause", false, [](const View& before, const std::string& id) { return with(before, id, "paused"); }},
      {"resume", false, [](const View& before, const std::string& id) { return with(before, id, "running"); }},
      {"checkpoint", false, [](const View& before, const std::string&) { return before; }},
      {"revert", false, [](const View& before, const std::string&) { return before; }},
      {"set-defaults", false, [](const View& before, const std::string&) { return before; }},
      {"fork", false,
       [](const View& before, const std::string&) { return with(with(before, "?1", "running"), "?2", "running"); }},
      {"snapshot", false,
       [](View before, const std::string&) {
         before.snapshots.insert("new");
         return before;
       }},
      {"name-snapshot", true,
       [](View before, const std::string&) {
         before.snapshots.insert("new");
         return before;
       }},
      {"drop-snapshot", true,
       [](View before, const std::string&) {
         before.snapshots.erase("origin");
         return before;
       }},
      {"remove", false,
       [](View before, const std::string& id) {
         before.boxes.erase(id);
         return before;
       }},
  };
  return all;
}

// `after` with the ids that `before` does not know called "?1", "?2".
View renamed(const View& after, const View& before) {
  View out{{}, after.snapshots};
  int number = 0;
  for (const auto& [id, state] : after.boxes) {
    out.boxes[before.boxes.contains(id) ? id : "?" + std::to_string(++number)] = state;
  }
  return out;
}

// A snapshot `origin` of a guest that counts.
void need_origin(const fs::path& directory) {
  const auto runtime = make_microvm_runtime(options_for(directory));
  if (!view_of(*runtime).snapshots.contains("origin")) {
    auto box = runtime->create(small());
    start_counter(*box);
    box->snapshot("origin");
  }
}

void clear() {
  const auto runtime = open_runtime();
  const View left = view_of(*runtime);
  for (const auto& [id, state] : left.boxes) {
    runtime->open(id)->remove();
  }
  for (const std::string& name : left.snapshots) {
    runtime->remove_snapshot(name);
  }
}

void expect_nothing_left() {
  EXPECT_FALSE(fs::exists(shared_directory() / "quarantine"));
  EXPECT_EQ(machines_of(shared_directory()), 0U);
  for (const char* folder : {"layers", "disks", "run", "logs"}) {
    EXPECT_TRUE(fs::is_empty(shared_directory() / folder)) << folder;
  }
}

// A sandbox that counts, with a checkpoint; paused for a resume.
std::string make_subject(const Operation& operation) {
  const auto runtime = open_runtime();
  Spec spec;
  spec.snapshot = "origin";
  const auto box = runtime->create(spec);
  box->checkpoint();
  box->keep();
  if (std::string_view(operation.name) == "resume") {
    box->pause();
  }
  return box->id();
}

// Whatever there is goes on: each sandbox counts, and each snapshot can be stood on.
void expect_everything_goes_on(Runtime& runtime, const View& view) {
  for (const auto& [id, state] : view.boxes) {
    EXPECT_TRUE(state == "running" || state == "paused") << id << " is " << state;
    const auto box = runtime.open(id);
    if (output_of(*box, "ls /root").find("log") != std::string::npos) {  // not one that was made anew
      expect_counting(*box);
    }
  }
  for (const std::string& name : view.snapshots) {
    Spec spec;
    spec.snapshot = name;
    expect_counting(*runtime.create(spec));
  }
}

// Kills `operation` at its step `number`, and the start after it at the step `start` if that is not negative. Whether
// the operation had so many steps.
bool kill_and_look(const Operation& operation, int number, int start) {
  need_origin(shared_directory());
  const std::string id = make_subject(operation);
  const View before = view_of(*open_runtime());
  const std::optional<std::string> step =
      kill_microvm_program(shared_directory(), operation.name, number, operation.on_snapshot ? "origin" : id);
  SCOPED_TRACE(fmt::format("{} killed at step {} ({}), the start after it at {}", operation.name, number,
                           step.value_or("none: it came to its end"), start));
  if (start >= 0) {
    kill_microvm_program(shared_directory(), "start", start, "");
  }
  {
    const auto runtime = open_runtime();
    const View view = view_of(*runtime), after = renamed(view, before), complete = operation.after(before, id);
    EXPECT_TRUE(after == complete || (step && after == before)) << "neither what was nor what was asked for";
    EXPECT_FALSE(fs::exists(shared_directory() / "quarantine"));
    std::size_t running = 0;
    for (const auto& [name, state] : view.boxes) {
      running += state == "running" ? 1 : 0;
    }
    EXPECT_EQ(machines_of(shared_directory()), running) << "machines that nobody owns, or that are missing";
    expect_everything_goes_on(*runtime, view);
  }
  clear();
  expect_nothing_left();
  return step.has_value();
}

// ---- what must never break

TEST(MicrovmCrash, TheProgramKilledAtAnyStepLosesNothingAndLeavesNothing) {
  open_runtime()->build(small());
  std::mt19937 random(std::random_device{}());
  int kills = 0;
  for (const Operation& operation : operations()) {
    if (soaking()) {
      for (int number = 0; kill_and_look(operation, number, number % 3 == 2 ? number / 3 : -1); ++number, ++kills) {
        ASSERT_LT(number, 100) << operation.name << " has no end";
      }
      continue;
    }
    const int number = std::uniform_int_distribution(0, 9)(random);
    kills += kill_and_look(operation, number, std::uniform_int_distribution(-3, 3)(random)) ? 1 : 0;
  }
  EXPECT_GT(kills, soaking() ? 70 : 0);
  std::printf("%d kills\n", kills);
}

// A small file system with the template in it.
class SmallDisk {
 public:
  explicit SmallDisk(const char* size) {
    open_runtime()->build(small());
    EXPECT_EQ(mount("none", folder_.path().c_str(), "tmpfs", 0, size), 0);
    const std::string templates = (shared_directory() / "templates").string();
    EXPECT_EQ(std::system(("cp -a --sparse=always " + templates + " " + folder_.path().string()).c_str()), 0);
  }
  ~SmallDisk() { EXPECT_EQ(umount2(folder_.path().c_str(), MNT_DETACH), 0); }
  SmallDisk(const SmallDisk&) = delete;
  SmallDisk& operator=(const SmallDisk&) = delete;
  const fs::path& path() const { return folder_.path(); }
  // Leaves so many bytes of it free.
  void fill(std::uintmax_t room) {
    const FileDescriptor filler(open((path() / "filler").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
    const std::uintmax_t free = fs::space(path()).available;
    EXPECT_EQ(posix_fallocate(filler.get(), 0, static_cast<off_t>(free - std::min(room, free - 4096))), 0);
  }
  void empty() { fs::remove(path() / "filler"); }

 private:
  Folder folder_;
};

TEST(MicrovmCrash, AFullDiskLeavesTheSandboxAsItWas) {
  if (geteuid() != 0) {
    GTEST_SKIP() << "needs root, for a small file system";
  }
  SmallDisk disk("size=160m");
  const auto runtime = make_microvm_runtime(options_for(disk.path()));
  auto box = runtime->create(small());
  start_counter(*box);
  output_of(*box, "head -c 12000000 /dev/urandom > /dev/shm/blob");
  disk.fill(4U << 20);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(code_of([&] { box->pause(); }), ErrorCode::exhausted);
    EXPECT_EQ(runtime->log(box->id()).back().message, "pause failed");
    expect_counting(*box);
    EXPECT_EQ(code_of([&] { box->checkpoint(); }), ErrorCode::exhausted);
    expect_counting(*box);
  }
  EXPECT_TRUE(fs::is_empty(disk.path() / "layers"));
  disk.empty();
  box->pause();
  box->resume();
  expect_counting(*box);
}

// Does `operation` with so much room, and looks at it with more. Whether it was done.
bool fill_and_look(SmallDisk& disk, const Operation& operation, std::uintmax_t room) {
  SCOPED_TRACE(fmt::format("{} with {} bytes free", operation.name, room));
  std::string id;
  bool done = true;
  need_origin(disk.path());
  {
    vm::Store store(options_for(disk.path()));
    Spec spec;
    spec.snapshot = "origin";
    id = store.create(spec);
    store.checkpoint(id);
    if (std::string_view(operation.name) == "resume") {
      store.pause(id);
    }
  }
  const View before = view_of(*make_microvm_runtime(options_for(disk.path())));
  {
    vm::Store store(options_for(disk.path()));
    disk.fill(room);
    try {
      perform(store, operation.name, operation.on_snapshot ? "origin" : id);
    } catch (const Error& error) {
      EXPECT_TRUE(error.code() == ErrorCode::exhausted || error.code() == ErrorCode::io) << error.what();
      done = false;
    }
    disk.empty();
  }
  const auto runtime = make_microvm_runtime(options_for(disk.path()));
  const View view = view_of(*runtime), after = renamed(view, before);
  EXPECT_TRUE(after == (done ? operation.after(before, id) : before)) << "done: " << done;
  EXPECT_FALSE(fs::exists(disk.path() / "quarantine"));
  expect_everything_goes_on(*runtime, view);
  for (const auto& [name, state] : view.boxes) {
    runtime->open(name)->remove();
  }
  if (view.snapshots.contains("new")) {
    runtime->remove_snapshot("new");
  }
  return done;
}

TEST(MicrovmCrash, AnyOperationOnADiskThatIsFullAtAnyWriteIsDoneOrWasNot) {
  if (geteuid() != 0) {
    GTEST_SKIP() << "needs root, for a small file system";
  }
  SmallDisk disk("size=320m");
  int failures = 0;
  for (const Operation& operation : operations()) {
    std::mt19937 random(std::random_device{}());
    std::vector<std::uintmax_t> rooms{4096ULL << std::uniform_int_distribution(0, 10)(random)};
    if (soaking()) {
      rooms.clear();
      for (std::uintmax_t room = 4096; room <= 64U << 20; room *= 2) {
        rooms.push_back(room);
      }
    }
    for (const std::uintmax_t room : rooms) {
      failures += fill_and_look(disk, operation, room) ? 0 : 1;
    }
  }
  EXPECT_GT(failures, soaking() ? 20 : 0);
  std::printf("%d operations found no room\n", failures);
}

}  // namespace
}  // namespace tidelock::sandbox::testing

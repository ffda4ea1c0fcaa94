// Checkpoints, and what is made of them: pauses, snapshots, copies. What each leaves when it fails half way is what was
// there before.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <future>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "sandbox/vm/qcow2.hpp"
#include "sandbox/vm/store.hpp"

namespace tidelock::sandbox::vm {
namespace fs = std::filesystem;
using Json = nlohmann::json;
using Clock = std::chrono::steady_clock;
namespace {

// Page layers on each other: past this a checkpoint holds all pages that differ from the template, on no other layer.
constexpr std::size_t kMaxDepth = 16;
// Disks on each other: QEMU holds three open files for each, and a guest's reads may search all of them.
constexpr std::size_t kMaxDisks = 128;
constexpr std::size_t kForkedAtOnce = 4;

// Pages on their way from a guest to a file. In large pages of the host: touching small ones would take as long as
// copying.
class Buffer {
 public:
  explicit Buffer(std::size_t bytes) : bytes_(std::max(bytes, kPage) + kLarge) {
    void* at = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) {
      fail(ErrorCode::exhausted, "no memory for {} bytes of a guest's pages", bytes);
    }
    start_ = static_cast<std::byte*>(at);
    madvise(start_, bytes_, MADV_HUGEPAGE);
    const auto address = reinterpret_cast<std::uintptr_t>(start_);
    data_ = start_ + (kLarge - address % kLarge) % kLarge;
  }
  ~Buffer() { munmap(start_, bytes_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  std::byte* data() { return data_; }
  // Makes the memory real before the guest stands still for it.
  void touch(std::size_t bytes) {
    for (std::size_t at = 0; at < std::min(bytes, bytes_ - kLarge); at += kPage) {
      data_[at] = std::byte{0};
    }
  }

 private:
  static constexpr std::size_t kLarge = 2U << 20;
  std::size_t bytes_;
  std::byte *start_, *data_;
};

void sync_path(const fs::path& path) {
  const FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file || fdatasync(file.get()) != 0) {
    fail_errno("sync", path.string());
  }
}

// A layer gets a name, with what processes get in the sandbox that it is of.
Journal::Change snapshot_change(const std::string& name, const std::string& layer, const Guest& guest) {
  return {"snapshot/" + name,
          Json{{"layer", layer}, {"created", std::time(nullptr)}, {"defaults", to_json(guest.defaults)}}};
}

}  // namespace

void need_name(const std::string& name) {
  const bool plain = !name.empty() && name.size() <= 64 && name[0] != '.' &&
                     std::all_of(name.begin(), name.end(), [](unsigned char c) {
                       return std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.' || c == ':';
                     });
  if (!plain) {
    fail(ErrorCode::invalid_argument,
         "snapshot name '{}': expected up to 64 letters, digits, '-', '_', '.' and ':', not starting with '.'", name);
  }
}

// One checkpoint of a running guest: a layer on the one it stands on. When it goes on, it writes to a new disk; when
// not, its disk is frozen as it is and the record says paused.
Guest Store::capture_running(Live& box, Guest guest, const std::string& operation, bool go_on,
                             const std::string& name) {
  const Clock::time_point began = Clock::now();
  const Template& from = known_template(guest.template_key);
  Machine& machine = *box.machine;
  if (guest.disks.size() >= kMaxDisks) {
    fail(ErrorCode::exhausted, "sandbox {}: {} disks on each other, at most {}", guest.id, guest.disks.size(),
         kMaxDisks);
  }
  if (const std::string written = machine.top_node(); written != guest.disks.back()) {
    guest.disks.push_back(written);  // from a checkpoint that could not even be noted as failed
  }
  const std::string layer = new_token('l'), disk = new_token('d'), top = guest.disks.back();
  const fs::path folder = root_ / "layers" / layer;
  std::vector<std::string> files{"layers/" + layer};
  if (go_on) {
    files.push_back("disks/" + disk);
  }
  const std::string intent = begin(operation, guest.id, files);
  bool standing = box.frozen, swapped = false;
  LayerSize size;
  const auto put_back = [&]() noexcept {  // what was before, but for the disk's new upper part, which stays
    Changes changes;
    try {
      if (standing && !box.frozen) {
        machine.go_on();
      }
    } catch (const std::exception& error) {
      spdlog::warn("sandbox {}: cannot go on: {}", guest.id, error.what());
    }
    if (swapped) {
      guest.disks.push_back(disk);
      changes.push_back({"sandbox/" + guest.id, to_json(guest)});
      files.pop_back();
    }
    abandon(intent, files, changes);
  };
  try {
    step("capture:intended");
    make_folder(folder);
    const GuestMemory memory = machine.memory();
    const std::size_t expected = memory.private_pages().size() + 256;
    Buffer buffer(memory.bytes());
    buffer.touch(expected * kPage);
    if (go_on) {
      create_overlay(root_ / "disks" / disk, from.shape.disk_bytes);
    }
    machine.stop();
    standing = true;
    step("capture:stopped");
    machine.save_devices(folder / "devices");
    step("capture:saved");
    const std::vector<std::uint32_t> pages = memory.private_pages();
    memory.read(pages, buffer.data());
    step("capture:read");
    if (go_on) {
      machine.overlay(top, {disk, root_ / "disks" / disk});
      swapped = true;
      step("capture:swapped");
      if (!box.frozen) {
        machine.go_on();
        standing = false;
        step("capture:going");
      }
    }
    std::string parent = guest.layer;
    std::vector<fs::path> below = page_files(parent);
    if (below.size() >= kMaxDepth) {
      parent.clear();
      below.clear();
    }
    size = write_layer(folder / "pages", PageChain(from.memory(), below), pages, buffer.data());
    sync_path(folder / "devices");
    sync_path(root_ / "disks" / top);
    sync_directory(folder);
    sync_directory(root_ / "layers");
    sync_directory(root_ / "disks");
    step("capture:written");
    Guest after = guest;
    after.layer = layer;
    if (go_on) {
      after.disks.push_back(disk);
    } else {
      after.state = "paused";
      after.run.clear();
      after.process = {};
    }
    Changes changes{{"layer/" + layer, Json{{"parent", parent},
                                            {"template", guest.template_key},
                                            {"disks", guest.disks},
                                            {"pages", size.pages},
                                            {"bytes", size.file_bytes},
                                            {"devices_sha256", sha256_hex(read_file(folder / "devices"))},
                                            {"created", std::time(nullptr)}}},
                    {"sandbox/" + guest.id, to_json(after)},
                    {intent, std::nullopt}};
    if (!name.empty()) {
      changes.push_back(snapshot_change(name, layer, guest));
    }
    commit(changes);
    guest = after;
  } catch (const std::exception& error) {
    put_back();
    tell(guest.id, operation + " failed", {{"reason", error.what()}}, LogLevel::error);
    throw;
  }
  step("capture:committed");
  Texts fields{{"seconds", fmt::format("{:.3f}", seconds_since(began))},
               {"layer", guest.layer},
               {"pages", std::to_string(size.pages)}};
  if (!name.empty()) {
    fields["name"] = name;
  }
  tell(guest.id, operation == "fork" ? "checkpoint for copies done" : operation + " done", std::move(fields));
  return guest;
}

void Store::capture(const std::string& id, const std::string& operation, const std::string& name) {
  if (operation == "snapshot") {
    need_name(name);
    const std::lock_guard lock(mutex_);
    if (journal_->find("snapshot/" + name) != nullptr) {
      fail(ErrorCode::invalid_argument, "there is a snapshot '{}' already; remove it first", name);
    }
  }
  const std::shared_ptr<Live> box = live(id);
  const std::lock_guard busy(box->busy);
  const Guest guest = find(id);
  if (guest.state == "paused") {
    if (!name.empty()) {
      commit({snapshot_change(name, guest.layer, guest)});
      tell(id, "snapshot done", {{"name", name}, {"layer", guest.layer}});
    }
    return;  // a paused sandbox is its own checkpoint
  }
  ensure_running(*box, id);
  capture_running(*box, guest, operation, true, name);
}

void Store::pause(const std::string& id) {
  const std::shared_ptr<Live> box = live(id);
  const std::lock_guard busy(box->busy);
  const Guest guest = find(id);
  if (guest.state == "paused") {
    fail(ErrorCode::invalid_argument, "sandbox {} is paused already", id);
  }
  ensure_running(*box, id);
  capture_running(*box, guest, "pause", false, "");
  box->agent.close();
  box->frozen = false;
  retire(std::move(box->machine));
}

std::vector<std::string> Store::fork(const std::string& id, int count) {
  if (count < 1 || count > 100) {
    fail(ErrorCode::invalid_argument, "fork {} times: expected 1 to 100", count);
  }
  const std::shared_ptr<Live> box = live(id);
  const std::lock_guard busy(box->busy);
  Guest source = find(id);
  if (source.state != "paused") {
    ensure_running(*box, id);
    source = capture_running(*box, source, "fork", true, "");
  }
  std::vector<Guest> children(static_cast<std::size_t>(count), source);
  std::vector<std::string> files, ids;
  for (Guest& child : children) {
    child.id = new_token('v');
    child.created = std::time(nullptr);
    stand_on(child, source.layer);
    child.disks.push_back(new_token('d'));
    files.push_back("disks/" + child.disks.back());
    ids.push_back(child.id);
  }
  const std::string intent = begin("fork", id, files);
  std::vector<std::unique_ptr<Machine>> machines(children.size());
  std::vector<Channel> agents(children.size());
  try {
    Changes changes{{intent, std::nullopt}};
    std::vector<std::future<void>> waking;
    for (std::size_t i = 0; i < children.size(); ++i) {
      waking.push_back(std::async(i % kForkedAtOnce == 0 ? std::launch::deferred : std::launch::async, [&, i] {
        create_overlay(root_ / files[i], known_template(children[i].template_key).shape.disk_bytes);
        machines[i] = wake(children[i], agents[i]);
        step("fork:awake");
      }));
      if (i % kForkedAtOnce == 0 || i + 1 == children.size()) {
        for (const std::future<void>& one : waking) {
          one.wait();  // all have ended before one's failure is told
        }
      }
    }
    for (std::size_t i = 0; i < children.size(); ++i) {
      waking[i].get();
      Guest& child = children[i];
      child.state = "running";
      child.run = machines[i]->folder().filename();
      child.process = machines[i]->process();
      changes.push_back({"sandbox/" + child.id, to_json(child)});
    }
    commit(changes);  // all or none
  } catch (const std::exception& error) {
    for (std::unique_ptr<Machine>& machine : machines) {
      retire(std::move(machine));
    }
    abandon(intent, files);
    tell(id, "fork failed", {{"reason", error.what()}}, LogLevel::error);
    throw;
  }
  step("fork:committed");
  for (std::size_t i = 0; i < children.size(); ++i) {
    tell(id, "fork done", {{"copy", children[i].id}});
    tell(children[i].id, "create done", {{"copy of", id}, {"layer", source.layer}});
    const std::shared_ptr<Live> child = live(children[i].id);
    child->machine = std::move(machines[i]);
    child->agent = std::move(agents[i]);
  }
  return ids;
}

}  // namespace tidelock::sandbox::vm

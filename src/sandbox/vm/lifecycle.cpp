// The operations: intent, act, commit. What each leaves when it fails half way is what was there before.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <future>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "sandbox/vm/qcow2.hpp"
#include "sandbox/vm/store.hpp"

namespace tidelock::sandbox::vm {
namespace fs = std::filesystem;
using Json = nlohmann::json;
namespace {

constexpr std::chrono::seconds kAgentPatience{30};
// Page layers on each other: past this a checkpoint holds all pages that differ from the template, on no other layer.
constexpr std::size_t kMaxDepth = 16;
// Disks on each other: QEMU holds three open files for each, and a guest's reads may search all of them.
constexpr std::size_t kMaxDisks = 128;
constexpr std::size_t kForkedAtOnce = 4;
constexpr uid_t kFirstUser = 0x50000000;  // of QEMU processes; beside those of containers, far above real ones

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

void need_name(const std::string& name) {
  const bool plain = !name.empty() && name.size() <= 64 && name[0] != '.' &&
                     std::all_of(name.begin(), name.end(), [](unsigned char c) {
                       return std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.';
                     });
  if (!plain) {
    fail(ErrorCode::invalid_argument,
         "snapshot name '{}': expected up to 64 letters, digits, '-', '_' and '.', not starting with '.'", name);
  }
}

}  // namespace

Template& Store::known_template(const std::string& key) {
  const std::lock_guard lock(mutex_);
  auto found = templates_.find(key);
  if (found == templates_.end()) {
    found = templates_.emplace(key, open_template(key, root_ / "templates", emulator_)).first;
  }
  return found->second;
}

Template Store::template_for(const Spec& spec) {
  if (spec.limits.cpus != 1.0) {
    fail(ErrorCode::not_supported, "a microVM has one processor, which is not divided: cpus = {}, expected 1",
         spec.limits.cpus);
  }
  const std::lock_guard lock(building_);  // the second who wants the same waits for it
  std::string& built = built_[fmt::format("{} {} {}", spec.limits.memory_bytes, spec.limits.disk_bytes, spec.image)];
  if (!built.empty()) {
    return known_template(built);
  }
  const std::string name = new_token('t');
  const fs::path work = root_ / "run" / name;
  const Launcher launcher{emulator_, directory_id_, geteuid() == 0 ? kFirstUser : 0};
  try {
    Template out = ensure_template({spec.image, spec.limits.memory_bytes, spec.limits.disk_bytes, options_.accelerator},
                                   root_ / "templates", work, launcher);
    const std::lock_guard guard(mutex_);
    templates_.insert_or_assign(out.key, out);
    built = out.key;
    return out;
  } catch (const Error&) {
    std::error_code none;
    fs::remove_all(work, none);
    throw;
  }
}

Pool& Store::pool(const Template& of) {
  const std::lock_guard lock(mutex_);
  std::unique_ptr<Pool>& out = pools_[of.key];
  if (out == nullptr) {
    out = std::make_unique<Pool>(options_.pool, [this, of] { return start_copy(of); });
  }
  return *out;
}

void Store::await_pool() {
  std::vector<Pool*> all;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [key, one] : pools_) {
      all.push_back(one.get());
    }
  }
  for (Pool* one : all) {
    one->await_full();
  }
}

std::unique_ptr<Machine> Store::start_copy(const Template& from) {
  const std::string name = new_token('r');
  const fs::path folder = root_ / "run" / name;
  fs::create_directory(folder);
  LaunchPlan plan;
  plan.emulator = emulator_;
  plan.shape = from.shape;
  plan.name = "tidelock-" + directory_id_ + "-" + name;
  plan.folder = folder;
  plan.memory = from.memory();
  // Its own user: no such process can signal or look into another, or open what another made.
  plan.user =
      geteuid() == 0 ? kFirstUser + 1 + static_cast<uid_t>(std::stoull(name.substr(1), nullptr, 16) % 0xFFFFFFU) : 0;
  std::unique_ptr<Machine> machine;
  try {
    machine = Machine::launch(plan);
    machine->prepare(from.disk());
    return machine;
  } catch (const Error&) {
    if (machine != nullptr) {
      machine->end();
    }
    std::error_code none;
    fs::remove_all(folder, none);
    throw;
  }
}

void Store::retire(std::unique_ptr<Machine> machine) noexcept {
  if (machine == nullptr) {
    return;
  }
  try {
    machine->end();
    fs::remove_all(machine->folder());
  } catch (const std::exception& error) {
    spdlog::warn("sandbox: {}", error.what());
  }
}

// A process with the guest's memory, devices and disks, running, its agent greeted. Nothing is recorded yet.
std::unique_ptr<Machine> Store::wake(const Guest& guest, Channel& agent) {
  const Template& from = known_template(guest.template_key);
  if (!admits(available_memory(), from.shape.memory_bytes, kReserveBytes)) {
    throw Error(ErrorCode::exhausted,
                fmt::format("sandbox {}: its guest may grow to {} MiB, and {} MiB of {} MiB available must stay free",
                            guest.id, from.shape.memory_bytes >> 20, kReserveBytes >> 20, available_memory() >> 20),
                "pause or remove other sandboxes");
  }
  fs::path devices = from.devices();
  std::vector<fs::path> layers;
  if (!guest.layer.empty()) {
    devices = root_ / "layers" / guest.layer / "devices";
    layers = page_files(guest.layer);
    const std::lock_guard lock(mutex_);
    const Json* record = journal_->find("layer/" + guest.layer);
    if (record == nullptr || sha256_hex(read_file(devices, 64U << 20)) != record->value("devices_sha256", "")) {
      fail(ErrorCode::corrupt_data, "{}: its checksum is not the one recorded", devices.string());
    }
  }
  std::unique_ptr<Machine> machine = pool(from).take();
  try {
    // The pages go in beside the monitor's work: neither waits for the other.
    std::future<void> pages = std::async(std::launch::async, [&] {
      if (!layers.empty()) {
        const PageChain chain(from.memory(), layers);
        std::vector<std::uint32_t> numbers;
        std::vector<const std::byte*> contents;
        chain.newest(numbers, contents);
        machine->memory().write(numbers, contents);
      }
    });
    std::vector<DiskFile> disks;
    for (const std::string& disk : guest.disks) {
      disks.push_back({disk, root_ / "disks" / disk});
    }
    machine->add_disks(from.disk().node, disks);
    machine->attach(disks.back().node);
    pages.get();
    machine->load_devices(devices);
    machine->go_on();
    step("wake:running");
    agent.wake(machine->agent_socket(), kAgentPatience);
    return machine;
  } catch (const Error&) {
    retire(std::move(machine));
    throw;
  }
}

// Sets the guest on a layer: its disks, and the template that the layer came from.
void Store::stand_on(Guest& guest, const std::string& layer) {
  const std::lock_guard lock(mutex_);
  guest.layer = layer;
  guest.disks.clear();
  if (layer.empty()) {
    return;
  }
  const Json* record = journal_->find("layer/" + layer);
  if (record == nullptr) {
    fail(ErrorCode::corrupt_data, "sandbox {}: no record of its layer {}", guest.id, layer);
  }
  guest.disks = strings(*record, "disks");
  guest.template_key = record->value("template", "");
}

// From what `guest` stands on to a running process; `box` may hold an older one, which ends when the new one counts.
void Store::start(Live& box, Guest guest, const std::string& operation) {
  const std::string disk = new_token('d');
  const std::vector<std::string> files{"disks/" + disk};
  const std::string intent = begin(operation, guest.id, files);
  std::unique_ptr<Machine> machine;
  Channel agent;
  try {
    step("start:intended");
    create_overlay(root_ / files[0], known_template(guest.template_key).shape.disk_bytes);
    guest.disks.push_back(disk);
    machine = wake(guest, agent);
    step("start:awake");
    guest.state = "running";
    guest.run = machine->folder().filename();
    guest.process = machine->process();
    commit({{"sandbox/" + guest.id, to_json(guest)}, {intent, std::nullopt}});
  } catch (const Error&) {
    retire(std::move(machine));
    abandon(intent, files);
    throw;
  }
  step("start:committed");
  std::swap(box.machine, machine);
  box.agent = std::move(agent);
  box.frozen = false;
  retire(std::move(machine));
}

std::string Store::create(const Spec& spec) {
  Guest guest;
  guest.id = new_token('v');
  guest.created = std::time(nullptr);
  guest.processes = spec.limits.processes;
  if (spec.snapshot.empty()) {
    guest.template_key = template_for(spec).key;
  } else {
    const std::lock_guard lock(mutex_);
    const Json* record = journal_->find("snapshot/" + spec.snapshot);
    if (record == nullptr) {
      fail(ErrorCode::not_found, "no snapshot '{}' in {}", spec.snapshot, root_.string());
    }
    stand_on(guest, record->value("layer", ""));
  }
  const std::shared_ptr<Live> box = live(guest.id);
  const std::lock_guard busy(box->busy);
  start(*box, guest, "create");
  return guest.id;
}

void Store::lose(Live& box, Guest guest) {
  retire(std::move(box.machine));
  box.agent.close();
  guest.state = "lost";
  commit({{"sandbox/" + guest.id, to_json(guest)}});
  throw Error(ErrorCode::io, fmt::format("sandbox {}: its QEMU process has ended", guest.id),
              guest.layer.empty() ? "it has no checkpoint: remove it" : "go back to its last checkpoint with revert");
}

void Store::ensure_running(Live& box, const std::string& id) {
  Guest guest = find(id);
  if (guest.state == "paused") {
    stand_on(guest, guest.layer);
    start(box, guest, "resume");
    return;
  }
  if (guest.state == "lost" || box.machine == nullptr || !box.machine->alive()) {
    lose(box, guest);
  }
}

void Store::resume(const std::string& id) {
  const std::shared_ptr<Live> box = live(id);
  const std::lock_guard busy(box->busy);
  const Guest guest = find(id);
  if (guest.state == "running") {
    fail(ErrorCode::invalid_argument, "sandbox {} is running; only a paused one can be resumed", id);
  }
  ensure_running(*box, id);
}

void Store::set_frozen(const std::string& id, bool frozen) {
  const std::shared_ptr<Live> box = live(id);
  const std::lock_guard busy(box->busy);
  if (frozen || find(id).state == "running") {
    ensure_running(*box, id);
    frozen ? box->machine->stop() : box->machine->go_on();
    box->frozen = frozen;
  }
}

ExecResult Store::run(const std::string& id, const GuestRequest& request, const ExecRequest& io) {
  const std::shared_ptr<Live> box = live(id);
  const std::lock_guard busy(box->busy);
  ensure_running(*box, id);
  GuestRequest limited = request;
  limited.processes = static_cast<std::uint32_t>(find(id).processes);
  if (box->frozen) {
    box->machine->go_on();
    box->frozen = false;
  }
  try {
    if (!box->agent.connected()) {
      const std::string status = box->machine->status();
      if (status == "io-error" || status == "paused") {  // a full disk may have room by now; a freezer may be gone
        box->machine->go_on();
      }
      box->agent.open(box->machine->agent_socket(), kAgentPatience);
    }
    return box->agent.run(limited, io);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::io) {
      box->agent.close();
      if (!box->machine->alive()) {
        lose(*box, find(id));
      }
      if (box->machine->status() == "io-error") {
        throw Error(ErrorCode::exhausted, fmt::format("sandbox {} stands still: the host's disk is full", id),
                    "make room, then use it again: it goes on where it stopped");
      }
    }
    throw;
  }
}

// One checkpoint of a running guest: a layer on the one it stands on. When it goes on, it writes to a new disk; when
// not, its disk is frozen as it is and the record says paused.
Guest Store::capture_running(Live& box, Guest guest, const std::string& operation, bool go_on,
                             const std::string& name) {
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
    fs::create_directory(folder);
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
    const LayerSize size = write_layer(folder / "pages", PageChain(from.memory(), below), pages, buffer.data());
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
      changes.push_back({"snapshot/" + name, Json{{"layer", layer}, {"created", std::time(nullptr)}}});
    }
    commit(changes);
    guest = after;
  } catch (const std::exception&) {
    put_back();
    throw;
  }
  step("capture:committed");
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
      commit({{"snapshot/" + name, Json{{"layer", guest.layer}, {"created", std::time(nullptr)}}}});
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
  } catch (const Error&) {
    for (std::unique_ptr<Machine>& machine : machines) {
      retire(std::move(machine));
    }
    abandon(intent, files);
    throw;
  }
  step("fork:committed");
  for (std::size_t i = 0; i < children.size(); ++i) {
    const std::shared_ptr<Live> child = live(children[i].id);
    child->machine = std::move(machines[i]);
    child->agent = std::move(agents[i]);
  }
  return ids;
}

void Store::revert(const std::string& id, const std::string& snapshot) {
  const std::shared_ptr<Live> box = live(id);
  const std::lock_guard busy(box->busy);
  Guest guest = find(id);
  std::string layer = guest.layer;
  if (!snapshot.empty()) {
    const std::lock_guard lock(mutex_);
    const Json* record = journal_->find("snapshot/" + snapshot);
    if (record == nullptr) {
      fail(ErrorCode::not_found, "no snapshot '{}' in {}", snapshot, root_.string());
    }
    layer = record->value("layer", "");
  }
  if (layer.empty()) {
    fail(ErrorCode::not_found, "sandbox {} has no checkpoint to go back to", id);
  }
  stand_on(guest, layer);
  start(*box, guest, "revert");
}

void Store::remove(const std::string& id) {
  const std::shared_ptr<Live> box = live(id);
  const std::lock_guard busy(box->busy);
  find(id);
  commit({{"sandbox/" + id, std::nullopt}});
  step("remove:committed");
  box->agent.close();
  retire(std::move(box->machine));
  const std::lock_guard lock(mutex_);
  live_.erase(id);
}

void Store::remove_snapshot(const std::string& name) {
  const std::lock_guard lock(mutex_);
  if (journal_->find("snapshot/" + name) == nullptr) {
    fail(ErrorCode::not_found, "no snapshot '{}' in {}", name, root_.string());
  }
  commit({{"snapshot/" + name, std::nullopt}});
}

}  // namespace tidelock::sandbox::vm

// Starting and ending: intent, act, commit. What each leaves when it fails half way is what was there before.

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <future>
#include <thread>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "sandbox/oci/layout.hpp"
#include "sandbox/vm/qcow2.hpp"
#include "sandbox/vm/store.hpp"

namespace tidelock::sandbox::vm {
namespace fs = std::filesystem;
using Json = nlohmann::json;
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::seconds kAgentPatience{30};
constexpr uid_t kFirstUser = 0x50000000;  // of QEMU processes; beside those of containers, far above real ones

}  // namespace

Template& Store::known_template(const std::string& key) {
  const std::lock_guard lock(mutex_);
  auto found = templates_.find(key);
  if (found == templates_.end()) {
    found = templates_.emplace(key, open_template(key, root_ / "templates", emulator_)).first;
  }
  return found->second;
}

// An image layout is named by its content. To find that in an archive takes a look at the whole file: again only when
// it is another one.
std::string Store::content_name(const std::string& image) {
  if (!oci::is_layout(image)) {
    return image;
  }
  struct stat info {};
  if (::stat(image.c_str(), &info) != 0 || !S_ISREG(info.st_mode)) {
    return oci::Layout(image).image().digest;
  }
  const std::string file =
      fmt::format("{} {} {} {}.{:09} {}.{:09}", info.st_dev, info.st_ino, info.st_size, info.st_mtim.tv_sec,
                  info.st_mtim.tv_nsec, info.st_ctim.tv_sec, info.st_ctim.tv_nsec);
  KnownArchive& known = archives_[image];
  if (known.file != file) {
    known = {file, oci::Layout(image).image().digest};
  }
  return known.digest;
}

Template Store::template_for(const Spec& spec) {
  if (spec.limits.cpus != 1.0) {
    fail(ErrorCode::not_supported, "a microVM has one processor, which is not divided: cpus = {}, expected 1",
         spec.limits.cpus);
  }
  const std::lock_guard lock(building_);  // the second who wants the same waits for it
  std::string& built =
      built_[fmt::format("{} {} {}", spec.limits.memory_bytes, spec.limits.disk_bytes, content_name(spec.image))];
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
  } catch (const fs::filesystem_error& error) {
    std::error_code none;
    fs::remove_all(work, none);
    const bool full = error.code() == std::errc::no_space_on_device;
    fail(full ? ErrorCode::exhausted : ErrorCode::io, "building a template: {}", error.what());
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
  make_folder(folder);
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
  } catch (const std::exception&) {
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
  } catch (const std::exception&) {
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
  const Clock::time_point began = Clock::now();
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
  } catch (const std::exception& error) {
    retire(std::move(machine));
    abandon(intent, files);
    tell(guest.id, operation + " failed", {{"reason", error.what()}}, LogLevel::error);
    throw;
  }
  step("start:committed");
  Texts fields{{"seconds", fmt::format("{:.3f}", seconds_since(began))}, {"template", guest.template_key}};
  if (!guest.layer.empty()) {
    fields["layer"] = guest.layer;
  }
  tell(guest.id, operation + " done", std::move(fields));
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
  guest.passing = spec.passing;
  if (spec.snapshot.empty()) {
    guest.template_key = template_for(spec).key;
  } else {
    const std::lock_guard lock(mutex_);
    stand_on(guest, snapshot_record(spec.snapshot).value("layer", ""));
    guest.defaults = snapshot_defaults(spec.snapshot);
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
  tell(guest.id, "its QEMU process has ended", {{"layer", guest.layer}}, LogLevel::error);
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

// Under box.busy: the guest runs, its agent is connected, and what breaks on the way is told apart.
template <typename Act>
auto Store::with_agent(Live& box, const std::string& id, Act act) {
  ensure_running(box, id);
  if (box.frozen) {
    box.machine->go_on();
    box.frozen = false;
  }
  try {
    if (!box.agent.connected()) {
      const std::string status = box.machine->status();
      if (status == "io-error" || status == "paused") {  // a full disk may have room by now; a freezer may be gone
        box.machine->go_on();
      }
      box.agent.open(box.machine->agent_socket(), kAgentPatience);
    }
    return act(box.agent);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::io) {
      box.agent.close();
      // A process that is ending closes its connections a moment before it is gone.
      for (int look = 0; look < 100 && box.machine->alive(); ++look) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
      if (!box.machine->alive()) {
        lose(box, find(id));
      }
      if (box.machine->status() == "io-error") {
        throw Error(ErrorCode::exhausted, fmt::format("sandbox {} stands still: the host's disk is full", id),
                    "make room, then use it again: it goes on where it stopped");
      }
    }
    throw;
  }
}

ExecResult Store::run(const std::string& id, const GuestRequest& request, const ExecRequest& io) {
  const std::shared_ptr<Live> box = live(id);
  const std::lock_guard busy(box->busy);
  GuestRequest limited = request;
  limited.processes = static_cast<std::uint32_t>(find(id).processes);
  return with_agent(*box, id, [&](Channel& agent) { return agent.run(limited, io); });
}

std::shared_ptr<Link> Store::link(const std::string& id) {
  const std::shared_ptr<Live> box = live(id);
  const std::lock_guard busy(box->busy);
  return with_agent(*box, id, [](Channel& agent) { return agent.link(); });
}

void Store::revert(const std::string& id, const std::string& snapshot) {
  const std::shared_ptr<Live> box = live(id);
  const std::lock_guard busy(box->busy);
  Guest guest = find(id);
  std::string layer = guest.layer;
  if (!snapshot.empty()) {
    const std::lock_guard lock(mutex_);
    layer = snapshot_record(snapshot).value("layer", "");
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
  events_->remove(id);
  const std::lock_guard lock(mutex_);
  live_.erase(id);
}

void Store::remove_snapshot(const std::string& name) {
  const std::lock_guard lock(mutex_);
  snapshot_record(name);
  commit({{"snapshot/" + name, std::nullopt}});
}

const Json& Store::snapshot_record(const std::string& name) const {
  const Json* record = journal_->find("snapshot/" + name);
  if (record == nullptr) {
    fail(ErrorCode::not_found, "no snapshot '{}' in {}", name, root_.string());
  }
  return *record;
}

Defaults Store::snapshot_defaults(const std::string& name) {
  const std::lock_guard lock(mutex_);
  try {
    return parse_defaults(snapshot_record(name));
  } catch (const Json::exception& error) {
    fail(ErrorCode::corrupt_data, "snapshot '{}': its record cannot be read: {}", name, error.what());
  }
}

void Store::name_snapshot(const std::string& existing, const std::string& name) {
  need_name(name);
  const std::lock_guard lock(mutex_);
  Json copy = snapshot_record(existing);
  copy["created"] = std::time(nullptr);
  commit({{"snapshot/" + name, std::move(copy)}});
}

void Store::set_defaults(const std::string& id, const Defaults& defaults) {
  const std::shared_ptr<Live> box = live(id);
  const std::lock_guard busy(box->busy);
  Guest guest = find(id);
  guest.defaults = defaults;
  commit({{"sandbox/" + id, to_json(guest)}});
}

}  // namespace tidelock::sandbox::vm

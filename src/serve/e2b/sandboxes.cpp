#include "serve/e2b/sandboxes.hpp"

#include <algorithm>

#include "base/base.hpp"
#include "sandbox/build/builder.hpp"
#include "serve/api_error.hpp"
#include "serve/e2b/text.hpp"

namespace tidelock::serve::e2b {
namespace {

ApiError unknown(const std::string& id) {
  return {404, "", fmt::format("sandbox {} was not found", id)};
}
// What a client's health check takes for "it does not run".
ApiError not_running(const std::string& id, const char* why) {
  return {502, "", fmt::format("the sandbox was not found: {}", why), id};
}

}  // namespace

Sandboxes::Sandboxes(std::unique_ptr<sandbox::Runtime> runtime, SandboxesOptions options)
    : runtime_(std::move(runtime)),
      options_(std::move(options)),
      sandbox_records_(options_.directory / "e2b/sandboxes", options_.directory / "e2b/quarantine"),
      snapshot_records_(options_.directory / "e2b/snapshots", options_.directory / "e2b/quarantine") {
  adopt();
}

SandboxRecord Sandboxes::blank(const std::string& id) const {
  SandboxRecord out;
  out.id = id;
  out.started = options_.now();
  out.ends = out.started + out.timeout * 1000;
  out.memory_mib = options_.memory_mib, out.disk_mib = options_.disk_mib;
  return out;
}

void Sandboxes::adopt() {
  std::map<std::string, SandboxRecord> records;
  for (const Json& json : sandbox_records_.load())
    if (const auto record = parse_sandbox(json)) records[record->id] = *record;
  std::map<std::string, SnapshotRecord> snapshots;
  for (const Json& json : snapshot_records_.load())
    if (const auto record = parse_snapshot(json)) snapshots[record->name] = *record;
  for (const sandbox::Listing& found : runtime_->list()) {
    if (found.kind == "snapshot") {
      if (found.name.starts_with(sandbox::kStepPrefix)) continue;  // of builds
      const auto known = snapshots.find(found.name);
      snapshots_[found.name] =
          known != snapshots.end()
              ? known->second
              : SnapshotRecord{found.name, "", "base", found.created * 1000, options_.memory_mib, options_.disk_mib};
    } else if (found.kind == "sandbox" && (found.state == "running" || found.state == "paused")) {
      const auto known = records.find(found.name);
      SandboxRecord record = blank(found.name);
      record.template_id = "base";
      record.auto_pause = true;
      if (known != records.end()) record = known->second;
      put(record, found.state == "running" ? State::running : State::paused);
      note(found.name, "found at a start of the server", {{"state", found.state}});
      records.erase(found.name);
    } else if (found.kind == "sandbox") {
      spdlog::warn("sandbox {} is {}: clients are told that it does not exist", found.name, found.state);
      records.erase(found.name);
    }
  }
  for (const auto& [id, record] : records) sandbox_records_.remove(id);
}

std::shared_ptr<Sandboxes::Entry> Sandboxes::entry(const std::string& id) {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(id);
  if (found == entries_.end()) throw unknown(id);
  return found->second;
}

Sandboxes::Held Sandboxes::alone(Entry& entry, const std::string& id) {
  Held held(entry.life);
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(id);
  if (found == entries_.end() || found->second.get() != &entry) throw unknown(id);
  return held;
}

void Sandboxes::put(const SandboxRecord& record, State state) {
  const std::lock_guard lock(mutex_);
  sandbox_records_.save(record.id, to_json(record));
  std::shared_ptr<Entry>& entry = entries_[record.id];
  if (entry == nullptr) entry = std::make_shared<Entry>();
  entry->record = record;
  entry->state = state;
}

void Sandboxes::drop(const std::string& id) {
  const std::lock_guard lock(mutex_);
  entries_.erase(id);
  sandbox_records_.remove(id);
}

SandboxRecord Sandboxes::create(const NewSandbox& wanted) {
  sandbox::Spec spec;
  SandboxRecord record = blank("");
  {
    const std::lock_guard lock(mutex_);
    std::string name = wanted.template_id;
    if (name.ends_with(":default")) name.resize(name.find(':'));
    const auto image = options_.templates.find(name);
    const auto snapshot = snapshots_.find(name);
    if (image == options_.templates.end() && snapshot == snapshots_.end())
      throw ApiError(404, "", fmt::format("there is no template or snapshot '{}'", wanted.template_id.substr(0, 100)));
    if (image != options_.templates.end()) {
      spec.image = image->second;
    } else {
      spec.snapshot = snapshot->first;
      record.memory_mib = snapshot->second.memory_mib, record.disk_mib = snapshot->second.disk_mib;
    }
  }
  spec.limits.memory_bytes = static_cast<std::uint64_t>(record.memory_mib) << 20;
  spec.limits.disk_bytes = static_cast<std::uint64_t>(record.disk_mib) << 20;
  spec.limits.processes = options_.processes;
  const std::unique_ptr<sandbox::Sandbox> box = runtime_->create(spec);
  record.id = box->id();
  record.template_id = wanted.template_id;
  record.token = wanted.secure ? random_hex(20) : "";
  record.metadata = wanted.metadata, record.environment = wanted.environment;
  record.started = options_.now();
  record.timeout = wanted.timeout;
  record.ends = record.started + wanted.timeout * 1000;
  record.auto_pause = wanted.auto_pause, record.auto_resume = wanted.auto_resume;
  put(record, State::running);
  box->keep();  // only now: without a record it goes
  return record;
}

ListItem Sandboxes::get(const std::string& id) {
  const std::shared_ptr<Entry> found = entry(id);
  const std::lock_guard lock(mutex_);
  return {found->record, found->state};
}

std::vector<ListItem> Sandboxes::all() {
  const std::lock_guard lock(mutex_);
  std::vector<ListItem> out;
  for (const auto& [id, entry] : entries_) out.push_back({entry->record, entry->state});
  return out;
}

std::optional<SandboxRecord> Sandboxes::find(const std::string& id) {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(id);
  return found == entries_.end() ? std::nullopt : std::optional(found->second->record);
}

std::vector<sandbox::LogEntry> Sandboxes::log(const std::string& id) {
  entry(id);
  return runtime_->log(id);
}

void Sandboxes::note(const std::string& id, const std::string& message,
                     const std::map<std::string, std::string>& fields) {
  runtime_->note(id, {.message = message, .fields = fields});
}

void Sandboxes::kill(const std::string& id) {
  const std::shared_ptr<Entry> found = entry(id);
  const Held held = alone(*found, id);
  runtime_->open(id)->remove();
  drop(id);
}

void Sandboxes::pause(const std::string& id) {
  const std::shared_ptr<Entry> found = entry(id);
  const Held held = alone(*found, id);
  if (found->state == State::paused) throw ApiError(409, "", fmt::format("sandbox {} is paused already", id));
  runtime_->open(id)->pause();
  put(get(id).record, State::paused);
}

// With the sandbox's life held.
void Sandboxes::resume(const std::string& id, std::int64_t timeout) {
  runtime_->open(id)->resume();
  SandboxRecord record = get(id).record;
  record.timeout = timeout;
  record.ends = options_.now() + timeout * 1000;
  put(record, State::running);
}

Sandboxes::Resumed Sandboxes::connect(const std::string& id, std::int64_t timeout) {
  const std::shared_ptr<Entry> found = entry(id);
  const Held held = alone(*found, id);
  const bool paused = found->state == State::paused;
  if (paused) {
    resume(id, timeout);
  } else {
    set_timeout(id, timeout, true);
  }
  return {get(id).record, paused};
}

void Sandboxes::set_timeout(const std::string& id, std::int64_t seconds, bool only_longer) {
  const std::shared_ptr<Entry> found = entry(id);
  const std::lock_guard lock(mutex_);
  SandboxRecord record = found->record;
  const std::int64_t ends = options_.now() + seconds * 1000;
  if (only_longer && ends <= record.ends) return;
  record.timeout = seconds;
  record.ends = ends;
  sandbox_records_.save(id, to_json(record));
  found->record = record;
}

std::vector<SandboxRecord> Sandboxes::fork(const std::string& id, int count, std::int64_t timeout) {
  const std::shared_ptr<Entry> found = entry(id);
  const Held held = alone(*found, id);
  const SandboxRecord source = get(id).record;
  std::vector<SandboxRecord> out;
  for (const std::unique_ptr<sandbox::Sandbox>& box : runtime_->open(id)->fork(count)) {
    SandboxRecord record = source;
    record.id = box->id();
    record.token = record.token.empty() ? "" : random_hex(20);
    record.started = options_.now();
    record.timeout = timeout;
    record.ends = record.started + timeout * 1000;
    put(record, State::running);
    box->keep();
    out.push_back(record);
  }
  return out;
}

SnapshotRecord Sandboxes::snapshot(const std::string& id, const std::string& name) {
  const std::shared_ptr<Entry> found = entry(id);
  const Held held = alone(*found, id);
  const SandboxRecord source = get(id).record;
  SnapshotRecord record{name.empty() ? "snapshot-" + random_hex(8) : name,
                        id,
                        source.template_id,
                        options_.now(),
                        source.memory_mib,
                        source.disk_mib};
  {
    const std::lock_guard lock(mutex_);
    if (snapshots_.contains(record.name) || options_.templates.contains(record.name))
      throw ApiError(409, "", fmt::format("there is a snapshot or template '{}' already", record.name));
  }
  runtime_->open(id)->snapshot(record.name);
  const std::lock_guard lock(mutex_);
  snapshot_records_.save(record.name, to_json(record));
  snapshots_[record.name] = record;
  return record;
}

std::vector<SnapshotRecord> Sandboxes::snapshots() {
  const std::lock_guard lock(mutex_);
  std::vector<SnapshotRecord> out;
  for (const auto& [name, record] : snapshots_)
    if (record.build_id.empty()) out.push_back(record);
  return out;
}

std::vector<SnapshotRecord> Sandboxes::templates() {
  const std::lock_guard lock(mutex_);
  std::vector<SnapshotRecord> out;
  for (const auto& [name, record] : snapshots_)
    if (!record.build_id.empty()) out.push_back(record);
  return out;
}

std::optional<SnapshotRecord> Sandboxes::find_snapshot(const std::string& name) {
  const std::lock_guard lock(mutex_);
  const auto found = snapshots_.find(name);
  return found == snapshots_.end() ? std::nullopt : std::optional(found->second);
}

void Sandboxes::name_template(const std::string& existing, const SnapshotRecord& record) {
  const std::lock_guard lock(mutex_);
  if (existing != record.name) runtime_->name_snapshot(existing, record.name);
  snapshot_records_.save(record.name, to_json(record));
  snapshots_[record.name] = record;
}

void Sandboxes::remove_snapshot(const std::string& name) {
  const std::lock_guard lock(mutex_);
  if (!snapshots_.contains(name)) throw ApiError(404, "", fmt::format("snapshot {} was not found", name));
  runtime_->remove_snapshot(name);
  snapshots_.erase(name);
  snapshot_records_.remove(name);
}

// A machine that ended by itself: clients are told that it is gone. What the runtime still has of it stays with it.
bool Sandboxes::bury_if_lost(const std::string& id) {
  for (const sandbox::Listing& found : runtime_->list()) {
    if (found.kind == "sandbox" && found.name == id && found.state == "lost") {
      spdlog::warn("sandbox {}: its machine has ended; `tidelock sandbox revert` or `rm` can still be used on it", id);
      drop(id);
      return true;
    }
  }
  return false;
}

void Sandboxes::use(const std::string& id, const std::function<void(sandbox::Sandbox&, const SandboxRecord&)>& act) {
  const auto here = [&] {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(id);
    if (found == entries_.end()) throw not_running(id, "there is none with this id");
    return ListItem{found->second->record, found->second->state};
  };
  here();
  const std::shared_ptr<Entry> found = entry(id);
  std::shared_lock shared(found->life);
  while (here().state == State::paused) {
    shared.unlock();
    {
      const Held held(found->life);
      const ListItem now = here();
      if (!now.record.auto_resume) throw not_running(id, "it is paused");
      if (now.state == State::paused) {
        note(id, "a request wakes it");
        resume(id, now.record.timeout);
      }
    }
    shared.lock();
  }
  const std::unique_ptr<sandbox::Sandbox> box = runtime_->open(id);
  try {
    act(*box, here().record);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::io && bury_if_lost(id)) throw not_running(id, "its machine has ended");
    throw;
  }
}

void Sandboxes::expire() {
  const std::int64_t now = options_.now();
  for (const ListItem& item : all()) {
    if (expiry_of(item.record, item.state, now) == Expiry::none) continue;
    try {
      const std::string& id = item.record.id;
      const std::shared_ptr<Entry> found = entry(id);
      const Held held = alone(*found, id);
      const ListItem then = get(id);  // its time may have been made longer while we waited
      const Expiry expiry = expiry_of(then.record, then.state, options_.now());
      if (expiry == Expiry::kill) {
        runtime_->open(id)->remove();
        drop(id);
      } else if (expiry == Expiry::pause) {
        note(id, "its time is up: it is paused");
        runtime_->open(id)->pause();
        put(then.record, State::paused);
      }
    } catch (const std::exception& error) {  // the next round tries again
      if (!bury_if_lost(item.record.id)) spdlog::warn("sandbox {}: its time-out: {}", item.record.id, error.what());
    }
  }
}

}  // namespace tidelock::serve::e2b

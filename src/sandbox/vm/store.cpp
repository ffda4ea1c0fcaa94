// Records, files and references of a state directory.

#include "sandbox/vm/store.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <thread>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"

namespace tidelock::sandbox::vm {
namespace fs = std::filesystem;
using Json = nlohmann::json;
namespace {

constexpr const char* kFolders[] = {"templates", "layers", "disks", "run"};

std::string text(const Json& record, const char* key) {
  const auto found = record.is_object() ? record.find(key) : record.end();
  return found != record.end() && found->is_string() ? found->get<std::string>() : "";
}

// Files and layer records that `records` refer to. A record of a shape that was never written refers to what it can.
struct References {
  std::set<std::string> layers, files;
  explicit References(const Journal::Records& records) {
    std::vector<std::string> todo;
    const auto disks = [this](const Json& record) {
      for (const std::string& disk : Store::strings(record, "disks")) {
        files.insert("disks/" + disk);
      }
    };
    for (const auto& [key, record] : records) {
      if (key.rfind("sandbox/", 0) == 0 || key.rfind("snapshot/", 0) == 0) {
        disks(record);
        todo.push_back(text(record, "layer"));
      } else if (key.rfind("intent/", 0) == 0) {
        for (const std::string& file : Store::strings(record, "files")) {
          files.insert(file);
        }
      }
    }
    while (!todo.empty()) {
      const std::string layer = todo.back();
      todo.pop_back();
      const auto found = records.find("layer/" + layer);
      if (layer.empty() || found == records.end() || !layers.insert(layer).second) {
        continue;
      }
      files.insert("layers/" + layer);
      disks(found->second);
      todo.push_back(text(found->second, "parent"));
    }
  }
};

}  // namespace

std::vector<std::string> Store::strings(const Json& record, const char* key) {
  std::vector<std::string> out;
  const auto found = record.is_object() ? record.find(key) : record.end();
  if (found != record.end() && found->is_array()) {
    for (const Json& value : *found) {
      out.push_back(value.is_string() ? value.get<std::string>() : "");
    }
  }
  return out;
}

std::string new_token(char kind) {
  static thread_local const FileDescriptor random(open("/dev/urandom", O_RDONLY | O_CLOEXEC));
  std::uint64_t value = 0;
  if (read(random.get(), &value, sizeof value) != sizeof value) {
    fail_errno("read", "/dev/urandom");
  }
  return fmt::format("{}{:012x}", kind, value & 0xFFFFFFFFFFFFULL);
}

Json to_json(const Guest& guest) {
  return {{"state", guest.state},
          {"template", guest.template_key},
          {"layer", guest.layer},
          {"disks", guest.disks},
          {"run", guest.run},
          {"pid", guest.process.pid},
          {"start", guest.process.start},
          {"processes", guest.processes},
          {"created", guest.created},
          {"defaults", to_json(guest.defaults)},
          {"passing", guest.passing}};
}

Json to_json(const Defaults& defaults) {
  return {{"environment", defaults.environment}, {"directory", defaults.directory}, {"root", defaults.root}};
}

Defaults parse_defaults(const Json& record) {
  Defaults out;
  const auto found = record.is_object() ? record.find("defaults") : record.end();
  if (found != record.end()) {
    out.environment = found->at("environment").get<std::map<std::string, std::string>>();
    out.directory = found->at("directory");
    out.root = found->at("root");
  }
  return out;
}

std::optional<Guest> parse_guest(const std::string& id, const Json& record) {
  try {
    Guest out;
    out.id = id;
    out.state = record.at("state");
    out.template_key = record.at("template");
    out.layer = record.at("layer");
    out.disks = record.at("disks").get<std::vector<std::string>>();
    out.run = record.at("run");
    out.process = {record.at("pid"), record.at("start")};
    out.processes = record.at("processes");
    out.created = record.at("created");
    out.defaults = parse_defaults(record);
    out.passing = record.value("passing", false);
    const bool known = out.state == "running" || out.state == "paused" || out.state == "lost";
    return known ? std::optional(out) : std::nullopt;
  } catch (const Json::exception&) {
    return std::nullopt;
  }
}

Store::Store(const MicrovmOptions& options) : options_(options) {
  if (options.directory.empty()) {
    fail(ErrorCode::invalid_argument, "microVM sandboxes: no state directory was given");
  }
  emulator_ = find_emulator();
  make_folder(options.directory);
  root_ = fs::canonical(options.directory);
  if (chmod(root_.c_str(), 0700) != 0) {  // template memory inside may be written by the users of QEMU processes
    fail_errno("close to others", root_.string());
  }
  take_lock(options.patience);
  for (const char* folder : kFolders) {
    make_folder(root_ / folder);
  }
  journal_ = std::make_unique<Journal>(root_ / "journal", root_ / "quarantine");
  events_ = std::make_unique<EventLog>(root_ / "logs");
  if (const Json* identity = journal_->find("directory")) {
    directory_id_ = identity->value("id", "");
  }
  if (directory_id_.empty()) {
    directory_id_ = new_token('s');
    journal_->commit({{"directory", Json{{"id", directory_id_}}}});
  }
  recover();
}

Store::~Store() {
  pools_.clear();
}

void Store::take_lock(std::chrono::milliseconds patience) {
  const fs::path path = root_ / "lock";
  lock_.reset(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (!lock_) {
    fail_errno("open", path.string());
  }
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (flock(lock_.get(), LOCK_EX | LOCK_NB) != 0) {
    if (std::chrono::steady_clock::now() >= deadline) {
      char holder[32] = "";
      const ssize_t got = pread(lock_.get(), holder, sizeof holder - 1, 0);
      fail(ErrorCode::exhausted, "{} is used by process {}", root_.string(), got > 0 ? holder : "unknown");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  const std::string mine = std::to_string(getpid());
  if (ftruncate(lock_.get(), 0) != 0 || pwrite(lock_.get(), mine.data(), mine.size(), 0) < 0) {
    spdlog::warn("{}: cannot note our process: {}", path.string(), std::strerror(errno));
  }
}

void Store::step(const char* name) const {
  if (options_.at_step) {
    options_.at_step(name);
  }
}

Guest Store::find(const std::string& id) {
  const std::lock_guard lock(mutex_);
  const Json* record = journal_->find("sandbox/" + id);
  if (record == nullptr) {
    fail(ErrorCode::not_found, "no sandbox {} in {}", id, root_.string());
  }
  std::optional<Guest> guest = parse_guest(id, *record);
  if (!guest) {
    fail(ErrorCode::corrupt_data, "sandbox {}: its record cannot be read: {}", id, record->dump());
  }
  return *guest;
}

Guest Store::guest(const std::string& id) {
  return find(id);
}

std::vector<LogEntry> Store::log(const std::string& id) {
  find(id);
  return events_->read(id);
}

void Store::note(const std::string& id, LogEntry entry) {
  using std::chrono::milliseconds, std::chrono::system_clock;
  {
    const std::lock_guard lock(mutex_);
    if (journal_->find("sandbox/" + id) == nullptr) {
      return;
    }
  }
  entry.time = std::chrono::duration_cast<milliseconds>(system_clock::now().time_since_epoch()).count();
  events_->add(id, entry);
}

void Store::tell(const std::string& id, std::string message, Texts fields, LogLevel level) {
  note(id, {.level = level, .message = std::move(message), .fields = std::move(fields)});
}

std::shared_ptr<Store::Live> Store::live(const std::string& id) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<Live>& out = live_[id];
  if (out == nullptr) {
    out = std::make_shared<Live>();
  }
  return out;
}

void Store::write(const Changes& changes) {
  step("journal:before");
  journal_->commit(changes);
  step("journal:after");
}

void Store::commit(Changes changes) {
  const std::lock_guard lock(mutex_);
  Journal::Records after = journal_->records();
  for (const Journal::Change& change : changes) {
    if (change.record) {
      after[change.key] = *change.record;
    } else {
      after.erase(change.key);
    }
  }
  const References before(journal_->records()), then(after);
  std::vector<std::string> garbage;
  for (const std::string& layer : before.layers) {
    if (!then.layers.contains(layer)) {
      changes.push_back({"layer/" + layer, std::nullopt});
    }
  }
  for (const std::string& file : before.files) {
    if (!then.files.contains(file)) {
      garbage.push_back(file);
    }
  }
  if (garbage.empty()) {
    write(changes);
    return;
  }
  const std::string collection = "intent/" + new_token('g');
  changes.push_back({collection, Json{{"operation", "collect"}, {"files", garbage}}});
  write(changes);
  step("collect:committed");
  discard(garbage);
  write({{collection, std::nullopt}});
}

std::string Store::begin(const std::string& operation, const std::string& id, const std::vector<std::string>& files) {
  const std::lock_guard lock(mutex_);
  std::string intent = "intent/" + new_token('i');
  write({{intent, Json{{"operation", operation}, {"sandbox", id}, {"files", files}}}});
  return intent;
}

void Store::abandon(const std::string& intent, const std::vector<std::string>& files, const Changes& more) noexcept {
  discard(files);
  try {
    const std::lock_guard lock(mutex_);
    Changes changes = more;
    changes.push_back({intent, std::nullopt});
    write(changes);
  } catch (const std::exception& error) {  // the next start will find the intent and do the same
    spdlog::warn("sandbox: an operation was undone, its intent stays: {}", error.what());
  }
}

void Store::discard(const std::vector<std::string>& files) noexcept {
  for (const std::string& file : files) {
    step("discard:file");
    std::error_code error;
    const fs::path path = root_ / file;
    if ((journal_->damaged() || unreadable_) && fs::exists(path, error)) {
      // A record that could not be read may have needed it.
      fs::create_directories(root_ / "quarantine", error);
      fs::rename(path, root_ / "quarantine" / (path.parent_path().filename().string() + "-" + path.filename().string()),
                 error);
    } else {
      fs::remove_all(path, error);
    }
    if (error) {
      spdlog::warn("cannot remove {}: {}", path.string(), error.message());
    }
  }
}

std::vector<fs::path> Store::page_files(const std::string& layer) {
  const std::lock_guard lock(mutex_);
  std::vector<fs::path> out;
  std::set<std::string> seen;
  for (std::string at = layer; !at.empty();) {
    const Json* record = journal_->find("layer/" + at);
    if (record == nullptr || !seen.insert(at).second) {
      fail(ErrorCode::corrupt_data, "{}: no record of layer {}, which layer {} stands on", root_.string(), at, layer);
    }
    out.push_back(root_ / "layers" / at / "pages");
    at = text(*record, "parent");
  }
  std::reverse(out.begin(), out.end());
  return out;
}

std::vector<Listing> Store::list() {
  const std::lock_guard lock(mutex_);
  std::vector<Listing> out;
  for (const auto& [key, record] : journal_->records()) {
    const std::size_t slash = key.find('/');
    const std::string kind = key.substr(0, slash), name = slash == std::string::npos ? "" : key.substr(slash + 1);
    if (kind == "sandbox") {
      const std::optional<Guest> guest = parse_guest(name, record);
      Listing entry{kind, name, guest ? guest->state : "unreadable", guest ? guest->template_key : "",
                    0,    0,    guest ? guest->created : 0};
      const fs::path manifest = root_ / "templates" / entry.origin / "memory";
      std::error_code none;
      entry.memory_bytes = guest && fs::exists(manifest, none) ? fs::file_size(manifest, none) : 0;
      if (guest && guest->state == "running" && is_alive(guest->process)) {
        entry.private_bytes = private_bytes(name);
      }
      out.push_back(entry);
    } else if (kind == "snapshot") {
      out.push_back({kind, name, "", text(record, "layer"), 0, 0, record.value("created", std::int64_t{0})});
    }
  }
  for (const fs::directory_entry& entry : fs::directory_iterator(root_ / "templates")) {
    std::error_code none;
    out.push_back({"template", entry.path().filename(), "", "", fs::file_size(entry.path() / "memory", none), 0, 0});
  }
  return out;
}

std::uint64_t Store::private_bytes(const std::string& id) {
  const Guest guest = find(id);
  const Template& from = known_template(guest.template_key);
  return GuestMemory(guest.process.pid, from.memory(), from.shape.memory_bytes).private_bytes();
}

std::string Store::isolation() const {
  return fmt::format("a virtual machine ({}), {}, QEMU's system-call filter, no network", emulator_.version,
                     geteuid() == 0 ? "each under its own user and namespaces" : "under this user");
}

}  // namespace tidelock::sandbox::vm

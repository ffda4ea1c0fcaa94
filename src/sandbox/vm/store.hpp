// A state directory: everything that microVM sandboxes leave on a host, and the operations on it.
//
//   lock            held by the one process that uses the directory
//   journal         what there is and what is under way (journal.hpp); the only truth about the rest
//   templates/KEY/  guests booted once (template.hpp); can be built again while nothing was made from them
//   layers/ID/      a checkpoint: pages (layer.hpp) and devices
//   disks/ID        qcow2 overlays: written by one guest, or frozen below others
//   logs/ID.jsonl   what happened to a sandbox, for people (event_log.hpp)
//   run/ID/         sockets and log of one QEMU process; worthless without the process
//   quarantine/     what could not be read or is not known; never deleted by us
//
// An operation writes its intent (which files it will make), acts, and commits once. Found at the next start: an
// intent whose operation did not commit is undone; processes that no record names are ended; files that no record and
// no intent names go to quarantine. Layers and disks are counted by who refers to them: a commit that drops the last
// reference lists them for deletion.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "sandbox/sandbox.hpp"
#include "sandbox/vm/channel.hpp"
#include "sandbox/vm/event_log.hpp"
#include "sandbox/vm/journal.hpp"
#include "sandbox/vm/layer.hpp"
#include "sandbox/vm/machine.hpp"
#include "sandbox/vm/pool.hpp"
#include "sandbox/vm/template.hpp"

namespace tidelock::sandbox::vm {

// The record of one sandbox.
struct Guest {
  std::string id, state;  // running, paused, or lost: its process ended without a pause
  std::string template_key;
  std::string layer;               // its newest checkpoint; empty: the template itself
  std::vector<std::string> disks;  // from the template's up; running: the last is written
  std::string run;                 // running: the name of its process
  ProcessId process;
  int processes = 64;  // the limit for its user
  std::int64_t created = 0;
  Defaults defaults;
  bool passing = false;  // not to outlive the program that made it
};

class Store {
 public:
  // Locks the directory, making it first, and brings it in order. Throws Error{exhausted} when another process holds
  // the lock for longer than options.patience.
  explicit Store(const MicrovmOptions& options);
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  // Each is one operation: done when it returns, undone when it throws. Different sandboxes at once; one at a time.
  std::string create(const Spec& spec);
  void pause(const std::string& id);
  void resume(const std::string& id);
  void checkpoint(const std::string& id) { capture(id, "checkpoint", ""); }
  std::vector<std::string> fork(const std::string& id, int count);
  void snapshot(const std::string& id, const std::string& name) { capture(id, "snapshot", name); }
  void revert(const std::string& id, const std::string& snapshot);
  void remove(const std::string& id);
  void remove_snapshot(const std::string& name);
  Defaults snapshot_defaults(const std::string& name);
  void name_snapshot(const std::string& existing, const std::string& name);
  void set_defaults(const std::string& id, const Defaults& defaults);
  ExecResult run(const std::string& id, const GuestRequest& request, const ExecRequest& io);
  // The connection to its agent, with the guest running; what comes of it goes on without the store.
  std::shared_ptr<Link> link(const std::string& id);
  void set_frozen(const std::string& id, bool frozen);

  Guest guest(const std::string& id);
  std::vector<LogEntry> log(const std::string& id);
  void note(const std::string& id, LogEntry entry);
  std::vector<Listing> list();
  std::uint64_t private_bytes(const std::string& id);
  Template template_of(const Spec& spec) { return template_for(spec); }  // built when there is none
  void await_pool();
  const std::filesystem::path& folder() const { return root_; }
  std::string isolation() const;
  static std::vector<std::string> strings(const nlohmann::json& record, const char* key);  // empty when not a list

 private:
  struct Live {
    std::mutex busy;
    std::unique_ptr<Machine> machine;
    Channel agent;
    bool frozen = false;
  };
  using Changes = std::vector<Journal::Change>;

  // store.cpp: records and files
  void take_lock(std::chrono::milliseconds patience);
  Guest find(const std::string& id);
  void commit(Changes changes);        // with the collection of what it leaves without a reference
  void write(const Changes& changes);  // one transaction of the journal
  std::string begin(const std::string& operation, const std::string& id, const std::vector<std::string>& files);
  void abandon(const std::string& intent, const std::vector<std::string>& files, const Changes& more = {}) noexcept;
  void discard(const std::vector<std::string>& files) noexcept;
  std::vector<std::filesystem::path> page_files(const std::string& layer);
  std::shared_ptr<Live> live(const std::string& id);
  void step(const char* name) const;
  using Texts = std::map<std::string, std::string>;
  void tell(const std::string& id, std::string message, Texts fields = {}, LogLevel level = LogLevel::info);
  // recover.cpp
  void recover();
  bool adopt(const Guest& guest, const std::vector<std::pair<std::string, ProcessId>>& machines);
  void undo_intents();
  void set_unknown_aside();
  // lifecycle.cpp
  void capture(const std::string& id, const std::string& operation, const std::string& name);
  Guest capture_running(Live& box, Guest guest, const std::string& operation, bool go_on, const std::string& name);
  std::unique_ptr<Machine> start_copy(const Template& from);
  std::unique_ptr<Machine> wake(const Guest& guest, Channel& agent);
  void start(Live& box, Guest guest, const std::string& operation);
  void ensure_running(Live& box, const std::string& id);
  template <typename Act>
  auto with_agent(Live& box, const std::string& id, Act act);
  void retire(std::unique_ptr<Machine> machine) noexcept;
  [[noreturn]] void lose(Live& box, Guest guest);
  void stand_on(Guest& guest, const std::string& layer);
  const nlohmann::json& snapshot_record(const std::string& name) const;  // with mutex_ held; throws Error{not_found}
  Template template_for(const Spec& spec);
  std::string content_name(const std::string& image);
  Template& known_template(const std::string& key);
  Pool& pool(const Template& of);

  std::filesystem::path root_;
  MicrovmOptions options_;
  FileDescriptor lock_;
  std::string directory_id_;
  bool unreadable_ = false;  // some record could not be parsed: nothing is deleted
  Emulator emulator_;
  std::recursive_mutex mutex_;  // the journal and the maps below
  std::unique_ptr<Journal> journal_;
  std::unique_ptr<EventLog> events_;
  std::map<std::string, std::shared_ptr<Live>> live_;
  std::map<std::string, Template> templates_;
  std::map<std::string, std::unique_ptr<Pool>> pools_;
  std::mutex building_;
  struct KnownArchive {
    std::string file;    // which one it was, and when it changed
    std::string digest;  // of its image
  };
  std::map<std::string, KnownArchive> archives_;  // under building_, by path
  std::map<std::string, std::string> built_;      // under building_: what was asked for, and the template's key
};

nlohmann::json to_json(const Guest& guest);
nlohmann::json to_json(const Defaults& defaults);
Defaults parse_defaults(const nlohmann::json& record);  // of a record that has none: none
void need_name(const std::string& name);                // of a snapshot. Throws Error{invalid_argument}
// Nothing for a record that cannot be one.
std::optional<Guest> parse_guest(const std::string& id, const nlohmann::json& record);
std::string new_token(char kind);  // e.g. d1f0c9a3b2e4d5c6: unique, and a name QEMU accepts

}  // namespace tidelock::sandbox::vm

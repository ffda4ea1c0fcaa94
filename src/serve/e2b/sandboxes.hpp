// The sandboxes behind the API: what is asked for, done with a runtime, remembered across restarts. Private to
// serve/e2b.
//
// Thread-safe; calls wait for the runtime. On one sandbox, what changes its life (pause, resume, kill, fork, snapshot)
// happens alone, everything else beside each other. A sandbox's record is on disk before its creator hears of it; at
// start, sandboxes that the runtime has and no record knows (the program was killed in between, or another verb made
// them) get a record that pauses them in five minutes, records without a sandbox go.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>

#include "sandbox/sandbox.hpp"
#include "serve/e2b/record.hpp"

namespace tidelock::serve::e2b {

struct SandboxesOptions {
  std::filesystem::path directory;               // of the runtime; the API's records live in its folder e2b
  std::map<std::string, std::string> templates;  // name -> image
  std::map<std::string, std::string> images;     // what builds may start from: name -> image
  int memory_mib = 256, disk_mib = 256, processes = 128;
  std::function<std::int64_t()> now;  // milliseconds since 1970
};

// What POST /sandboxes asks for.
struct NewSandbox {
  std::string template_id;  // a template's or a snapshot's name
  std::int64_t timeout = 300;
  bool auto_pause = false, auto_resume = false, secure = true;
  std::map<std::string, std::string> metadata, environment;
};

class Sandboxes {
 public:
  Sandboxes(std::unique_ptr<sandbox::Runtime> runtime, SandboxesOptions options);

  // All of them throw ApiError{404} for an id that is not known, and what the runtime throws.
  SandboxRecord create(const NewSandbox& wanted);
  ListItem get(const std::string& id);
  std::vector<ListItem> all();
  void kill(const std::string& id);
  void pause(const std::string& id);  // ApiError{409} when it is paused
  struct Resumed {
    SandboxRecord record;
    bool woken = false;
  };
  // Resumes a paused one; its time-out becomes `timeout` seconds from now, or stays when that is later and it was
  // running.
  Resumed connect(const std::string& id, std::int64_t timeout);
  void set_timeout(const std::string& id, std::int64_t seconds, bool only_longer);
  std::vector<SandboxRecord> fork(const std::string& id, int count, std::int64_t timeout);
  SnapshotRecord snapshot(const std::string& id, const std::string& name);  // empty: a new one
  std::vector<SnapshotRecord> snapshots();                                  // of sandboxes
  std::vector<SnapshotRecord> templates();                                  // that were built
  void remove_snapshot(const std::string& name);
  bool has_snapshot(const std::string& name) { return find_snapshot(name).has_value(); }
  std::optional<SnapshotRecord> find_snapshot(const std::string& name);
  // What the snapshot `existing` holds is from now also the template of that record, in place of what had its name.
  void name_template(const std::string& existing, const SnapshotRecord& record);
  std::vector<sandbox::LogEntry> log(const std::string& id);
  void note(const std::string& id, const std::string& message, const std::map<std::string, std::string>& fields = {});
  std::int64_t seconds_now() const { return options_.now() / 1000; }
  sandbox::Runtime& runtime() { return *runtime_; }

  // Does something in a running sandbox. One that is paused is resumed when it is to resume by itself; otherwise, and
  // when there is none, ApiError{502} as E2B's proxy answers.
  void use(const std::string& id, const std::function<void(sandbox::Sandbox&, const SandboxRecord&)>& act);
  std::optional<SandboxRecord> find(const std::string& id);

  // Ends or pauses what has timed out.
  void expire();

 private:
  struct Entry {
    SandboxRecord record;  // under mutex_
    State state = State::running;
    std::shared_mutex life;  // held shared by what uses it
  };
  using Held = std::unique_lock<std::shared_mutex>;
  void adopt();
  std::shared_ptr<Entry> entry(const std::string& id);
  Held alone(Entry& entry, const std::string& id);  // ApiError{404} when it went while we waited
  void put(const SandboxRecord& record, State state);
  void drop(const std::string& id);
  void resume(const std::string& id, std::int64_t timeout);
  bool bury_if_lost(const std::string& id);
  SandboxRecord blank(const std::string& id) const;

  std::unique_ptr<sandbox::Runtime> runtime_;
  SandboxesOptions options_;
  std::mutex mutex_;  // what is below, and the records on disk
  RecordFolder sandbox_records_, snapshot_records_;
  std::map<std::string, std::shared_ptr<Entry>> entries_;
  std::map<std::string, SnapshotRecord> snapshots_;
};

}  // namespace tidelock::serve::e2b

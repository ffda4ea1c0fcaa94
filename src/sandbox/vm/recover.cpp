// What a start finds: living guests are adopted, half-done operations undone, strays ended or set aside.

#include <algorithm>

#include "base/error.hpp"
#include "base/log.hpp"
#include "sandbox/vm/store.hpp"

namespace tidelock::sandbox::vm {
namespace fs = std::filesystem;
using Json = nlohmann::json;

// Takes charge of the process that the record names, if it lives; whether it does.
bool Store::adopt(const Guest& guest, const std::vector<std::pair<std::string, ProcessId>>& machines) {
  const auto found = std::find_if(machines.begin(), machines.end(), [&](const auto& machine) {
    return machine.first == guest.run && machine.second.pid == guest.process.pid &&
           machine.second.start == guest.process.start;
  });
  if (found == machines.end()) {
    return false;
  }
  try {
    const Template& from = known_template(guest.template_key);
    live(guest.id)->machine =
        std::make_unique<Machine>(found->second, root_ / "run" / guest.run, from.memory(), from.shape.memory_bytes);
    return true;
  } catch (const Error& error) {
    spdlog::warn("sandbox {}: its process cannot be taken over: {}", guest.id, error.what());
    return false;
  }
}

// No operation of an intent that is still here has committed: its files go, its guest goes on.
void Store::undo_intents() {
  const Journal::Records records = journal_->records();
  std::set<std::string> used;  // by what was committed: never to be undone, whatever an intent says
  for (const auto& [key, record] : records) {
    if (key.rfind("layer/", 0) == 0) {
      used.insert("layers/" + key.substr(6));
    }
    for (const std::string& disk : strings(record, "disks")) {
      used.insert("disks/" + disk);
    }
  }
  for (const auto& [key, record] : records) {
    if (key.rfind("intent/", 0) != 0) {
      continue;
    }
    Changes changes{{key, std::nullopt}};
    std::vector<std::string> files = strings(record, "files");
    std::erase_if(files, [&used](const std::string& file) { return used.contains(file); });
    const std::string id = record.value("sandbox", "");
    const std::shared_ptr<Live> box = live(id);
    const Json* owner = journal_->find("sandbox/" + id);
    std::optional<Guest> guest = owner == nullptr ? std::nullopt : parse_guest(id, *owner);
    if (guest && guest->state == "running" && box->machine != nullptr) {
      try {
        // The guest may already write to the new disk of a checkpoint that never was: then it is part of its chain.
        const std::string top = box->machine->top_node();
        const auto kept = std::find(files.begin(), files.end(), "disks/" + top);
        if (kept != files.end()) {
          files.erase(kept);
          guest->disks.push_back(top);
          changes.push_back({"sandbox/" + id, to_json(*guest)});
        }
        box->machine->go_on();
      } catch (const Error& error) {
        spdlog::warn("sandbox {}: {}", id, error.what());
        continue;  // the intent stays: the next start tries again
      }
    }
    spdlog::info("undoing '{}' of sandbox {}", record.value("operation", "?"), id);
    discard(files);
    write(changes);
    tell(id, record.value("operation", "?") + " undone", {{"reason", "the program ended before it was complete"}},
         LogLevel::warning);
  }
}

void Store::set_unknown_aside() {
  std::set<std::string> known;
  for (const auto& [key, record] : journal_->records()) {
    if (key.rfind("layer/", 0) == 0) {
      known.insert("layers/" + key.substr(6));
    }
    for (const std::string& disk : strings(record, "disks")) {
      known.insert("disks/" + disk);
    }
    for (const std::string& file : strings(record, "files")) {
      known.insert(file);
    }
  }
  for (const char* folder : {"layers", "disks"}) {
    for (const fs::directory_entry& entry : fs::directory_iterator(root_ / folder)) {
      const std::string file = std::string(folder) + "/" + entry.path().filename().string();
      if (!known.contains(file)) {
        fs::create_directories(root_ / "quarantine");
        fs::rename(entry.path(), root_ / "quarantine" / (std::string(folder) + "-" + entry.path().filename().string()));
        spdlog::warn("{}: no record knows of {}; it was moved to quarantine", root_.string(), file);
      }
    }
  }
}

void Store::recover() {
  const std::vector<std::pair<std::string, ProcessId>> machines = find_machines(directory_id_);
  std::set<std::string> adopted;
  const Journal::Records records = journal_->records();
  std::vector<std::string> passing;  // of a program that was killed: nobody will ask for them
  for (const auto& [key, record] : records) {
    if (key.rfind("sandbox/", 0) != 0) {
      continue;
    }
    std::optional<Guest> guest = parse_guest(key.substr(8), record);
    if (!guest) {
      unreadable_ = true;
      spdlog::warn("{}: the record of {} cannot be read; it is left as it is", root_.string(), key);
    } else if (guest->passing) {
      passing.push_back(key);
    } else if (guest->state == "running") {
      if (adopt(*guest, machines)) {
        adopted.insert(guest->run);
      } else {
        guest->state = "lost";
        write({{key, to_json(*guest)}});
        spdlog::warn("sandbox {}: its process is gone", guest->id);
        tell(guest->id, "its QEMU process has ended", {{"layer", guest->layer}}, LogLevel::error);
      }
    }
  }
  for (const auto& [name, process] : machines) {
    if (!adopted.contains(name)) {
      spdlog::info("ending process {} ({}), which no sandbox owns", process.pid, name);
      end_process(process);
    }
  }
  undo_intents();
  for (const std::string& key : passing) {
    spdlog::info("removing {}, which was made to pass", key);
    commit({{key, std::nullopt}});
  }
  for (const fs::directory_entry& entry : fs::directory_iterator(root_ / "run")) {
    if (!adopted.contains(entry.path().filename())) {
      fs::remove_all(entry.path());
    }
  }
  set_unknown_aside();
  std::set<std::string> ids;
  for (const auto& [key, record] : journal_->records()) {
    if (key.rfind("sandbox/", 0) == 0) {
      ids.insert(key.substr(8));
    }
  }
  events_->keep_only(ids);
}

}  // namespace tidelock::sandbox::vm

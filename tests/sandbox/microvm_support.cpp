#include "sandbox/microvm_support.hpp"

#include <cstdlib>

namespace tidelock::sandbox::testing {

const fs::path& shared_directory() {
  static const Folder folder;
  return folder.path();
}

MicrovmOptions options_for(const fs::path& directory) {
  MicrovmOptions options;
  options.directory = directory;
  return options;
}

std::unique_ptr<Runtime> open_runtime() {
  return make_microvm_runtime(options_for(shared_directory()));
}

Spec small() {
  Spec spec;
  spec.limits.memory_bytes = 128ULL << 20;
  spec.limits.disk_bytes = 32ULL << 20;
  return spec;
}

std::string output_of(Sandbox& box, const std::string& script) {
  const ExecResult result = box.exec(shell(script, 60s));
  EXPECT_EQ(result.exit_code, 0) << script << ": " << result.error;
  return result.output;
}

void start_counter(Sandbox& box) {
  output_of(box,
            "(i=0; while :; do i=$((i+1)); echo $i >> /root/log; sleep 0.1; done) >/dev/null 2>&1 & "
            "while [ ! -s /root/log ]; do sleep 0.02; done");
}

int expect_counting(Sandbox& box) {
  const auto length = [&box] {
    return std::stoi(output_of(box, "awk '$1 != NR { print \"broken at\", NR; exit 1 } END { print NR }' /root/log"));
  };
  const int before = length();
  int after = before;
  EXPECT_TRUE(eventually([&] { return (after = length()) > before; })) << "it stands still at " << before;
  return after;
}

std::size_t machines_of(const fs::path& directory) {
  std::size_t count = 0;
  for (const int pid : processes_with("guest=tidelock-")) {
    const std::string log = fs::read_symlink(fs::path("/proc") / std::to_string(pid) / "fd/1").string();
    count += log.rfind(fs::canonical(directory).string(), 0) == 0 ? 1 : 0;
  }
  return count;
}

std::string log_of(Runtime& runtime, const std::string& id) {
  std::string out;
  for (const LogEntry& entry : runtime.log(id)) {
    out += entry.message + "; ";
  }
  return out;
}

bool soaking() {
  return std::getenv("TIDELOCK_SOAK") != nullptr;
}

}  // namespace tidelock::sandbox::testing

#include <gtest/gtest.h>

#include "base/error.hpp"
#include "sandbox/sandbox.hpp"

namespace tidelock::sandbox {
TEST(Container, RunsACommand) {
  auto runtime = make_container_runtime();
  std::printf("%s\n", runtime->capabilities().isolation.c_str());
  auto sandbox = runtime->create({});
  for (const char* command :
       {"echo $((37*58)); id; pwd; ls -la / /dev /root; cat /proc/self/mountinfo /proc/self/cgroup; ps; cat "
        "/proc/1/cmdline; cat /proc/self/status; ulimit -a; ip a; ifconfig -a; df",
        "touch x; ls -la"}) {
    ExecRequest q; q.argv = {"sh", "-c", command}; ExecResult r = sandbox->exec(q);
    std::printf("%d %s\n%s\n%f\n", r.exit_code, r.output.c_str(), r.error.c_str(), r.seconds);
  }
}
}  // namespace tidelock::sandbox

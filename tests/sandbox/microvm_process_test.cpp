// Processes of microVMs that outlive calls, connections and pauses; their input, signals, files. One template for all
// tests, booted by the first.
#include <gtest/gtest.h>
#include <signal.h>

#include <thread>

#include "sandbox/support.hpp"

namespace tidelock::sandbox::testing {
namespace {

using Kind = ProcessEvent::Kind;

class MicrovmProcess : public ::testing::Test {
 protected:
  static const fs::path& directory() {
    static const Folder folder;
    return folder.path();
  }
  void SetUp() override { open(); }
  void TearDown() override {
    if (box_ != nullptr) box_->remove();
  }
  void open() {
    MicrovmOptions options;
    options.directory = directory();
    runtime_ = make_microvm_runtime(options);
    if (id_.empty()) {
      Spec spec;
      spec.limits.memory_bytes = 128ULL << 20;
      spec.limits.disk_bytes = 32ULL << 20;
      spec.limits.processes = 256;  // servers make one for each connection
      box_ = runtime_->create(spec);
      box_->keep();
      id_ = box_->id();
    } else {
      box_ = runtime_->open(id_);
    }
  }
  std::shared_ptr<ProcessListener> sh(const std::string& script, bool open_input = false, bool root = false) {
    ProcessRequest request;
    request.argv = {"/bin/bash", "-l", "-c", script};
    request.open_input = open_input;
    request.root = root;
    request.tag = "a tag";
    return box_->start(request);
  }
  // Everything until the process has ended or was lost.
  struct Heard {
    std::string output, error;
    ProcessEvent last;
  };
  static Heard hear(ProcessListener& listener) {
    Heard out;
    const auto deadline = std::chrono::steady_clock::now() + 60s;
    while (std::chrono::steady_clock::now() < deadline) {
      const std::optional<ProcessEvent> event = listener.take();
      if (!event) {
        std::this_thread::sleep_for(1ms);
      } else if (event->kind == Kind::output) {
        out.output += event->bytes;
      } else if (event->kind == Kind::error) {
        out.error += event->bytes;
      } else {
        out.last = *event;
        return out;
      }
    }
    ADD_FAILURE() << "it does not end; so far: " << out.output << out.error;
    return out;
  }
  static std::string first_output(ProcessListener& listener) {
    std::optional<ProcessEvent> event;
    EXPECT_TRUE(eventually([&] { return (event = listener.take()).has_value(); }));
    return event ? event->bytes : "";
  }
  std::unique_ptr<Runtime> runtime_;
  std::unique_ptr<Sandbox> box_;
  std::string id_;
};

TEST_F(MicrovmProcess, SeveralRunAtOnceEachWithItsOutputUserAndEnd) {
  const auto slow = sh("sleep 0.5; echo slow; id -u");
  const auto wrong = sh("echo oops >&2; exit 3");
  const auto root = sh("id -u", false, true);
  const Heard w = hear(*wrong), r = hear(*root), s = hear(*slow);
  EXPECT_EQ(w.error, "oops\n");
  EXPECT_EQ(w.last.exit_code, 3);
  EXPECT_EQ(r.output, "0\n");
  EXPECT_EQ(s.output, "slow\n1000\n");
  EXPECT_EQ(s.last.kind, Kind::ended);
  EXPECT_EQ(s.last.exit_code, 0);
  ProcessRequest nowhere;
  nowhere.argv = {"true"};
  nowhere.directory = "/no/such/folder";
  EXPECT_EQ(code_of([&] { box_->start(nowhere); }), ErrorCode::invalid_argument);
}

TEST_F(MicrovmProcess, InputIsGivenInOrderAndItsEndIsTheEnd) {
  const auto cat = sh("cat; echo over", true);
  const std::string large(300'000, 'x');  // beyond every window on the way
  std::jthread writer([&] {
    box_->write_input(cat->pid(), "one\n");
    box_->write_input(cat->pid(), large);
    box_->close_input(cat->pid());
  });
  EXPECT_EQ(hear(*cat).output, "one\n" + large + "over\n");
  writer.join();
  EXPECT_EQ(code_of([&] { box_->write_input(cat->pid(), "late"); }), ErrorCode::not_found);
  const auto closed = sh("sleep 5");
  EXPECT_EQ(code_of([&] { box_->write_input(closed->pid(), "x"); }), ErrorCode::invalid_argument);
}

TEST_F(MicrovmProcess, SignalsReachItAndAnEndIsTellableForAWhile) {
  const auto polite = sh("trap 'echo bye; exit 7' TERM; echo ready; while :; do sleep 0.05; done");
  EXPECT_EQ(first_output(*polite), "ready\n");
  box_->signal(polite->pid(), SIGTERM);
  const Heard heard = hear(*polite);
  EXPECT_EQ(heard.output, "bye\n");
  EXPECT_EQ(heard.last.exit_code, 7);
  const Heard again = hear(*box_->attach(polite->pid()));
  EXPECT_EQ(again.last.exit_code, 7);
  const auto stubborn = sh("trap '' TERM; while :; do sleep 0.05; done");
  box_->signal(stubborn->pid(), SIGKILL);
  EXPECT_EQ(hear(*stubborn).last.signal, SIGKILL);
  EXPECT_EQ(code_of([&] { box_->signal(stubborn->pid(), SIGKILL); }), ErrorCode::not_found);
  EXPECT_EQ(code_of([&] { box_->attach(99999); }), ErrorCode::not_found);
}

TEST_F(MicrovmProcess, TwoListenersHearTheSameAndASlowOneMakesItWait) {
  const auto first = sh("echo go; read x; head -c 3000000 /dev/zero | tr '\\0' z", true);
  EXPECT_EQ(first_output(*first), "go\n");
  const auto second = box_->attach(first->pid());
  box_->write_input(first->pid(), "\n");
  std::this_thread::sleep_for(300ms);  // nobody takes: what is under way is bounded by the window
  std::size_t waiting = 0;
  while (const auto event = second->take()) waiting += event->bytes.size();
  EXPECT_LE(waiting, 600'000U);
  Heard heard;
  std::jthread other([&] { heard = hear(*first); });
  const Heard rest = hear(*second);
  other.join();
  EXPECT_EQ(heard.output.size(), 3'000'000U);
  EXPECT_EQ(rest.output.size() + waiting, 3'000'000U);
}

TEST_F(MicrovmProcess, APauseIsALossToListenersAndNothingToTheProcess) {
  const auto counter = sh("i=0; while :; do i=$((i+1)); echo $i; sleep 0.05; done");
  const int pid = counter->pid();
  EXPECT_EQ(first_output(*counter), "1\n");
  box_->pause();
  EXPECT_EQ(hear(*counter).last.kind, Kind::lost);
  box_.reset();  // with the runtime gone, its directory is free
  runtime_.reset();
  open();                                                  // as another program would
  const std::vector<ProcessInfo> all = box_->processes();  // resumes
  ASSERT_EQ(all.size(), 1U);
  EXPECT_EQ(all[0].pid, pid);
  EXPECT_EQ(all[0].request.tag, "a tag");
  EXPECT_EQ(all[0].request.argv[1], "-l");
  const auto again = box_->attach(pid);
  EXPECT_GT(std::stoi(first_output(*again)), 1);
  box_->signal(pid, SIGKILL);
  EXPECT_EQ(hear(*again).last.signal, SIGKILL);
}

// What a terminal shows until it holds `wanted`.
void expect_shown(ProcessListener& listener, const std::string& wanted) {
  std::string shown;
  EXPECT_TRUE(eventually([&] {
    while (const std::optional<ProcessEvent> event = listener.take()) {
      EXPECT_EQ(event->kind, Kind::terminal);
      shown += event->bytes;
    }
    return shown.find(wanted) != std::string::npos;
  })) << "no "
      << wanted << " in: " << shown;
}

TEST_F(MicrovmProcess, ATerminalIsTypedOnResizedAndInterrupted) {
  ProcessRequest request;
  request.argv = {"/bin/bash", "-i", "-l"};
  request.terminal = WindowSize{.rows = 31, .columns = 97};
  const auto shell = box_->start(request);
  const auto type = [&](const std::string& keys) { box_->write_input(shell->pid(), keys); };
  type("echo $((40+2)) $(stty size) $(id -u) $(tty)\n");
  expect_shown(*shell, "42 31 97 1000 /dev/pts/0");
  type("sh -c 'trap \"stty size\" WINCH; echo rea\"\"dy; while :; do sleep 0.1; done'\n");
  expect_shown(*shell, "ready");
  box_->resize(shell->pid(), {.rows = 50, .columns = 61});
  expect_shown(*shell, "50 61");
  type("\x03");  // control-C ends the loop, not the shell
  expect_shown(*shell, "$ ");
  type("echo back $?\n");
  expect_shown(*shell, "back 130");
  ASSERT_EQ(box_->processes().size(), 1U);
  EXPECT_EQ(box_->processes()[0].request.terminal->columns, 97);  // as it was started
  EXPECT_EQ(code_of([&] { box_->close_input(shell->pid()); }), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([&] { box_->resize(shell->pid(), {.rows = 0, .columns = 1}); }), ErrorCode::invalid_argument);
  const auto plain = sh("sleep 5");
  EXPECT_EQ(code_of([&] { box_->resize(plain->pid(), {}); }), ErrorCode::invalid_argument);
  type("exit 5\n");
  std::optional<ProcessEvent> last;
  EXPECT_TRUE(eventually([&] { return (last = shell->take()) && last->kind == Kind::ended; }));
  EXPECT_EQ(last->exit_code, 5);
}

TEST_F(MicrovmProcess, ATerminalGoesOnAfterAPauseAndItsSessionEndsAtOnce) {
  ProcessRequest request;
  request.argv = {"/bin/bash", "-i", "-l"};
  request.terminal = WindowSize{};
  int pid = 0;
  {
    const auto shell = box_->start(request);
    pid = shell->pid();
    box_->write_input(pid, "kept=yes; sleep 1000 & echo rea''dy\n");
    expect_shown(*shell, "ready");
    box_->pause();
  }
  const auto again = box_->attach(pid);
  box_->write_input(pid, "echo it is $kept\n");
  expect_shown(*again, "it is yes");
  box_->signal(pid, SIGKILL);
  std::optional<ProcessEvent> last;
  EXPECT_TRUE(eventually([&] { return (last = again->take()) && last->kind == Kind::ended; }));
  EXPECT_EQ(last->signal, SIGKILL);
  ExecRequest look;
  look.argv = {"sh", "-c", "ps | grep -c '[s]leep 1000'"};
  EXPECT_EQ(box_->exec(look).output, "0\n");
}

// The changes told until one has `name`, as letters of the kinds and names.
std::string told_until(FileWatch& watch, const std::string& name) {
  std::string out;
  EXPECT_TRUE(eventually([&] {
    while (const std::optional<FileChange> change = watch.take()) {
      out += std::string(1, "cwrna"[static_cast<int>(change->kind)]) + ":" + change->name + " ";
      if (change->name == name) return true;
    }
    return false;
  })) << out;
  return out;
}

TEST_F(MicrovmProcess, AWatchTellsChangesInOrderAndNewFoldersToo) {
  hear(*sh("mkdir -p /root/w/old; echo x >/root/w/f"));
  const auto flat = box_->watch({.path = "/root/w"});
  const auto deep = box_->watch({.path = "/root/w", .recursive = true, .entries = true});
  hear(
      *sh("cd /root/w; echo 1 >old/inner; echo 22 >a; chmod 600 a; mv a b; rm b; mkdir -p new/er; sleep 0.3; echo 3 "
          ">new/er/file; mv new /root/away; echo 4 >/root/away/er/unseen; touch end"));
  const std::string seen = told_until(*flat, "end");
  EXPECT_EQ(seen, "c:a w:a a:a n:a c:b r:b c:new n:new c:end ");
  const std::string all = told_until(*deep, "end");
  EXPECT_NE(all.find("c:old/inner w:old/inner "), std::string::npos) << all;
  EXPECT_NE(all.find("c:new/er "), std::string::npos) << all;
  EXPECT_NE(all.find("c:new/er/file w:new/er/file n:new "), std::string::npos) << all;
  EXPECT_EQ(all.find("unseen"), std::string::npos) << all;
  hear(*sh("cd /root/w; printf 12345 >sized"));
  std::optional<FileChange> last;
  EXPECT_TRUE(eventually([&] { return (last = deep->take()) && last->kind == FileChange::Kind::write; }));
  ASSERT_TRUE(last && last->entry);
  EXPECT_EQ(last->entry->size, 5U);
  EXPECT_EQ(last->entry->path, "/root/w/sized");
}

// Why a watch is over, once all that it told is taken.
ErrorCode end_of(FileWatch& watch) {
  ErrorCode out{};
  EXPECT_TRUE(eventually([&] {
    try {
      while (watch.take()) {
      }
      return false;
    } catch (const Error& error) {
      out = error.code();
      return true;
    }
  }));
  return out;
}

TEST_F(MicrovmProcess, WatchesAreLimitedEndWithTheirOwnersAndSayWhyTheyAreOver) {
  EXPECT_EQ(code_of([&] { box_->watch({.path = "/root/none"}); }), ErrorCode::not_found);
  EXPECT_EQ(code_of([&] { box_->watch({.path = "/etc/passwd"}); }), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([&] { box_->watch({.path = "relative"}); }), ErrorCode::invalid_argument);
  std::vector<std::unique_ptr<FileWatch>> all;
  for (int i = 0; i < 64; ++i) all.push_back(box_->watch({.path = "/root", .entries = true}));
  EXPECT_EQ(code_of([&] { box_->watch({.path = "/root"}); }), ErrorCode::exhausted);
  all.resize(1);
  EXPECT_TRUE(eventually([&] {  // those that ended have made room
    try {
      return box_->watch({.path = "/tmp"}) != nullptr;
    } catch (const Error&) {
      return false;
    }
  }));
  // Far more changes than anybody keeps: their loss is told, nothing grows.
  hear(*sh("cd /root; for round in $(seq 40); do touch $(seq 1000); done"));
  EXPECT_EQ(end_of(*all[0]), ErrorCode::exhausted);
  const auto other = box_->watch({.path = "/root"});
  box_->pause();
  EXPECT_EQ(end_of(*other), ErrorCode::io);
}

// Tried until something listens: a server says that it is there a moment before.
std::shared_ptr<PortConnection> connect(Sandbox& box, int port) {
  std::shared_ptr<PortConnection> out;
  EXPECT_TRUE(eventually([&] {
    try {
      out = box.connect_port(port);
    } catch (const Error&) {
    }
    return out != nullptr;
  }));
  return out;
}

TEST_F(MicrovmProcess, PortsTakeAndGiveBytesBothWaysWithEachSideWaitingForTheOther) {
  EXPECT_EQ(code_of([&] { box_->connect_port(8080); }), ErrorCode::not_found);
  EXPECT_EQ(code_of([&] { box_->connect_port(0); }), ErrorCode::exhausted);
  const auto server = sh("exec nc -ll -p 8080 -e sh -c 'head -c 3000000 | tr x y'");
  const std::shared_ptr<PortConnection> connection = connect(*box_, 8080);
  ASSERT_NE(connection, nullptr);
  const std::string sent(3'000'000, 'x');
  std::size_t given = 0;
  for (int i = 0; i < 10; ++i) given += connection->give(sent);
  EXPECT_LE(given, 1'000'000U);  // what is on its way is bounded, whatever the other side does
  std::string back;
  EXPECT_TRUE(eventually([&] {
    given += connection->give(std::string_view(sent).substr(given));
    while (const std::optional<std::string> bytes = connection->take()) back += *bytes;
    return connection->ended();
  }));
  EXPECT_EQ(given, sent.size());
  EXPECT_TRUE(back == std::string(3'000'000, 'y')) << back.size();
}

TEST_F(MicrovmProcess, ConnectionsEndWhenEitherSideDoesAndAreResetByAPause) {
  const auto server = sh("nc -ll -p 8081 -e sh -c 'cat; echo over' & nc -ll -p 8082 -e sleep 1000 & wait");
  const auto half = connect(*box_, 8081);
  EXPECT_EQ(half->give("abc"), 3U);
  half->finish();  // only one way: what the other side says to it still comes
  std::string said;
  EXPECT_TRUE(eventually([&] {
    while (const std::optional<std::string> bytes = half->take()) said += *bytes;
    return half->ended();
  }));
  EXPECT_EQ(said, "abcover\n");
  const auto open = connect(*box_, 8082);
  ExecRequest look;
  look.argv = {"sh", "-c", "netstat -tn | grep -c ESTABLISHED"};
  EXPECT_EQ(box_->exec(look).output, "2\n");  // both ends of one
  box_->pause();
  EXPECT_EQ(code_of([&] { open->take(); }), ErrorCode::io);
  box_->resume();
  EXPECT_TRUE(eventually([&] { return box_->exec(look).output == "0\n"; }));  // none is left half open inside
  EXPECT_EQ(connect(*box_, 8081)->give("x"), 1U);                             // and the servers are there again
}

TEST_F(MicrovmProcess, ConnectionsToPortsAreLimited) {
  hear(*sh("mkdir -p /root/www; echo page >/root/www/index.html; httpd -p 8083 -h /root/www"));
  std::vector<std::shared_ptr<PortConnection>> all;
  for (int i = 0; i < 64; ++i) all.push_back(connect(*box_, 8083));
  EXPECT_EQ(code_of([&] { box_->connect_port(8083); }), ErrorCode::exhausted);
  all.resize(1);  // the others are reset, which makes room
  const auto page = connect(*box_, 8083);
  ASSERT_NE(page, nullptr);
  page->give("GET / HTTP/1.0\r\n\r\n");
  std::string said;
  EXPECT_TRUE(eventually([&] {
    while (const std::optional<std::string> bytes = page->take()) said += *bytes;
    return page->ended();
  }));
  EXPECT_NE(said.find("page"), std::string::npos) << said;
}

TEST_F(MicrovmProcess, FilesAreToldMadeMovedAndRemoved) {
  using Operation = FileCommand::Operation;
  const auto does = [&](FileCommand command) { return box_->files(command); };
  const FileEntry written = does({.operation = Operation::write, .path = "/root/a/b", .content = "12345"}).at(0);
  EXPECT_EQ(written.size, 5U);
  EXPECT_EQ(written.owner, "user");
  EXPECT_EQ(written.mode & 07777U, 0644U);
  hear(*sh("chmod 755 /root/a/b; ln -s b /root/a/link"));
  EXPECT_EQ(does({.operation = Operation::write, .path = "/root/a/b", .content = "1"}).at(0).mode & 07777U, 0755U);
  EXPECT_EQ(does({.operation = Operation::write, .path = "/root/r", .content = "", .root = true}).at(0).owner, "root");
  const FileEntry link = does({.operation = Operation::stat, .path = "/root/a/link"}).at(0);
  EXPECT_EQ(link.target, "b");
  EXPECT_EQ(link.type, FileEntry::Type::file);
  EXPECT_EQ(does({.operation = Operation::make_folder, .path = "/root/a/c/d"}).at(0).type, FileEntry::Type::folder);
  EXPECT_EQ(code_of([&] { does({.operation = Operation::make_folder, .path = "/root/a/c"}); }), ErrorCode::mismatch);
  EXPECT_EQ(does({.operation = Operation::list, .path = "/root/a"}).size(), 3U);
  EXPECT_EQ(does({.operation = Operation::list, .path = "/root/a", .depth = 2}).size(), 4U);
  EXPECT_EQ(does({.operation = Operation::move, .path = "/root/a", .to = "/root/new/e"}).at(0).path, "/root/new/e");
  EXPECT_EQ(code_of([&] { does({.operation = Operation::stat, .path = "/root/a"}); }), ErrorCode::not_found);
  EXPECT_EQ(code_of([&] { does({.operation = Operation::list, .path = "/root/a"}); }), ErrorCode::not_found);
  does({.operation = Operation::remove, .path = "/root/new"});
  EXPECT_EQ(code_of([&] { does({.operation = Operation::stat, .path = "/root/new"}); }), ErrorCode::not_found);
  does({.operation = Operation::remove, .path = "/root/new"});
  EXPECT_EQ(code_of([&] { does({.operation = Operation::stat, .path = "relative"}); }), ErrorCode::invalid_argument);
}

}  // namespace
}  // namespace tidelock::sandbox::testing

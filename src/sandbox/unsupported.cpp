// What a runtime does not do unless it says otherwise.

#include "base/error.hpp"
#include "sandbox/sandbox.hpp"

namespace tidelock::sandbox {
namespace {

[[noreturn]] void refuse(const char* what) {
  throw Error(ErrorCode::not_supported, fmt::format("this sandbox runtime cannot {}", what), "use the microVM runtime");
}

}  // namespace

std::shared_ptr<ProcessListener> Sandbox::start(const ProcessRequest& /*request*/) {
  refuse("start processes beside exec");
}
std::shared_ptr<ProcessListener> Sandbox::attach(int /*pid*/) {
  refuse("attach to processes");
}
std::vector<ProcessInfo> Sandbox::processes() {
  refuse("list processes");
}
void Sandbox::signal(int /*pid*/, int /*number*/) {
  refuse("signal processes");
}
void Sandbox::write_input(int /*pid*/, std::string_view /*bytes*/) {
  refuse("write to processes");
}
void Sandbox::close_input(int /*pid*/) {
  refuse("write to processes");
}
void Sandbox::resize(int /*pid*/, WindowSize /*size*/) {
  refuse("give processes a terminal");
}
std::vector<FileEntry> Sandbox::files(const FileCommand& /*command*/) {
  refuse("list, move or remove files other than by exec");
}
std::unique_ptr<FileWatch> Sandbox::watch(const WatchRequest& /*request*/) {
  refuse("watch folders");
}
std::shared_ptr<PortConnection> Sandbox::connect_port(int /*port*/) {
  refuse("connect to ports");
}
void Sandbox::pause() {
  refuse("pause a sandbox");
}
void Sandbox::resume() {
  refuse("resume a sandbox");
}
void Sandbox::checkpoint() {
  refuse("checkpoint a sandbox");
}
std::vector<std::unique_ptr<Sandbox>> Sandbox::fork(int /*count*/) {
  refuse("copy running processes");
}
void Sandbox::snapshot(const std::string& /*name*/) {
  refuse("keep snapshots");
}
void Sandbox::revert(const std::string& /*snapshot*/) {
  refuse("go back to a snapshot");
}
Defaults Sandbox::defaults() {
  return {};
}
void Sandbox::set_defaults(const Defaults& /*defaults*/) {
  refuse("keep defaults of processes");
}
void Sandbox::keep() {
  refuse("keep a sandbox beyond the program");
}
void Sandbox::remove() {
  refuse("remove a sandbox before its object goes");
}
std::unique_ptr<Sandbox> Runtime::open(const std::string& /*id*/) {
  refuse("open sandboxes of another program");
}
std::vector<Listing> Runtime::list() {
  refuse("list sandboxes");
}
void Runtime::remove_snapshot(const std::string& /*name*/) {
  refuse("keep snapshots");
}
Defaults Runtime::snapshot_defaults(const std::string& /*name*/) {
  refuse("keep snapshots");
}
void Runtime::name_snapshot(const std::string& /*existing*/, const std::string& /*name*/) {
  refuse("keep snapshots");
}
std::string Runtime::build(const Spec& spec) {
  return spec.image;  // nothing is prepared
}

std::vector<LogEntry> Runtime::log(const std::string& /*id*/) {
  refuse("keep logs");
}
// By value, for those that keep it. NOLINTNEXTLINE(performance-unnecessary-value-param)
void Runtime::note(const std::string& /*id*/, LogEntry /*entry*/) {
  refuse("keep logs");
}

}  // namespace tidelock::sandbox

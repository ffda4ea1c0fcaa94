// The agent: process 1 of a guest. A static program without exceptions, part of a template's memory image.
//
//   boot() modules, root, devices -> serve() one poll loop: frames from the program, output of processes, their ends
//
// It runs commands as user `agent` (uid 1000, home /root) and files as root: inside, nothing protects the guest from
// itself; what protects the host is the virtual machine. Process 1 cannot be killed from inside, and the kernel's
// out-of-memory killer spares it.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "sandbox/vm/frame.hpp"

namespace tidelock::sandbox::agent {

constexpr uid_t kUser = 1000;

// Says why on the console and ends the guest.
[[noreturn]] void die(const char* step, const char* what);

void boot();
int open_port();  // non-blocking

// In a child: becomes the command, or does the file operation. Descriptors 0, 1 and 2 are set up, or `terminal` names
// the one that they are to be.
[[noreturn]] void run_child(const vm::GuestRequest& request, const std::string& terminal);

// The file operations, in such a child; they end it with an exit code of FileExit.
[[noreturn]] void write_file(const vm::GuestRequest& request);
[[noreturn]] void read_file(const vm::GuestRequest& request);
[[noreturn]] void run_file_tool(const vm::GuestRequest& request);
[[noreturn]] void watch(const vm::GuestRequest& request);

// The same numbers as FileExit in sandbox/guest.hpp: the program reads both with one table.
constexpr int kNotFound = 10, kInvalid = 11, kExhausted = 12, kIo = 13, kExists = 14;
[[noreturn]] void quit(int code, const std::string& text);  // the child, saying why on standard error
[[noreturn]] void quit_file(const char* step, const std::string& path, int error);
void print(const std::string& text);  // on standard output
// Appends the fields of `path`, each with its zero byte; false when there is nothing there.
bool append_entry(const std::string& path, std::string& out);

// The texts of a request's field, each followed by a zero byte, as execve takes them. Points into `texts`.
std::vector<char*> pointers(std::string& texts);

[[noreturn]] void serve(int port);

}  // namespace tidelock::sandbox::agent

// The output of one running command: reads both pipes with bounded memory.
#pragma once

#include <exception>
#include <string>

#include "sandbox/sandbox.hpp"
#include "sandbox/wire.hpp"

namespace tidelock::sandbox {

// A sealed, read-only file in memory with this content, as a command's standard input: nobody has to feed it.
FileDescriptor make_input(std::string_view content);

class OutputPipe {
 public:
  OutputPipe(Stream stream, const ExecRequest& request);
  int command_end() const { return write_.get(); }
  void close_command_end() { write_.reset(); }
  int descriptor() const { return read_.get(); }  // -1 after the end
  // Reads once what there is and hands it to on_output (whose exception is kept, see `thrown`); false when nothing is
  // there or the end was reached. Past the limit bytes are thrown away.
  bool read_some();
  // After the command has ended: takes what its processes left in the pipe, which holds at most 1 MiB.
  void drain();
  FileDescriptor take() { return std::move(read_); }
  std::string& text() { return text_; }
  bool truncated() const { return truncated_; }
  std::exception_ptr thrown() const { return thrown_; }

 private:
  Stream stream_;
  const ExecRequest& request_;
  FileDescriptor read_, write_;
  std::string text_;
  bool truncated_ = false;
  std::exception_ptr thrown_;
};

}  // namespace tidelock::sandbox

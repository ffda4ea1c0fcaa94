// The templates of the API: their builds, one at a time on a thread of their own, and the files that clients send for
// them. Private to serve/e2b.
//
// On disk: e2b/builds/BUILD.json, a record of each of the latest builds; e2b/files/HASH, what clients sent for COPY,
// for a week. A build that the server's end interrupted is told as failed; the template of its name is what it was
// before.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "serve/e2b/envd.hpp"
#include "serve/e2b/sandboxes.hpp"
#include "serve/e2b/template_request.hpp"

namespace tidelock::serve::e2b {

class Templates {
 public:
  Templates(Sandboxes& sandboxes, SandboxesOptions options);
  ~Templates();  // ends the build that is under way
  Templates(const Templates&) = delete;
  Templates& operator=(const Templates&) = delete;

  // Whether it is answered here. `method` and `path` of a request.
  static bool answers(const std::string& path);
  // One that needs no key: it has a token in it that a request with a key was given.
  static bool is_upload(const std::string& path) { return path.starts_with("/upload/"); }
  // Throws ApiError.
  Reply answer(const Request& request);

 private:
  struct Job {
    std::string build;
    BuildStart start;
  };
  Reply request_build(const std::string& body);
  Reply start_build(const std::string& build, const std::string& body);
  Reply status(const std::string& build, const Request& request);
  Reply upload_place(const std::string& hash, const std::string& host);
  Reply take_upload(const std::string& token, const std::string& body);
  Reply alias(const std::string& name);
  Reply list();
  Reply tags(const std::string& name);
  Reply assign_tags(const std::string& body);
  Reply remove_tags(const std::string& body);
  Reply answer_below(const Request& request, const std::string& id, const std::string& rest);
  BuildRecord find(const std::string& build);
  void change(const std::string& build, bool save, const std::function<void(BuildRecord&)>& act);
  void add_line(const std::string& build, int step, const std::string& level, const std::string& text);
  void work();
  void run(const Job& job);
  void perform(const Job& job);
  std::filesystem::path file_of(const std::string& hash) const;

  Sandboxes& sandboxes_;
  SandboxesOptions options_;
  std::mutex mutex_;  // all below
  std::condition_variable changed_;
  RecordFolder records_;
  std::map<std::string, BuildRecord> builds_;
  std::map<std::string, std::string> uploads_;  // token -> hash
  std::deque<Job> queue_;
  std::atomic<bool> stop_ = false;
  std::thread worker_;
};

}  // namespace tidelock::serve::e2b

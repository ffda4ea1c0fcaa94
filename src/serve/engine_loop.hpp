// The thread that owns the engine. Requests go in through submit(), sampled tokens come out through each request's
// Generation; nothing else crosses. Private to serve/.
#pragma once

#include <condition_variable>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "engine/engine.hpp"
#include "serve/admission.hpp"
#include "serve/event_log.hpp"

namespace tidelock::serve {

struct SampledToken {
  std::size_t choice;  // which of the request's sequences
  std::int32_t token;
  float logprob;
  std::vector<engine::TokenLogprob> top;
  engine::Status status;    // after it
  std::int64_t cached = 0;  // tokens of the prompt that were not computed for this request
};

// What a request asks of the engine; see engine::Engine::add.
struct Wanted {
  std::vector<std::int32_t> prompt;
  std::vector<engine::SamplingParams> choices;
  std::string salt = {};
  int priority = 0;
  std::shared_ptr<const model::Adapter> adapter = nullptr;
};

// One request under way, between the engine's thread and the one that answers the client.
class Generation {
 public:
  // `wake` is called on the engine's thread whenever there is something to take; it must not block.
  Generation(Wanted wanted, std::function<void()> wake);

  // What came since the last call, in order.
  std::vector<SampledToken> take();
  // Empty, or why the engine gave this request up; nothing follows then.
  std::string failure() const;
  // Whether the engine has taken it into its queue or refused it; and, when it was refused because its first token
  // would come too late, after how many seconds to ask again (else 0).
  bool seen() const;
  int retry_after() const;

 private:
  friend class EngineLoop;
  const Wanted wanted_;
  const std::function<void()> wake_;
  std::vector<engine::SequenceId> ids_;  // of the engine's thread
  bool prefetched_ = false;              // of the engine's thread
  mutable std::mutex mutex_;
  std::vector<SampledToken> tokens_;
  std::string failure_;
  bool seen_ = false;
  int retry_after_ = 0;
};

struct EngineLoopOptions {
  std::size_t running = 64;   // sequences that run at once
  std::size_t waiting = 256;  // requests that wait for their turn (admission.hpp)
  engine::EngineOptions engine = {.step_seconds = 0.02, .reuse = true};
  double first_token_seconds = 0;              // requests whose first token is expected later are refused; 0: none
  std::shared_ptr<EventLog> events = nullptr;  // told of every decision, here and in the engine; null: none
};

// What the loop counts; read by any thread.
struct EngineLoopCounters {
  std::int64_t running = 0, waiting = 0;  // sequences, requests; now
  bool paused = false, asleep = false;
  std::int64_t prompt_tokens = 0, sampled_tokens = 0, steps = 0, cancelled = 0, failed_steps = 0, refused = 0;
  std::int64_t state_bytes = 0, state_bytes_used = 0, set_back = 0, written_out = 0;
  std::int64_t prefetches = 0, prefetched_tokens = 0, prefetches_late = 0;
  // Of engine::Engine::Counters, with the loop's own work in the first two.
  double step_seconds = 0, schedule_seconds = 0, keep_seconds = 0;
  state::PrefixCacheCounters reuse;
  state::DiskCounters disk;
};

// What becomes of the sequences that run when the loop is paused: they are run to their end, stand still until it
// resumes, or are given up. New requests wait in any case.
enum class Pause : std::uint8_t { wait, keep, abort };

class EngineLoop {
 public:
  // The model and the team must outlive the loop; the team is the loop's alone.
  EngineLoop(const model::Model& model, Team& team, const EngineLoopOptions& options);
  ~EngineLoop();  // stops
  // Ends the thread between two steps and lets go of every request; what is submitted or cancelled later is ignored.
  // Kept states are written to disk, where there is one.
  void stop();

  // Takes the request into the queue. Throws Error{exhausted} when the queue is full, Error{invalid_argument} for a
  // request whose state could never fit.
  void submit(const std::shared_ptr<Generation>& generation);
  // Frees the request's sequences, at the latest when the step under way ends. Unknown ones, and those that ended, are
  // ignored.
  void cancel(const std::shared_ptr<Generation>& generation);
  // Frees one choice's sequence in the same way; the others go on.
  void cancel(const std::shared_ptr<Generation>& generation, std::size_t choice);

  // Both return at once; counters() says how far it is.
  void pause(Pause mode);
  void resume();
  // As pause(); when nothing runs any more, the memory of states goes back to the system (engine::Engine::rest) and the
  // loop is asleep until it resumes.
  void sleep(Pause mode);
  // Forgets every kept state, on disk too. Returns when that is done: after the step that runs.
  void forget();
  // See engine::Engine::prefetch; returns after the step that runs. Nothing happens while the loop sleeps.
  engine::Engine::Prefetched prefetch(Wanted wanted);

  std::int64_t longest_sequence() const { return engine_.longest_sequence(); }
  EngineLoopCounters counters() const;

 private:
  struct Cancel {
    std::shared_ptr<Generation> generation;
    std::optional<std::size_t> choice;
  };
  struct Hint {
    Wanted wanted;
    std::promise<engine::Engine::Prefetched> done;
  };
  struct Orders {  // for the engine's thread
    std::vector<Cancel> cancels;
    std::vector<std::promise<void>> forgets;
    std::vector<Hint> hints;
    bool abort = false, stand_still = false, no_more = false, rest = false;
  };
  void run();
  bool has_work() const;  // locked
  std::optional<Orders> next_orders();
  void count();  // locked
  void admit();
  void classify();
  double expect_first_token(std::int64_t tokens) const;
  Room room_for(std::size_t queued) const;  // index into queue_
  static engine::EngineOptions observed(const EngineLoopOptions& options);
  void apply_cancels(const std::vector<Cancel>& cancels);
  void drop(engine::SequenceId id, bool spoilt = false);
  void deliver(const std::vector<engine::Event>& events);
  void take_hints(std::vector<Hint>& hints);
  void prefetch_queued();
  void fall_asleep();
  void wind_up();
  void give_up_all(const std::string& why, bool spoilt);

  const EngineLoopOptions options_;
  engine::Engine engine_;
  struct Place {
    std::shared_ptr<Generation> generation;
    std::size_t choice;
  };
  std::map<engine::SequenceId, Place> running_;  // of the engine's thread
  // Requests that the engine's thread has seen: what it decides by, and the request, in the order in which they came.
  std::vector<WaitingRequest> queue_;
  std::vector<std::shared_ptr<Generation>> queued_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::shared_ptr<Generation>> arrived_;  // not seen yet
  std::size_t waiting_ = 0;                           // these and queued_
  std::vector<Cancel> cancels_;
  std::vector<std::promise<void>> forgets_;
  std::vector<Hint> hints_;
  std::optional<Pause> pause_;
  bool abort_ = false, rest_ = false;  // still to be done
  bool stop_ = false;
  EngineLoopCounters counters_;
  double own_seconds_ = 0;  // of the engine's thread: the loop's work around steps

  std::thread thread_;  // last: it uses all of the above
};

}  // namespace tidelock::serve

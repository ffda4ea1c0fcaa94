#include "serve/engine_loop.hpp"

#include <algorithm>
#include <cmath>

#include "base/base.hpp"
#include "base/clock.hpp"

namespace tidelock::serve {

Generation::Generation(Wanted wanted, std::function<void()> wake)
    : wanted_(std::move(wanted)), wake_(std::move(wake)) {}

std::vector<SampledToken> Generation::take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(tokens_, {});
}

std::string Generation::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

bool Generation::seen() const {
  const std::lock_guard lock(mutex_);
  return seen_;
}

int Generation::retry_after() const {
  const std::lock_guard lock(mutex_);
  return retry_after_;
}

engine::EngineOptions EngineLoop::observed(const EngineLoopOptions& options) {
  engine::EngineOptions out = options.engine;
  if (options.events != nullptr) out.observer = options.events.get();
  return out;
}

EngineLoop::EngineLoop(const model::Model& model, Team& team, const EngineLoopOptions& options)
    : options_(options), engine_(model, team, observed(options)), thread_([this] { run(); }) {}

EngineLoop::~EngineLoop() {
  stop();
}

void EngineLoop::stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    arrived_.clear();
    cancels_.clear();
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
  running_.clear();
  queue_.clear();
  queued_.clear();
}

void EngineLoop::submit(const std::shared_ptr<Generation>& generation) {
  engine_.check_fits(std::ssize(generation->wanted_.prompt), generation->wanted_.choices);
  {
    const std::lock_guard lock(mutex_);
    if (stop_) return;
    if (waiting_ >= options_.waiting)
      throw Error(ErrorCode::exhausted, fmt::format("{} requests wait already", waiting_), "try again later");
    arrived_.push_back(generation);
    ++waiting_;
  }
  changed_.notify_one();
}

void EngineLoop::cancel(const std::shared_ptr<Generation>& generation) {
  {
    const std::lock_guard lock(mutex_);
    if (stop_) return;
    if (std::erase(arrived_, generation) > 0) {
      --waiting_;
      ++counters_.cancelled;
      return;
    }
    cancels_.push_back({generation, std::nullopt});
  }
  changed_.notify_one();
}

void EngineLoop::cancel(const std::shared_ptr<Generation>& generation, std::size_t choice) {
  {
    const std::lock_guard lock(mutex_);
    if (stop_) return;
    cancels_.push_back({generation, choice});
  }
  changed_.notify_one();
}

EngineLoopCounters EngineLoop::counters() const {
  const std::lock_guard lock(mutex_);
  EngineLoopCounters now = counters_;
  now.waiting = static_cast<std::int64_t>(waiting_);
  return now;
}

void EngineLoop::pause(Pause mode) {
  {
    const std::lock_guard lock(mutex_);
    pause_ = mode;
    abort_ = abort_ || mode == Pause::abort;
    counters_.paused = true;
  }
  changed_.notify_one();
}

void EngineLoop::sleep(Pause mode) {
  pause(mode);
  {
    const std::lock_guard lock(mutex_);
    rest_ = true;
  }
  changed_.notify_one();
}

void EngineLoop::resume() {
  {
    const std::lock_guard lock(mutex_);
    pause_.reset();
    rest_ = false;
    counters_.paused = counters_.asleep = false;
  }
  changed_.notify_one();
}

void EngineLoop::forget() {
  std::future<void> done;
  {
    const std::lock_guard lock(mutex_);
    if (stop_) return;
    done = forgets_.emplace_back().get_future();
  }
  changed_.notify_one();
  done.wait();
}

engine::Engine::Prefetched EngineLoop::prefetch(Wanted wanted) {
  std::future<engine::Engine::Prefetched> done;
  {
    const std::lock_guard lock(mutex_);
    if (stop_) return {};
    done = hints_.emplace_back(Hint{std::move(wanted), {}}).done.get_future();
  }
  changed_.notify_one();
  return done.get();
}

void EngineLoop::count() {
  counters_.running = static_cast<std::int64_t>(running_.size());
  counters_.state_bytes = static_cast<std::int64_t>(engine_.state_bytes());
  counters_.state_bytes_used = static_cast<std::int64_t>(engine_.state_bytes_used());
  const auto counted = engine_.counters();
  counters_.steps = counted.steps;
  counters_.set_back = counted.set_back;
  counters_.written_out = counted.written_out;
  counters_.step_seconds = counted.step_seconds + own_seconds_;
  counters_.schedule_seconds = counted.schedule_seconds + own_seconds_;
  counters_.keep_seconds = counted.keep_seconds;
  counters_.prefetches = counted.prefetches;
  counters_.prefetched_tokens = counted.prefetched_tokens;
  counters_.prefetches_late = counted.prefetches_late;
  counters_.reuse = engine_.reuse_counters();
  counters_.disk = engine_.disk_counters();
}

bool EngineLoop::has_work() const {
  if (stop_ || abort_ || !cancels_.empty() || !forgets_.empty() || !hints_.empty()) return true;
  if (rest_ && running_.empty()) return true;
  if (pause_) return *pause_ == Pause::wait && !running_.empty();
  return waiting_ > 0 || !running_.empty();
}

// Waits for something to do. Nothing: it is to end.
std::optional<EngineLoop::Orders> EngineLoop::next_orders() {
  std::unique_lock lock(mutex_);
  count();
  changed_.wait(lock, [this] { return has_work(); });
  Orders orders{std::exchange(cancels_, {}),
                std::exchange(forgets_, {}),
                std::exchange(hints_, {}),
                std::exchange(abort_, false),
                pause_ && *pause_ != Pause::wait,
                pause_.has_value(),
                rest_};
  if (!stop_) return orders;
  for (auto& forget : orders.forgets) forget.set_value();
  for (Hint& hint : orders.hints) hint.done.set_value({});
  return std::nullopt;
}

void EngineLoop::run() {
  set_flush_to_zero();
  while (auto orders = next_orders()) {
    const auto began = std::chrono::steady_clock::now();
    apply_cancels(orders->cancels);
    if (orders->abort) give_up_all("an administrator paused the server", false);
    if (!orders->forgets.empty()) engine_.forget();
    for (auto& forget : orders->forgets) forget.set_value();
    take_hints(orders->hints);
    if (orders->rest && running_.empty()) fall_asleep();
    if (orders->stand_still) continue;
    if (!orders->no_more) {
      classify();
      admit();
      prefetch_queued();
    }
    own_seconds_ += seconds_since(began);
    try {
      const auto events = engine_.step();
      const auto stepped = std::chrono::steady_clock::now();
      deliver(events);
      own_seconds_ += seconds_since(stepped);
    } catch (const std::exception& error) {
      // Which sequence the step failed on is not known: none of them may go on with half a step in its state.
      spdlog::error("a step of the engine failed: {}", error.what());
      give_up_all(error.what(), true);
      const std::lock_guard lock(mutex_);
      ++counters_.failed_steps;
    }
  }
  wind_up();
}

void EngineLoop::take_hints(std::vector<Hint>& hints) {
  bool asleep = false;
  {
    const std::lock_guard lock(mutex_);
    asleep = counters_.asleep || rest_;
  }
  for (Hint& hint : hints) {
    const Wanted& wanted = hint.wanted;
    hint.done.set_value(asleep ? engine::Engine::Prefetched{}
                               : engine_.prefetch(wanted.prompt, wanted.adapter, wanted.salt));
  }
}

// Those that are next, while they wait for room.
void EngineLoop::prefetch_queued() {
  constexpr std::size_t kNext = 4;
  if (options_.engine.disk_folder.empty()) return;
  for (std::size_t i = 0; i < std::min(kNext, queued_.size()); ++i) {
    const Wanted& wanted = queued_[i]->wanted_;
    if (!std::exchange(queued_[i]->prefetched_, true)) engine_.prefetch(wanted.prompt, wanted.adapter, wanted.salt);
  }
}

void EngineLoop::fall_asleep() {
  engine_.rest();
  const std::lock_guard lock(mutex_);
  counters_.asleep = rest_;  // unless it was woken meanwhile
  rest_ = false;
}

// What the requests that end here have computed is kept, too: their clients will ask again.
void EngineLoop::wind_up() {
  if (options_.engine.disk_folder.empty()) return;
  const std::int64_t before = engine_.disk_counters().stored_bytes;
  while (!running_.empty()) drop(running_.begin()->first);
  engine_.write_back();
  const state::DiskCounters disk = engine_.disk_counters();
  spdlog::info("{}: {} states, {} in all, of which {} were written now", options_.engine.disk_folder.string(),
               disk.checkpoints, bytes_text(static_cast<std::size_t>(disk.used_bytes)),
               bytes_text(static_cast<std::size_t>(disk.stored_bytes - before)));
}

// Takes what arrived into the queue.
void EngineLoop::classify() {
  std::vector<std::shared_ptr<Generation>> arrived;
  {
    const std::lock_guard lock(mutex_);
    arrived.swap(arrived_);
  }
  for (auto& generation : arrived) {
    const Wanted& wanted = generation->wanted_;
    const std::int64_t tokens = engine_.uncached_tokens(wanted.prompt, wanted.adapter, wanted.salt);
    const double limit = options_.first_token_seconds, expected = limit > 0 ? expect_first_token(tokens) : 0;
    const bool late = expected > limit;
    {
      const std::lock_guard lock(generation->mutex_);
      generation->seen_ = true;
      if (late) {
        generation->failure_ =
            fmt::format("its first token would come in about {:.0f} s; the limit is {:g} s", expected, limit);
        generation->retry_after_ = std::max(1, static_cast<int>(std::ceil(expected - limit)));
      }
    }
    if (limit > 0) generation->wake_();
    if (late) {
      const std::lock_guard lock(mutex_);
      --waiting_;
      ++counters_.refused;
      continue;
    }
    queue_.push_back({engine::class_of(tokens), wanted.priority, 0, tokens});
    queued_.push_back(std::move(generation));
  }
}

// With all that runs and waits before it.
double EngineLoop::expect_first_token(std::int64_t tokens) const {
  auto ahead = engine_.pending_tokens();
  for (const WaitingRequest& request : queue_) ahead[static_cast<std::size_t>(request.prompt)] += request.tokens;
  const double speed = engine_.prefill_tokens_per_second(), expected = expected_first_token(tokens, ahead, speed);
  if (options_.events != nullptr)
    options_.events->expected({tokens, ahead, speed, expected, options_.first_token_seconds});
  return expected;
}

Room EngineLoop::room_for(std::size_t queued) const {
  const Wanted& wanted = queued_[queued]->wanted_;
  if (running_.empty()) return Room::enough;
  if (running_.size() + wanted.choices.size() > options_.running) return Room::none;
  return engine_.room_for(std::ssize(wanted.prompt), std::ssize(wanted.choices), queue_[queued].prompt);
}

void EngineLoop::admit() {
  while (true) {
    std::map<std::size_t, Room> rooms;
    const auto index = next_to_admit(queue_, [&](std::size_t i) { return rooms[i] = room_for(i); });
    if (options_.events != nullptr && !queue_.empty()) options_.events->admitted(queue_, rooms, index);
    if (!index) return;
    for (std::size_t i = 0; i < *index; ++i)
      if (const auto asked = rooms.find(i); asked == rooms.end() || asked->second != Room::capped) ++queue_[i].passed;
    const auto place = static_cast<std::ptrdiff_t>(*index);
    const auto next = queued_[*index];
    queue_.erase(queue_.begin() + place);
    queued_.erase(queued_.begin() + place);
    {
      const std::lock_guard lock(mutex_);
      --waiting_;
      counters_.prompt_tokens += std::ssize(next->wanted_.prompt);
    }
    try {
      const Wanted& wanted = next->wanted_;
      next->ids_ = engine_.add(wanted.prompt, wanted.choices, wanted.adapter, wanted.salt, wanted.priority);
      for (std::size_t i = 0; i < next->ids_.size(); ++i) running_[next->ids_[i]] = {next, i};
    } catch (const std::exception& error) {
      const std::lock_guard lock(next->mutex_);
      next->failure_ = error.what();
      next->wake_();
    }
  }
}

void EngineLoop::drop(engine::SequenceId id, bool spoilt) {
  if (running_.erase(id) > 0) engine_.remove(id, spoilt);
}

void EngineLoop::apply_cancels(const std::vector<Cancel>& cancels) {
  for (const Cancel& cancel : cancels) {
    bool any = false;
    if (const auto at = std::ranges::find(queued_, cancel.generation); at != queued_.end() && !cancel.choice) {
      queue_.erase(queue_.begin() + (at - queued_.begin()));
      queued_.erase(at);
      any = true;
      const std::lock_guard lock(mutex_);
      --waiting_;
    }
    for (std::size_t i = 0; i < cancel.generation->ids_.size(); ++i) {
      if (cancel.choice && *cancel.choice != i) continue;
      any = any || running_.contains(cancel.generation->ids_[i]);
      drop(cancel.generation->ids_[i]);
    }
    const std::lock_guard lock(mutex_);
    if (any && !cancel.choice) ++counters_.cancelled;
  }
}

void EngineLoop::deliver(const std::vector<engine::Event>& events) {
  {
    const std::lock_guard lock(mutex_);
    counters_.sampled_tokens += static_cast<std::int64_t>(events.size());
  }
  for (const engine::Event& event : events) {
    const auto found = running_.find(event.sequence);
    if (found == running_.end()) continue;
    const Place place = found->second;
    {
      const std::lock_guard lock(place.generation->mutex_);
      place.generation->tokens_.push_back(
          {place.choice, event.token, event.logprob, event.top, event.status, engine_.cached_tokens(event.sequence)});
    }
    if (event.status == engine::Status::stopped || event.status == engine::Status::length) drop(event.sequence);
    place.generation->wake_();
  }
}

void EngineLoop::give_up_all(const std::string& why, bool spoilt) {
  while (!running_.empty()) {
    const auto generation = running_.begin()->second.generation;
    for (const engine::SequenceId id : generation->ids_) drop(id, spoilt);
    {
      const std::lock_guard lock(generation->mutex_);
      generation->failure_ = why;
    }
    generation->wake_();
  }
}

}  // namespace tidelock::serve

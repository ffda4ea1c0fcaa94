#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <numeric>

#include "base/error.hpp"
#include "train/train.hpp"

namespace tidelock::train {
namespace {

constexpr std::int64_t kLogitRows = 128;  // rows whose logits are held at once

// Lets threads finish in any order but add their results in ascending index order. Once a micro-batch has failed, all
// that wait fail with its exception: whichever thread the team hears first, the caller learns the cause.
class Turnstile {
 public:
  void wait(std::int64_t index) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return error_ != nullptr || next_ == index; });
    if (error_ != nullptr) std::rethrow_exception(error_);
  }
  void pass() {
    const std::lock_guard lock(mutex_);
    ++next_;
    changed_.notify_all();
  }
  void break_down(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    if (error_ == nullptr) error_ = std::move(error);
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::int64_t next_ = 0;
  std::exception_ptr error_;
};

// Sequences [begin, end) of one micro-batch.
struct MicroBatch {
  std::size_t begin, end;
};

std::vector<MicroBatch> pack(std::span<const TrainSequence> sequences, std::int64_t limit) {
  std::vector<MicroBatch> out;
  std::int64_t tokens = 0;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const auto n = static_cast<std::int64_t>(sequences[i].tokens.size());
    if (out.empty() || tokens + n > limit) {
      out.push_back({i, i});
      tokens = 0;
    }
    out.back().end = i + 1;
    tokens += n;
  }
  return out;
}

void check(std::span<const TrainSequence> sequences) {
  for (const auto& s : sequences) {
    if (s.tokens.empty() || s.mask.size() != s.tokens.size())
      fail(ErrorCode::internal, "a sequence of {} tokens has a mask of {}", s.tokens.size(), s.mask.size());
    if (s.mask[0] != 0) fail(ErrorCode::internal, "the first token of a sequence has no log-probability");
  }
}

// One value for each masked token.
std::vector<std::vector<float>> room_for_logprobs(std::span<const TrainSequence> sequences) {
  std::vector<std::vector<float>> out;
  for (const auto& s : sequences)
    out.emplace_back(static_cast<std::size_t>(std::accumulate(s.mask.begin(), s.mask.end(), 0)));
  return out;
}

// A masked token: the hidden row that predicts it, its id, and where its log-probability goes.
struct Target {
  std::int64_t row;
  std::int32_t token;
  std::size_t sequence, index;
};

}  // namespace

struct GradientWorker::Impl {
  const model::Model& model;
  model::StateLayout layout;
  Team& team;
  state::Pool pool;
  struct Thread {
    model::Workspace workspace;
    std::vector<state::SequenceState> states;
    std::vector<float> logits, d_logits, hidden, d_rows, d_hidden, gradient;
  };
  std::mutex mutex;
  std::vector<std::unique_ptr<Thread>> idle;

  Impl(const model::Model& m, Team& t) : model(m), layout(m.config()), team(t), pool(layout) {}

  std::unique_ptr<Thread> borrow() {
    const std::lock_guard lock(mutex);
    if (idle.empty()) return std::make_unique<Thread>();
    auto thread = std::move(idle.back());
    idle.pop_back();
    return thread;
  }
  void give(std::unique_ptr<Thread> thread) {
    const std::lock_guard lock(mutex);
    idle.push_back(std::move(thread));
  }

  std::vector<model::Span> make_spans(Thread& thread, std::span<const TrainSequence> sequences, MicroBatch batch) {
    std::vector<model::Span> spans;
    while (thread.states.size() < batch.end - batch.begin) thread.states.emplace_back(pool);
    for (std::size_t i = batch.begin; i < batch.end; ++i) {
      auto& state = thread.states[i - batch.begin];
      state.reset();
      spans.push_back({state.extend(static_cast<std::int64_t>(sequences[i].tokens.size())), 0, sequences[i].tokens,
                       sequences[i].adapter});
    }
    return spans;
  }

  static std::vector<Target> targets(std::span<const TrainSequence> sequences, MicroBatch batch) {
    std::vector<Target> out;
    std::int64_t row = 0;
    for (std::size_t s = batch.begin; s < batch.end; ++s) {
      std::size_t index = 0;
      for (std::size_t t = 0; t < sequences[s].tokens.size(); ++t, ++row)
        if (sequences[s].mask[t] != 0) out.push_back({row - 1, sequences[s].tokens[t], s, index++});
    }
    return out;
  }

  // Logits of the rows of `some` targets into thread.logits; their hidden rows into thread.hidden.
  void head(Thread& thread, const float* hidden, std::span<const Target> some) {
    const std::int64_t width = model.config().hidden, vocab = model.config().vocab,
                       n = static_cast<std::int64_t>(some.size());
    thread.hidden.resize(static_cast<std::size_t>(n * width));
    thread.logits.resize(static_cast<std::size_t>(n * vocab));
    for (std::int64_t i = 0; i < n; ++i)
      std::copy_n(hidden + some[static_cast<std::size_t>(i)].row * width, width, thread.hidden.data() + i * width);
    model::head_forward(model, thread.hidden.data(), n, thread.logits.data(), thread.workspace, solo_team());
  }

  template <typename F>
  static void for_pieces(std::span<const Target> all, F&& body) {
    for (std::size_t i = 0; i < all.size(); i += kLogitRows)
      body(all.subspan(i, std::min<std::size_t>(kLogitRows, all.size() - i)));
  }

  void score_targets(Thread& thread, const float* hidden, std::span<const Target> all,
                     std::vector<std::vector<float>>& logprobs) {
    const std::int64_t vocab = model.config().vocab;
    for_pieces(all, [&](std::span<const Target> some) {
      head(thread, hidden, some);
      for (std::size_t i = 0; i < some.size(); ++i)
        logprobs[some[i].sequence][some[i].index] =
            model::token_logprob(thread.logits.data() + static_cast<std::int64_t>(i) * vocab, vocab, some[i].token);
    });
  }

  // d loss / d logprob -> d_hidden of the batch's rows, through the soft-max and the head.
  void head_gradient(Thread& thread, const float* hidden, std::span<const Target> all,
                     const std::vector<std::vector<float>>& d_logprobs, std::size_t first_sequence,
                     model::Gradients& gradients) {
    const std::int64_t width = model.config().hidden, vocab = model.config().vocab;
    for_pieces(all, [&](std::span<const Target> some) {
      head(thread, hidden, some);
      thread.d_logits.assign(thread.logits.size(), 0.0F);
      thread.d_rows.assign(thread.hidden.size(), 0.0F);
      for (std::size_t i = 0; i < some.size(); ++i) {
        const float* logits = thread.logits.data() + static_cast<std::int64_t>(i) * vocab;
        float* d = thread.d_logits.data() + static_cast<std::int64_t>(i) * vocab;
        const float dl = d_logprobs[some[i].sequence - first_sequence][some[i].index];
        if (dl == 0.0F) continue;
        numerics::softmax_accumulate(logits, vocab, numerics::log_sum_exp(logits, vocab), -dl, d);
        d[some[i].token] += dl;
      }
      model::head_backward(model, thread.hidden.data(), static_cast<std::int64_t>(some.size()), thread.d_logits.data(),
                           thread.d_rows.data(), gradients, solo_team());
      for (std::size_t i = 0; i < some.size(); ++i)
        numerics::axpy(1.0F, thread.d_rows.data() + static_cast<std::int64_t>(i) * width, width,
                       thread.d_hidden.data() + some[i].row * width);
    });
  }
};

GradientWorker::GradientWorker(const model::Model& model, Team& team) : impl_(std::make_unique<Impl>(model, team)) {}
GradientWorker::~GradientWorker() {
  impl_->idle.clear();  // sequences give their memory back before the pool goes
}

std::size_t GradientWorker::reserved_bytes() const {
  std::size_t bytes = impl_->pool.allocated_bytes();
  for (const auto& thread : impl_->idle)
    bytes += thread->workspace.reserved_bytes() + thread->gradient.size() * sizeof(float);
  return bytes;
}

GradientResult GradientWorker::run(std::span<const TrainSequence> sequences, const SequenceLoss& loss,
                                   const GradientOptions& options, const GradientView& view, std::span<float> flat) {
  check(sequences);
  Impl& impl = *impl_;
  GradientResult result;
  result.logprobs = room_for_logprobs(sequences);
  for (const TrainSequence& s : sequences) result.tokens += static_cast<std::int64_t>(s.tokens.size());
  const auto& config = impl.model.config();
  const auto load_size =
      static_cast<std::size_t>(config.layer_count()) * static_cast<std::size_t>(config.experts.count);
  result.expert_load.assign(load_size, 0);
  const std::vector<MicroBatch> batches = pack(sequences, options.micro_batch_tokens);
  const model::ForwardOptions forward_options{options.tape, options.dense_attention};
  Turnstile turnstile;

  const auto one = [&](std::int64_t index) {
    auto thread = impl.borrow();
    const MicroBatch batch = batches[static_cast<std::size_t>(index)];
    const auto spans = impl.make_spans(*thread, sequences, batch);
    const float* hidden =
        model::forward(impl.model, impl.layout, spans, forward_options, thread->workspace, solo_team());
    const std::vector<Target> targets = Impl::targets(sequences, batch);
    impl.score_targets(*thread, hidden, targets, result.logprobs);
    double batch_loss = 0;
    std::vector<std::vector<float>> d_logprobs;
    for (std::size_t s = batch.begin; s < batch.end; ++s) {
      d_logprobs.emplace_back(result.logprobs[s].size(), 0.0F);
      batch_loss += loss(s, result.logprobs[s], d_logprobs.back());
    }
    std::int64_t rows = 0;
    for (const auto& span : spans) rows += static_cast<std::int64_t>(span.tokens.size());
    thread->d_hidden.assign(static_cast<std::size_t>(rows * config.hidden), 0.0F);
    thread->gradient.assign(flat.size(), 0.0F);
    model::Gradients gradients = view(thread->gradient);
    gradients.index_loss_weight = options.index_loss_weight;
    gradients.expert_load.assign(load_size, 0);
    impl.head_gradient(*thread, hidden, targets, d_logprobs, batch.begin, gradients);
    model::backward(impl.model, impl.layout, spans, forward_options, thread->d_hidden.data(), gradients,
                    thread->workspace, solo_team());
    turnstile.wait(index);
    for (std::size_t i = 0; i < flat.size(); ++i) flat[i] += thread->gradient[i];
    result.loss += batch_loss;
    result.index_loss += gradients.index_loss;
    for (std::size_t i = 0; i < load_size; ++i) result.expert_load[i] += gradients.expert_load[i];
    turnstile.pass();
    impl.give(std::move(thread));
  };
  impl.team.parallel(static_cast<std::int64_t>(batches.size()), 1, [&](std::int64_t begin, std::int64_t) {
    try {
      one(begin);
    } catch (...) {
      turnstile.break_down(std::current_exception());
      throw;
    }
  });
  return result;
}

std::vector<std::vector<float>> GradientWorker::score(std::span<const TrainSequence> sequences,
                                                      const GradientOptions& options) {
  check(sequences);
  Impl& impl = *impl_;
  std::vector<std::vector<float>> logprobs = room_for_logprobs(sequences);
  const std::vector<MicroBatch> batches = pack(sequences, options.micro_batch_tokens);
  impl.team.parallel(static_cast<std::int64_t>(batches.size()), 1, [&](std::int64_t index, std::int64_t) {
    auto thread = impl.borrow();
    const MicroBatch batch = batches[static_cast<std::size_t>(index)];
    const auto spans = impl.make_spans(*thread, sequences, batch);
    const float* hidden =
        model::forward(impl.model, impl.layout, spans, {model::TapeMode::none, options.dense_attention},
                       thread->workspace, solo_team());
    impl.score_targets(*thread, hidden, Impl::targets(sequences, batch), logprobs);
    impl.give(std::move(thread));
  });
  return logprobs;
}

}  // namespace tidelock::train

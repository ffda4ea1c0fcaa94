#include "rl/run.hpp"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "base/base.hpp"
#include "rl/atif.hpp"
#include "rl/checkpoint.hpp"
#include "rl/learner.hpp"
#include "rl/metrics.hpp"
#include "rl/unfinished.hpp"

namespace tidelock::rl {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr double kFrameSeconds = 0.12;  // between frames of the view

double tool_rate(std::span<const Trajectory> trajectories) {
  double calls = 0;
  for (const auto& t : trajectories) calls += static_cast<double>(t.tool_calls);
  return trajectories.empty() ? 0 : calls / static_cast<double>(trajectories.size());
}

// The command of a shell call, for people; other arguments as they are.
std::string shell_command(const std::string& arguments) {
  const auto parsed = nlohmann::json::parse(arguments, nullptr, false);
  const bool plain = parsed.is_object() && parsed.contains("command") && parsed["command"].is_string();
  return plain ? parsed["command"].get<std::string>() : arguments;
}

EvaluationResult evaluate(Rollout& rollout, const TaskMixture& tasks, const Settings& s,
                          const std::shared_ptr<const model::Adapter>& adapter, std::uint64_t version,
                          const Rollout::Progress& progress) {
  const auto start = Clock::now();
  const auto k = static_cast<int>(s.integer("eval.samples"));
  const auto groups = draw_groups(tasks, Split::held_out, static_cast<std::uint64_t>(s.integer("eval.seed")), 0,
                                  s.integer("eval.tasks"), k);
  const RolloutResult result = rollout.run(groups, adapter, version, progress);
  check_gradings(result.trajectories, "evaluation");
  std::vector<TaskRewards> rewards(groups.size());
  std::map<std::string, std::vector<TaskRewards>> families;
  EvaluationResult out;
  for (const auto& t : result.trajectories) {
    rewards[static_cast<std::size_t>(t.group)].push_back(t.reward);
    out.failed += t.status == Status::failed ? 1 : 0;
  }
  for (std::size_t g = 0; g < groups.size(); ++g) families[groups[g].episode.family].push_back(rewards[g]);
  out.evaluation = evaluate_rewards(rewards, k);
  for (const auto& [name, family] : families) out.by_family.emplace_back(name, evaluate_rewards(family, k));
  out.tool_rate = tool_rate(result.trajectories);
  out.seconds = seconds_since(start);
  return out;
}

// What a run writes into its folder. A new run starts where none of it is: it never removes what others left.
void check_new_folder(const fs::path& folder) {
  for (const char* name : {"metrics.jsonl", "recipe.toml", "checkpoints", "trajectories", "tensorboard", "adapter"})
    if (fs::exists(fs::symlink_status(folder / name)))
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("{} holds a run already: {} is there", folder.string(), name),
                  "choose another --out, or go on with --resume");
}

// Locked before anything is looked at or written, so that two runs never take each other's folder for free.
std::unique_ptr<FolderLock> take_folder(const RunOptions& options) {
  fs::create_directories(options.directory);
  auto lock = std::make_unique<FolderLock>(options.directory);
  if (!options.resume) check_new_folder(options.directory);
  return lock;
}

std::unique_ptr<sandbox::Runtime> make_runtime(const Settings& s) {
  if (s.text("sandbox.runtime") == "container") return sandbox::make_container_runtime();
  sandbox::MicrovmOptions options;
  options.directory = s.text("sandbox.directory");
  if (options.directory.empty())
    options.directory = fs::temp_directory_path() / fmt::format("tidelock-microvm-{}", ::getuid());
  return sandbox::make_microvm_runtime(options);
}

// Everything that lives through a run.
class Run {
 public:
  Run(const Settings& settings, const RunOptions& options)
      : s_(settings),
        options_(options),
        lock_(take_folder(options)),
        team_(options.threads),
        model_(model::load_model(s_.text("model.path"), true)),
        tokenizer_(model::Tokenizer::load(s_.text("model.path"))),
        tasks_(rl_tasks(s_)),
        runtime_(make_runtime(s_)),
        rollout_(*model_, tokenizer_, *runtime_, team_, rollout_options(s_)),
        learner_(*model_, team_, s_),
        seed_(static_cast<std::uint64_t>(s_.integer("rl.seed"))) {}

  RunSummary execute() {
    begin();
    const std::int64_t steps = s_.integer("rl.steps"), every = s_.integer("eval.every");
    const std::int64_t last = options_.stop_after > 0 ? std::min(steps, options_.stop_after) : steps;
    if (state_.step == 0) evaluate_and_record();
    while (state_.step < last) {
      step();
      if (state_.step == steps || (every > 0 && state_.step % every == 0)) evaluate_and_record();
      if (state_.step == last || state_.step % s_.integer("checkpoint.every") == 0) save();
    }
    model::save_adapter(*model_, learner_.adapter_values(), options_.directory / "adapter", s_.text("model.path"));
    show("done", 1);
    return {state_.step,
            state_.compared_tokens,
            state_.mismatch_tokens,
            state_.evaluations,
            learner_.adapter_values().sha256(*model_),
            state_.elapsed_s};
  }

 private:
  // One step of the algorithm.
  void step() {
    const auto start = Clock::now();
    make_room();
    // In the last step nothing is set aside, as nothing would go on with it.
    const bool last = state_.step + 1 == s_.integer("rl.steps");
    const IterationOptions iteration{last ? 0 : s_.integer("rollout.iteration_tokens"), lent_bytes_};
    const RolloutResult batch = rollout_.run_iteration(draw(state_.step + 1), policies_.rbegin()->second,
                                                       state_.weight_version, iteration, watching("rollout"));

    check_gradings(batch.trajectories, fmt::format("step {}", state_.step + 1));
    show("train", 0);
    const auto train_start = Clock::now();
    const Advantages advantages =
        learner_.advantages(batch.trajectories, mix_seed(seed_, static_cast<std::uint64_t>(state_.step)));
    const Update update = learner_.update(batch.trajectories, advantages, policies_);
    account_mismatch(update.compared);
    hand_over(state_.weight_version + 1);
    const double train_s = seconds_since(train_start);

    ++state_.step;
    record(batch, advantages, update, train_s, seconds_since(start));
  }

  std::vector<RolloutGroup> draw(std::int64_t step) const {
    return draw_groups(tasks_, Split::train, seed_, step, s_.integer("rl.groups"), s_.integer("rl.group_size"));
  }

  // Rollouts need memory for states, the optimizer needs none meanwhile.
  void make_room() {
    const std::string& folder = s_.text("rl.optimizer_folder");
    if (!folder.empty()) lent_bytes_ = learner_.put_away(folder);
  }

  // The trainer's adapter becomes the rollout's, as this version; both sides' hashes must agree. Earlier ones stay as
  // long as there are unfinished trajectories with tokens of theirs.
  void hand_over(std::uint64_t version) {
    const model::AdapterValues values = learner_.adapter_values();
    auto received = std::shared_ptr<const model::Adapter>(model::make_adapter(*model_, values));
    adapter_sha256_ = check_hand_over(values, *received, version);
    policies_[version] = std::move(received);
    state_.weight_version = version;
    forget_unused(policies_, rollout_.unfinished());
  }

  void account_mismatch(const Comparison& c) {
    state_.compared_tokens += c.compared;
    state_.mismatch_tokens += c.mismatched;
    state_.mismatch_max_abs = std::max(state_.mismatch_max_abs, c.max_abs);
    check_comparison(c, state_.step + 1, s_.text("rl.mismatch") == "report");
  }

  void begin() {
    const fs::path& dir = options_.directory;
    started_ = Clock::now();
    const auto checkpoint = options_.resume ? newest_checkpoint(dir) : std::nullopt;
    if (checkpoint) {
      state_ = load_checkpoint(*checkpoint, *model_, learner_.parameters(), learner_.optimizer());
    } else {
      learner_.parameters().initialize(seed_);
      write_file_atomic(dir / "recipe.toml", s_.resolved_toml());
    }
    elapsed_before_ = state_.elapsed_s;
    MetricsOptions metrics;
    metrics.resumed_step = checkpoint ? state_.step : -1;
    metrics_ = std::make_unique<MetricsWriter>(dir, metrics);
    if (checkpoint) {
      Unfinished unfinished = load_unfinished(*checkpoint, *model_, [&](std::int64_t step) { return draw(step); });
      policies_ = std::move(unfinished.policies);
      rollout_.restore(std::move(unfinished.groups));
    }
    hand_over(state_.weight_version);  // of the adapter as initialised or restored
    view_.run = dir.filename().string();
    view_.model = s_.text("model.path");
    view_.seed = seed_;
    view_.loss = s_.text("rl.loss");
    view_.steps = s_.integer("rl.steps");
  }

  void save() {
    learner_.retrieve();  // of an update that had nothing to learn from
    state_.elapsed_s = elapsed_before_ + seconds_since(started_);
    save_checkpoint(options_.directory, state_, *model_, learner_.parameters(), learner_.optimizer(),
                    s_.text("model.path"), s_.integer("checkpoint.keep"), [&](const fs::path& folder) {
                      Unfinished unfinished{rollout_.unfinished(), policies_};
                      unfinished.policies.erase(state_.weight_version);
                      save_unfinished(folder, unfinished, *model_, atif_context());
                    });
  }

  void evaluate_and_record() {
    const auto start = Clock::now();
    const EvaluationResult result =
        evaluate(rollout_, tasks_, s_, policies_.rbegin()->second, state_.weight_version, watching("evaluate"));
    state_.evaluations.push_back({state_.step, result.evaluation});
    state_.other_s += seconds_since(start);
    MetricsRow row(state_.step);
    row.set("kind", "eval");
    row.set("k", result.evaluation.k);
    row.set("n", result.evaluation.n);
    row.set("mean_at_k", result.evaluation.mean_at_k.value);
    row.set("mean_at_k_low", result.evaluation.mean_at_k.low);
    row.set("mean_at_k_high", result.evaluation.mean_at_k.high);
    row.set("pass_at_k", result.evaluation.pass_at_k.value);
    row.set("pass_at_k_low", result.evaluation.pass_at_k.low);
    row.set("pass_at_k_high", result.evaluation.pass_at_k.high);
    for (const auto& [family, e] : result.by_family) {
      row.set(fmt::format("{}/mean_at_k", family), e.mean_at_k.value);
      row.set(fmt::format("{}/pass_at_k", family), e.pass_at_k.value);
    }
    row.set("tool_rate", result.tool_rate);
    row.set("failed", result.failed);
    row.set("weight_version", static_cast<std::int64_t>(state_.weight_version));
    row.set("adapter_sha256", adapter_sha256_);
    row.set("time_s", result.seconds);
    metrics_->write(row, "eval");
    show("evaluate", 1);
  }

  void record(const RolloutResult& batch, const Advantages& advantages, const Update& update, double train_s,
              double wall_s) {
    const RolloutStats& stats = batch.stats;
    double reward = 0, length = 0;
    std::int64_t graded = 0, failed = 0, malformed = 0, truncated = 0;
    for (const auto& t : batch.trajectories) {
      failed += t.status == Status::failed ? 1 : 0;
      malformed += t.status == Status::malformed ? 1 : 0;
      truncated += t.status == Status::truncated ? 1 : 0;
      length += static_cast<double>(t.logprobs.size());
      if (t.status == Status::failed || t.status == Status::aborted) continue;
      reward += t.reward;
      ++graded;
    }
    const auto n = static_cast<double>(batch.trajectories.size());
    reward = graded == 0 ? 0 : reward / static_cast<double>(graded);
    const double rollout_s = stats.wall_s - stats.waiting_s;
    state_.rewards.push_back(reward);
    state_.rollout_s += rollout_s;
    state_.sandbox_s += stats.waiting_s;
    state_.train_s += train_s;
    state_.other_s += std::max(0.0, wall_s - stats.wall_s - train_s);
    state_.elapsed_s = elapsed_before_ + seconds_since(started_);
    const double rollout_rate = static_cast<double>(stats.sampled_tokens) / stats.wall_s,
                 train_rate = static_cast<double>(update.tokens) / train_s;

    MetricsRow row(state_.step);
    row.set("kind", "train");
    row.set("reward_mean", reward);
    row.set("tool_rate", tool_rate(batch.trajectories));
    row.set("compared_tokens", update.compared.compared);
    row.set("mismatch_tokens", update.compared.mismatched);
    row.set("mismatch_max_abs", update.compared.max_abs);
    row.set("weight_version", static_cast<std::int64_t>(state_.weight_version));
    row.set("adapter_sha256", adapter_sha256_);
    row.set("loss", update.loss);
    row.set("grad_norm", update.grad_norm);
    row.set("kl_to_base", update.kl);
    row.set("clip_fraction", update.clip_fraction);
    row.set("entropy_estimate", update.entropy_estimate);
    row.set("alive_fraction", advantages.alive_fraction());
    row.set("response_length_mean", length / n);
    row.set("trajectories", static_cast<std::int64_t>(batch.trajectories.size()));
    row.set("groups", std::ssize(batch.groups));
    row.set("set_aside", stats.set_aside);
    row.set("continued", stats.continued);
    row.set("older_tokens", update.older_tokens);
    row.set("failed", failed);
    row.set("malformed", malformed);
    row.set("truncated", truncated);
    row.set("rollout_tokens_per_s", rollout_rate);
    row.set("train_tokens_per_s", train_rate);
    row.set("time_rollout_s", rollout_s);
    row.set("time_train_s", train_s);
    row.set("time_sandbox_s", stats.waiting_s);
    row.set("time_step_s", wall_s);
    row.set("sandbox_wait_fraction", stats.wait_fraction());
    row.set("sandbox_frozen_fraction", stats.frozen_fraction());
    row.set("states_set_back", stats.set_back);
    row.set("states_written_out", stats.written_out);
    row.set("states_loaded", stats.loaded);
    row.set("optimizer_bytes_away", static_cast<std::int64_t>(lent_bytes_));
    metrics_->write(row, "train");
    write_trajectories(batch);

    view_.rollout_tokens_per_s = rollout_rate;
    view_.train_tokens_per_s = train_rate;
    view_.sandbox_wait_fraction = stats.wait_fraction();
    view_.sandbox_frozen_fraction = stats.frozen_fraction();
    view_.tool_rate = tool_rate(batch.trajectories);
    view_.alive_fraction = advantages.alive_fraction();
    view_.sample = sample_of(batch);
    show("rollout", 0);
  }

  AtifContext atif_context() const { return {view_.run, s_.text("model.path"), "0.1"}; }

  void write_trajectories(const RolloutResult& batch) {
    const std::int64_t every = s_.integer("record.trajectories_every");
    if (every == 0 || state_.step % every != 0) return;
    std::vector<std::string> lines;
    for (const auto& t : batch.trajectories)
      lines.push_back(atif_line(atif_context(), batch.groups[static_cast<std::size_t>(t.group)]->episode.messages, t));
    fs::create_directories(options_.directory / "trajectories");
    write_atif(options_.directory / "trajectories" / fmt::format("step_{}.jsonl", state_.step), lines);
  }

  // The first trajectory with the most tool calls: what a person can look at.
  static ViewSample sample_of(const RolloutResult& batch) {
    const auto best = std::max_element(batch.trajectories.begin(), batch.trajectories.end(),
                                       [](const auto& a, const auto& b) { return a.tool_calls < b.tool_calls; });
    ViewSample sample;
    sample.question = batch.groups[static_cast<std::size_t>(best->group)]->episode.messages.back().content;
    for (const auto& turn : best->turns)
      for (const auto& call : turn.calls) sample.calls.emplace_back(shell_command(call.arguments), call.output);
    sample.answer = best->answer;
    sample.reward = best->reward;
    return sample;
  }

  Rollout::Progress watching(const std::string& phase) {
    return [this, phase](std::size_t done, std::size_t all) {
      if (seconds_since(last_frame_) >= kFrameSeconds)
        show(phase, static_cast<double>(done) / static_cast<double>(all));
    };
  }

  void show(const std::string& phase, double fraction) {
    if (!options_.watch) return;
    last_frame_ = Clock::now();
    view_.phase = phase;
    view_.phase_fraction = fraction;
    view_.step = state_.step;
    view_.elapsed_s = elapsed_before_ + seconds_since(started_);
    view_.rewards = state_.rewards;
    view_.evaluations = state_.evaluations;
    view_.compared_tokens = state_.compared_tokens;
    view_.mismatch_tokens = state_.mismatch_tokens;
    view_.mismatch_max_abs = state_.mismatch_max_abs;
    view_.rollout_s = state_.rollout_s;
    view_.sandbox_s = state_.sandbox_s;
    view_.train_s = state_.train_s;
    view_.other_s = state_.other_s;
    view_.weight_version = state_.weight_version;
    options_.watch(view_);
  }

  const Settings& s_;
  const RunOptions& options_;
  std::unique_ptr<FolderLock> lock_;
  Team team_;
  std::unique_ptr<model::Model> model_;
  model::Tokenizer tokenizer_;
  TaskMixture tasks_;
  std::unique_ptr<sandbox::Runtime> runtime_;
  Rollout rollout_;
  Learner learner_;
  std::uint64_t seed_;
  RunState state_;
  Policies policies_;  // the newest, and those of unfinished trajectories
  std::string adapter_sha256_;
  std::size_t lent_bytes_ = 0;  // of the optimizer, to the rollout
  std::unique_ptr<MetricsWriter> metrics_;
  ViewState view_;
  Clock::time_point started_, last_frame_;
  double elapsed_before_ = 0;
};

}  // namespace

RunSummary run_rl(const Settings& settings, const RunOptions& options) {
  return Run(settings, options).execute();
}

EvaluationResult run_evaluation(const Settings& s, const fs::path& adapter_folder, int threads) {
  Team team(threads);
  const auto model = model::load_model(s.text("model.path"), false);
  const auto tokenizer = model::Tokenizer::load(s.text("model.path"));
  const TaskMixture tasks = rl_tasks(s);
  std::shared_ptr<const model::Adapter> adapter;
  if (!adapter_folder.empty()) adapter = model::make_adapter(*model, model::load_adapter(*model, adapter_folder));
  const auto runtime = make_runtime(s);
  Rollout rollout(*model, tokenizer, *runtime, team, rollout_options(s));
  return evaluate(rollout, tasks, s, adapter, 0, nullptr);
}

}  // namespace tidelock::rl

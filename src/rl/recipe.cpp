#include "rl/recipe.hpp"

#include "base/base.hpp"
#include "rl/harbor.hpp"

namespace tidelock::rl {

void add_task_keys(Schema& schema) {
  schema.text("tasks.dir", "folder of Harbor tasks (task.toml, instruction.md, tests/test.sh); instead of a mixture")
      .fallback("");
  Schema& task = schema.table_array("tasks.mixture", "built-in task families");
  task.text("family", "calc: products; vault: sums of two secret numbers; shell: a hidden file")
      .choices(builtin_families());
  task.number("difficulty", "knob of the family; a fraction draws between its neighbours").range(1, 6).fallback(2.0);
  task.number("weight", "share of the mixture").at_least(1e-9).fallback(1.0);
}

TaskMixture rl_tasks(const Settings& settings) {
  TaskMixture mixture;
  const std::string& dir = settings.text("tasks.dir");
  const auto& tables = settings.tables("tasks.mixture");
  if (dir.empty() == tables.empty())
    throw Error(ErrorCode::invalid_argument, "the recipe needs tasks", "give either tasks.dir or [[tasks.mixture]]");
  if (!dir.empty()) mixture.add(make_harbor_family(dir), 1, 1);
  for (const Settings& task : tables)
    mixture.add(make_family(task.text("family")), task.number("difficulty"), task.number("weight"));
  return mixture;
}

Schema rl_schema() {
  Schema s;
  s.text("model.path", "checkpoint folder of the base model");
  s.integer("adapter.rank", "of the low-rank adapter").range(1, 1024).fallback(8);
  s.number("adapter.alpha", "the adapter's output is scaled by alpha / rank").range(1e-3, 1e5).fallback(16.0);
  s.texts("adapter.targets", "\"all-linear\" (experts included), or module names such as q_proj, w1")
      .fallback(SettingValue(std::vector<std::string>{"all-linear"}));
  s.integer("rl.steps", "optimizer steps").range(1, 1e7).fallback(40);
  s.integer("rl.seed", "of tasks, sampling and the adapter").range(0, 9e15).fallback(1);
  s.integer("rl.groups", "episodes of one step").range(1, 1e5).fallback(16);
  s.integer("rl.group_size", "trajectories of one episode").range(1, 1e4).fallback(8);
  s.text("rl.loss", "policy-gradient loss, with its advantage")
      .choices({"grpo", "dr_grpo", "dapo"})
      .fallback("dr_grpo");
  s.integer("rl.epochs", "optimizer steps on each batch; the first is exactly on policy").range(1, 16).fallback(1);
  s.number("rl.learning_rate", "AdamW").range(0, 1).fallback(3e-3);
  s.integer("rl.warmup_steps", "linear warm-up").range(0, 1e6).fallback(0);
  s.number("rl.weight_decay", "decoupled").range(0, 1).fallback(0.0);
  s.number("rl.clip_norm", "gradient norm limit; 0: none").range(0, 1e6).fallback(1.0);
  s.number("rl.clip_low", "ratio clip below 1; -1: the loss's own").range(-1, 1).fallback(-1.0);
  s.number("rl.clip_high", "ratio clip above 1; -1: the loss's own").range(-1, 100).fallback(-1.0);
  s.number("rl.kl_coefficient", "of the k3 divergence from the base (adapter off)").range(0, 100).fallback(0.0);
  s.text("rl.control", "a control experiment that must not learn")
      .choices({"none", "shuffled_rewards", "zero_advantage"})
      .fallback("none");
  s.text("rl.mismatch", "what a token whose trainer bits differ from the rollout's does")
      .choices({"error", "report"})
      .fallback("error");
  s.integer("rl.micro_batch_tokens", "tokens of one gradient; does change bits of the sum")
      .range(16, 1e8)
      .fallback(2048);
  s.text("rl.optimizer_folder",
         "folder on a fast disk for the optimizer's state during rollouts, whose memory then goes to "
         "rollout.state_memory; empty: it stays")
      .fallback("");
  s.flag("rl.recompute", "keep layer inputs only and run layers again in the backward pass").fallback(false);
  s.number("rollout.temperature", "1: the model's own distribution").range(0, 100).fallback(1.0);
  s.number("rollout.top_p", "nucleus sampling").range(1e-6, 1).fallback(1.0);
  s.integer("rollout.top_k", "0: no limit").range(0, 1e6).fallback(0);
  s.integer("rollout.max_tokens", "sampled tokens of a trajectory").range(1, 1e6).fallback(256);
  s.integer("rollout.iteration_tokens",
            "sampled tokens of a trajectory in one step, after which it is set aside and goes on in the next step; 0: "
            "no limit")
      .range(0, 1e6)
      .fallback(0);
  s.integer("rollout.max_turns", "assistant turns of a trajectory").range(1, 1000).fallback(4);
  s.flag("rollout.thinking", "open the thinking channel").fallback(false);
  s.flag("rollout.tool_enabled", "off (a control): every call is answered with \"tool disabled\"").fallback(true);
  s.integer("rollout.tool_output_limit", "bytes of each output stream shown to the model")
      .range(16, 1 << 20)
      .fallback(2048);
  s.integer("rollout.concurrent", "trajectories, and so sandboxes, at once").range(1, 4096).fallback(128);
  s.integer("rollout.state_memory", "MiB of state of all trajectories; 0: no limit").range(0, 1 << 30).fallback(0);
  s.text("rollout.state_folder",
         "folder on a fast disk for states that rollout.state_memory has no room for; empty: they are computed again")
      .fallback("");
  s.integer("rollout.state_disk", "MiB that rollout.state_folder may take").range(1, 1 << 30).fallback(10240);
  s.text("sandbox.runtime", "what sandboxes are made of").choices({"container", "microvm"}).fallback("container");
  s.text("sandbox.directory", "microvm: state directory; empty: one of this user's under the temporary folder")
      .fallback("");
  s.flag("sandbox.freeze", "freeze sandboxes while the model decodes").fallback(true);
  s.integer("sandbox.hands", "threads that wait for sandboxes").range(1, 256).fallback(4);
  s.integer("eval.tasks", "held-out episodes").range(1, 1e6).fallback(64);
  s.integer("eval.samples", "trajectories of each: the k of mean@k and pass@k").range(1, 1000).fallback(8);
  s.integer("eval.every", "steps between evaluations; 0: before the first and after the last step only")
      .range(0, 1e6)
      .fallback(0);
  s.integer("eval.seed", "of held-out episodes and their sampling").range(0, 9e15).fallback(1000);
  s.integer("checkpoint.every", "steps between checkpoints").range(1, 1e6).fallback(1);
  s.integer("checkpoint.keep", "checkpoints kept").range(1, 1e6).fallback(2);
  s.integer("record.trajectories_every", "steps between files of trajectories; 0: none").range(0, 1e6).fallback(1);
  add_task_keys(s);
  return s;
}

RolloutOptions rollout_options(const Settings& s) {
  RolloutOptions o;
  o.temperature = static_cast<float>(s.number("rollout.temperature"));
  o.top_p = static_cast<float>(s.number("rollout.top_p"));
  o.top_k = static_cast<int>(s.integer("rollout.top_k"));
  o.max_tokens = s.integer("rollout.max_tokens");
  o.max_turns = static_cast<int>(s.integer("rollout.max_turns"));
  o.thinking = s.flag("rollout.thinking");
  o.tool_enabled = s.flag("rollout.tool_enabled");
  o.tool_output_limit = static_cast<std::uint64_t>(s.integer("rollout.tool_output_limit"));
  o.concurrent = static_cast<int>(s.integer("rollout.concurrent"));
  o.state_memory = static_cast<std::size_t>(s.integer("rollout.state_memory")) << 20;
  o.state_folder = s.text("rollout.state_folder");
  o.state_disk = static_cast<std::uint64_t>(s.integer("rollout.state_disk")) << 20;
  if (!o.state_folder.empty() && o.state_memory == 0)
    throw Error(ErrorCode::invalid_argument,
                "rollout.state_folder is for states that rollout.state_memory has no room for",
                "set rollout.state_memory");
  o.freeze = s.flag("sandbox.freeze");
  o.hands = static_cast<int>(s.integer("sandbox.hands"));
  return o;
}

AdvantageOptions advantage_options(const Settings& s) {
  AdvantageOptions o;
  o.kind = parse_advantage(s.text("rl.loss"));
  o.control = parse_control(s.text("rl.control"));
  return o;
}

LossOptions loss_options(const Settings& s) {
  LossOptions o = LossOptions::defaults(parse_loss(s.text("rl.loss")), s.integer("rollout.max_tokens"));
  if (s.number("rl.clip_low") >= 0) o.clip_low = s.number("rl.clip_low");
  if (s.number("rl.clip_high") >= 0) o.clip_high = s.number("rl.clip_high");
  o.kl_coefficient = s.number("rl.kl_coefficient");
  return o;
}

std::vector<RolloutGroup> draw_groups(const TaskMixture& tasks, Split split, std::uint64_t seed, std::int64_t step,
                                      std::int64_t groups, std::int64_t members) {
  std::vector<RolloutGroup> out;
  for (std::int64_t g = 0; g < groups; ++g) {
    const std::uint64_t group_seed =
        mix_seed(mix_seed(seed, static_cast<std::uint64_t>(step)), static_cast<std::uint64_t>(g));
    RolloutGroup group{tasks.make(group_seed, split), g, {}, step};
    for (std::int64_t m = 0; m < members; ++m)
      group.seeds.push_back(mix_seed(group_seed, 0x73616D706C65ULL + static_cast<std::uint64_t>(m)));
    out.push_back(std::move(group));
  }
  return out;
}

}  // namespace tidelock::rl

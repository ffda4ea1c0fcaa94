// The sandboxes' side of a rollout: each job does one thing on a hand and reports back to the driving thread.
#include "base/base.hpp"
#include "rl/rollout_impl.hpp"

namespace tidelock::rl {
namespace {

// What a tool call returns when the tool is switched off (a control).
constexpr const char* kToolDisabled = "tool disabled";

ToolResult use_tool(const RolloutOptions& options, sandbox::Sandbox& box, const Episode& episode,
                    const std::string& name, const std::string& arguments) {
  ToolResult result;
  if (!options.tool_enabled) {
    result.text = kToolDisabled;
  } else if (name != "shell") {
    result.text = fmt::format("no tool named {}", name);
  } else {
    return run_shell_tool(box, episode, arguments, options.tool_output_limit);
  }
  return result;
}

}  // namespace

void Rollout::Impl::open_box(Actor& a) {
  std::vector<ToolUse> before;  // a copy: the record grows meanwhile
  for (const Turn& turn : a.record.turns) before.insert(before.end(), turn.calls.begin(), turn.calls.end());
  hands->post([this, &a, before]() -> Hands::Done {
    std::string failure;
    try {
      a.box = open_sandbox(runtime, a.episode());
      for (const ToolUse& call : before) use_tool(options, *a.box, a.episode(), call.name, call.arguments);
      if (options.freeze) a.box->freeze();
    } catch (const std::exception& error) {
      failure = error.what();
    }
    return [this, &a, failure] {
      a.box_ready = true;
      if (a.wants == Actor::Wants::close) return close_box(a);
      if (!failure.empty()) return fail_actor(a, failure);
      if (a.wants == Actor::Wants::rest) return rest(a);
      if (a.wants == Actor::Wants::tools) run_tools(a);
      if (a.wants == Actor::Wants::grade) grade_answer(a);
    };
  });
}

void Rollout::Impl::run_tools(Actor& a) {
  a.wants = Actor::Wants::tools;
  if (!a.box_ready) return;
  a.wants = Actor::Wants::nothing;
  hands->post([this, &a]() -> Hands::Done {
    std::vector<ToolResult> results;
    std::string failure;
    try {
      for (const auto& call : a.calls)
        results.push_back(use_tool(options, *a.box, a.episode(), call.name, call.arguments_json));
      if (options.freeze) a.box->freeze();
    } catch (const std::exception& error) {
      failure = error.what();
    }
    return [this, &a, results, failure] { failure.empty() ? continue_with(a, results) : fail_actor(a, failure); };
  });
}

void Rollout::Impl::grade_answer(Actor& a) {
  a.wants = Actor::Wants::grade;
  if (!a.box_ready) return;
  a.wants = Actor::Wants::nothing;
  hands->post([this, &a]() -> Hands::Done {
    GradeResult result;
    try {
      result = grade(*a.box, a.episode(), a.record.answer);
    } catch (const std::exception& error) {
      result.reason = error.what();
    }
    return [this, &a, result] {
      if (!result.graded) return fail_actor(a, result.reason);
      a.record.reward = result.reward;
      a.record.reward_detail = result.detail;
      close_box(a);
    };
  });
}

void Rollout::Impl::close_box(Actor& a) {
  hands->post([this, &a]() -> Hands::Done {
    if (a.box != nullptr) {
      const sandbox::Times times = a.box->times();
      a.record.sandbox = {times.alive, times.busy, times.frozen};
      a.box.reset();
    }
    return [this, &a] { finish(a); };
  });
}

void Rollout::Impl::close_or_wait(Actor& a) {
  a.wants = Actor::Wants::close;
  if (a.box_ready) close_box(a);
}

}  // namespace tidelock::rl

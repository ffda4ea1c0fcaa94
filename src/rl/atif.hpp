// Trajectories on disk: ATIF v1.7 (Agent Trajectory Interchange Format), with its token fields.
//
// A run writes `trajectories/step_N.jsonl`: one ATIF document a line, one line a trajectory, in the order of the batch.
// In a document
//   - step 1.. of source "system" / "user" are the episode's messages;
//   - every model turn is a step of source "agent" with its tool calls and observation, and in `metrics`:
//     prompt_token_ids (all tokens before the turn), completion_token_ids, logprobs (one per completion token; the f32
//     value written as a decimal that reads back to the same bits), prompt_tokens, completion_tokens;
//   - what ATIF has no field for is under `extra.tidelock`: group, member, seed, status, reward, spans, sandbox times,
//   and
//     the tokens after the last turn, so that reading gives back the trajectory by bits.
// No time stamps: the same run writes the same bytes (but for times measured in sandboxes).
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/chat.hpp"
#include "rl/trajectory.hpp"

namespace tidelock::rl {

// Who acted; `run` becomes session_id.
struct AtifContext {
  std::string run, model, version;
};

// One document, one line, no newline.
std::string atif_line(const AtifContext& context, const std::vector<model::Message>& messages,
                      const Trajectory& trajectory);

// Reads back a document that atif_line wrote. Throws Error{corrupt_data} naming the field.
Trajectory parse_atif(std::string_view line);

// Writes all lines to `path` at once (write_file_atomic); creates the folder.
void write_atif(const std::filesystem::path& path, std::span<const std::string> lines);
// Throws Error{corrupt_data} naming file and line.
std::vector<Trajectory> read_atif(const std::filesystem::path& path);

}  // namespace tidelock::rl

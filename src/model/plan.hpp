// What running a model costs, before it is run: three ledgers, and the decode speed that they allow. Pure arithmetic
// over a config and the formats of its weights; nothing is measured or allocated here.
//
// The figures are those of this build: weights in the kernels' form (PackedMatrix), state as StateLayout places it,
// work memory as a pass takes it from its arena. Experts that a step touches are counted as if tokens chose evenly.
#pragma once

#include <array>
#include <functional>
#include <string>
#include <vector>

#include "model/model.hpp"

namespace tidelock::model {

enum class WeightGroup : std::uint8_t { embedding, kda, mla, indexer, dense, shared, router, routed, residual, head };
inline constexpr int kWeightGroups = 10;
const char* group_name(WeightGroup group);
WeightGroup weight_group(const Model& model, ParameterId id);

// The format that a piece of a matrix is run in (WeightSource::format).
using FormatOf = std::function<Format(ParameterId, int piece)>;

// Bytes of one parameter in the kernels' form; what Model::weight_bytes adds up.
std::uint64_t packed_parameter_bytes(const Model& model, ParameterId id, const FormatOf& format);

// Refuses a model whose weights are larger than the memory available: Error{exhausted} with both numbers.
void check_memory(const Model& model, const FormatOf& format, const std::filesystem::path& path,
                  std::uint64_t available);

// Formats of a config without weights: that of the config, MXFP4 for packed experts, f32 for routers.
FormatOf config_formats(const Model& model);

struct PlanRequest {
  std::int64_t context = 4096;  // tokens that each sequence has behind it
  std::int64_t sequences = 1;   // decoded together
  std::int64_t prefill_rows = 512;
  std::uint64_t memory = 0;     // bytes
  double memory_bandwidth = 0;  // bytes per second
  double nvme = 0;              // bytes per second; 0: nothing can be streamed
};

struct LedgerLine {
  std::string what;
  std::uint64_t bytes;
};

struct Plan {
  std::vector<LedgerLine> persists;   // weights by group, state of all sequences
  std::vector<LedgerLine> workspace;  // of one prefill pass and of one decode step
  std::vector<LedgerLine> moved;      // per decode step of all sequences
  std::uint64_t weight_bytes = 0, state_bytes = 0, workspace_bytes = 0, moved_bytes = 0;
  bool fits = false;                 // everything at once in memory, which is what this build needs to load the model
  std::uint64_t resident_bytes = 0;  // of what persists, kept in memory beside the workspace
  std::uint64_t streamed_bytes = 0;  // per step, from NVMe, of what does not stay; memory keeps what steps move most of
  double step_seconds = 0;           // of decode; 0 when no speed follows from the request
  double tokens_per_second = 0;      // of all sequences together
};

Plan make_plan(const Model& model, const FormatOf& format, const PlanRequest& request);

// Of a pass of `rows` rows of `spans` sequences: what Workspace::reserved_bytes grows to, but for the arena's chunks.
std::uint64_t workspace_bytes(const Model& model, std::int64_t rows, std::int64_t spans);

}  // namespace tidelock::model

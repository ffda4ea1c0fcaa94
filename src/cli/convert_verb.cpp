#include <map>

#include "base/base.hpp"
#include "cli/cli.hpp"
#include "cli/sizes.hpp"
#include "model/convert.hpp"

namespace tidelock::cli {

Action add_convert(CLI::App& app) {
  struct Options {
    std::string in, out, to, type, shard = "5G";
  };
  auto o = std::make_shared<Options>();
  app.add_option("model", o->in, "checkpoint folder or .gguf file")->required();
  app.add_option("out", o->out, "the .gguf file, or the new folder, to write")->required();
  app.add_option("--to", o->to, "format of the files")->required()->check(CLI::IsMember({"gguf", "safetensors"}));
  app.add_option(
         "--type", o->type,
         "numbers of the matrices: bf16, f32, q8_0 (GGUF only) for all, mxfp4 for the routed experts; without it "
         "each keeps its own")
      ->check(CLI::IsMember({"q8_0", "mxfp4", "bf16", "f32"}));
  app.add_option("--shard-size", o->shard, "bytes of one safetensors file at most, such as 5G")->capture_default_str();
  return [o] {
    using numerics::Format;
    const std::map<std::string, Format> types = {
        {"q8_0", Format::q8_0}, {"mxfp4", Format::mxfp4}, {"bf16", Format::bf16}, {"f32", Format::f32}};
    model::ConvertOptions options;
    options.to_gguf = o->to == "gguf";
    options.shard_bytes = parse_bytes(o->shard, "--shard-size");
    if (!o->type.empty()) options.type = types.at(o->type);
    const model::ConvertReport report = model::convert_model(o->in, o->out, options);
    fmt::print("wrote {}: {} tensors, {}{}\n", o->out, report.tensors, bytes_text(report.bytes),
               report.files == 1 ? "" : fmt::format(", in {} files", report.files));
    if (report.kept != 0)
      fmt::print("{} matrices have rows that are no whole blocks of {}; they keep their numbers\n", report.kept,
                 o->type);
    for (const auto& notice : report.notices) fmt::print("{}\n", notice);
    return 0;
  };
}

}  // namespace tidelock::cli

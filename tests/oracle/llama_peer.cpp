// What llama.cpp's library says about a GGUF file, for tests/oracle/test_llama.py. Built by tools/fetch_llama.sh.
//   llama_peer logits BACKENDS MODEL TOKENS OUT    float32 [tokens, vocab]; caches of float32; batches of at most 512
//   llama_peer values MODEL OUT                    every tensor as float32, in the order of the lines "NAME COUNT TYPE"
//   printed llama_peer quantize MODEL OUT TYPE             a copy in Q8_0, Q4_K, Q5_K, Q6_K, MXFP4 or BF16, as
//   llama-quantize makes it
// TOKENS is a file of token ids separated by white space.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "ggml.h"
#include "gguf.h"
#include "llama.h"

namespace {

constexpr int kBatch = 512;

[[noreturn]] void die(const std::string& what) {
  std::fprintf(stderr, "llama_peer: %s\n", what.c_str());
  std::exit(1);
}

void put(std::ofstream& out, const float* values, std::size_t n) {
  out.write(reinterpret_cast<const char*>(values), static_cast<std::streamsize>(n * sizeof(float)));
}

void logits(const char* backends, const char* path, const char* tokens_path, const char* out_path) {
  std::vector<llama_token> tokens;
  std::ifstream in(tokens_path);
  for (llama_token token = 0; in >> token;) tokens.push_back(token);
  ggml_backend_load_all_from_path(backends);
  llama_backend_init();
  llama_model* model = llama_model_load_from_file(path, llama_model_default_params());
  if (model == nullptr) die("the model does not load");
  llama_context_params params = llama_context_default_params();
  params.n_ctx = static_cast<std::uint32_t>((tokens.size() + 255) / 256 * 256);
  params.n_batch = params.n_ubatch = kBatch;
  params.n_threads = params.n_threads_batch = 1;
  params.type_k = params.type_v = GGML_TYPE_F32;
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
  llama_context* context = llama_init_from_model(model, params);
  if (context == nullptr) die("no context");
  const int vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
  llama_batch batch = llama_batch_init(kBatch, 0, 1);
  std::ofstream out(out_path, std::ios::binary);
  for (std::size_t at = 0; at < tokens.size(); at += kBatch) {
    batch.n_tokens = static_cast<int>(std::min<std::size_t>(kBatch, tokens.size() - at));
    for (int i = 0; i < batch.n_tokens; ++i) {
      batch.token[i] = tokens[at + static_cast<std::size_t>(i)];
      batch.pos[i] = static_cast<llama_pos>(at) + i;
      batch.n_seq_id[i] = 1;
      batch.seq_id[i][0] = 0;
      batch.logits[i] = 1;
    }
    if (llama_decode(context, batch) != 0) die("llama_decode failed");
    for (int i = 0; i < batch.n_tokens; ++i)
      put(out, llama_get_logits_ith(context, i), static_cast<std::size_t>(vocab));
  }
}

void values(const char* path, const char* out_path) {
  ggml_context* tensors = nullptr;
  if (gguf_init_from_file(path, {false, &tensors}) == nullptr) die("the file does not load");
  std::ofstream out(out_path, std::ios::binary);
  for (ggml_tensor* t = ggml_get_first_tensor(tensors); t != nullptr; t = ggml_get_next_tensor(tensors, t)) {
    if (t->type == GGML_TYPE_I8) continue;  // the context's own, around all data
    std::vector<float> x(static_cast<std::size_t>(ggml_nelements(t)));
    const auto n = static_cast<std::int64_t>(x.size());
    if (t->type == GGML_TYPE_F32)
      std::copy_n(static_cast<const float*>(t->data), n, x.data());
    else
      ggml_get_type_traits(t->type)->to_float(t->data, x.data(), n);
    std::printf("%s %lld %s\n", t->name, static_cast<long long>(n), ggml_type_name(t->type));
    put(out, x.data(), x.size());
  }
}

void quantize(const char* path, const char* out_path, const std::string& type) {
  const std::map<std::string, llama_ftype> types{
      {"Q8_0", LLAMA_FTYPE_MOSTLY_Q8_0}, {"Q4_K", LLAMA_FTYPE_MOSTLY_Q4_K_M}, {"Q5_K", LLAMA_FTYPE_MOSTLY_Q5_K_M},
      {"Q6_K", LLAMA_FTYPE_MOSTLY_Q6_K}, {"BF16", LLAMA_FTYPE_MOSTLY_BF16},   {"MXFP4", LLAMA_FTYPE_MOSTLY_MXFP4_MOE}};
  llama_model_quantize_params params = llama_model_quantize_default_params();
  params.nthread = 1;
  params.ftype = types.at(type);
  if (llama_model_quantize(path, out_path, &params) != 0) die("llama_model_quantize failed");
}

}  // namespace

int main(int argc, char** argv) {
  llama_log_set(
      [](ggml_log_level level, const char* text, void*) {
        if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
      },
      nullptr);
  const std::string verb = argc > 1 ? argv[1] : "";
  if (verb == "logits" && argc == 6)
    logits(argv[2], argv[3], argv[4], argv[5]);
  else if (verb == "values" && argc == 4)
    values(argv[2], argv[3]);
  else if (verb == "quantize" && argc == 5)
    quantize(argv[2], argv[3], argv[4]);
  else
    die("expected logits, values or quantize with their arguments");
  std::fflush(stdout);
  std::_Exit(0);  // the library's own end crashes with backends that were loaded from files
}

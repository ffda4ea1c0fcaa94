// The peer of `tidelock bench model --interactive`: llama.cpp's library on the same file and the same lines.
//   llama_model BACKENDS MODEL THREADS [CONTEXT]     BACKENDS: the folder of the ggml libraries; CONTEXT: tokens, of
//   all sequences
// Reads "PROMPT GENERATE DEPTH SEQUENCES" from standard input and answers with seconds. Like llama-bench: batches of
// 512 prompt tokens, logits of the last one, default cache types, no sampling.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "llama.h"

namespace {

constexpr int kBatch = 512, kMaxSequences = 16;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

[[noreturn]] void die(const char* what) {
  std::fprintf(stderr, "llama_model: %s\n", what);
  std::exit(1);
}

struct Runner {
  llama_model* model;
  llama_context* context;
  llama_batch batch = llama_batch_init(kBatch, 0, 1);
  int vocab;

  void put(int position, int sequence, bool logits) {
    const int n = batch.n_tokens++;
    batch.token[n] = std::rand() % vocab;
    batch.pos[n] = position;
    batch.n_seq_id[n] = 1;
    batch.seq_id[n][0] = sequence;
    batch.logits[n] = static_cast<std::int8_t>(logits);
  }
  void decode() {
    if (llama_decode(context, batch) != 0) die("llama_decode failed");
    batch.n_tokens = 0;
  }
  void prefill(int from, int n, int sequence) {
    for (int i = 0; i < n; ++i) {
      put(from + i, sequence, i + 1 == n);
      if (batch.n_tokens == kBatch || i + 1 == n) decode();
    }
  }
  double run(int prompt, int generate, int depth, int sequences) {
    llama_memory_clear(llama_get_memory(context), true);
    for (int s = 0; s < sequences; ++s) prefill(0, depth, s);
    llama_synchronize(context);
    const double begin = now();
    for (int s = 0; s < sequences; ++s) prefill(depth, prompt, s);
    for (int i = 0; i < generate; ++i) {
      for (int s = 0; s < sequences; ++s) put(depth + prompt + i, s, true);
      decode();
    }
    llama_synchronize(context);
    return now() - begin;
  }
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4 || argc > 5) die("expected BACKENDS MODEL THREADS [CONTEXT]");
  llama_log_set(
      [](ggml_log_level level, const char* text, void*) {
        if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
      },
      nullptr);
  ggml_backend_load_all_from_path(argv[1]);
  llama_backend_init();
  llama_model* model = llama_model_load_from_file(argv[2], llama_model_default_params());
  if (model == nullptr) die("the model does not load");
  llama_context_params params = llama_context_default_params();
  params.n_ctx = argc == 5 ? static_cast<std::uint32_t>(std::atoi(argv[4])) : 16 * 4608;
  params.n_batch = kBatch;
  params.n_ubatch = kBatch;
  params.n_seq_max = kMaxSequences;
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
  params.n_threads = params.n_threads_batch = std::atoi(argv[3]);
  llama_context* context = llama_init_from_model(model, params);
  if (context == nullptr) die("no context");
  Runner runner{model, context, llama_batch_init(kBatch, 0, 1), llama_vocab_n_tokens(llama_model_get_vocab(model))};
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream in(line);
    int prompt = 0, generate = 0, depth = 0, sequences = 0;
    if (!(in >> prompt >> generate >> depth >> sequences) || sequences < 1 || sequences > kMaxSequences)
      die("expected PROMPT GENERATE DEPTH SEQUENCES");
    std::printf("%.9f\n", runner.run(prompt, generate, depth, sequences));
    std::fflush(stdout);
  }
  std::fflush(stdout);
  std::_Exit(0);
}

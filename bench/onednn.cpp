#include "onednn.hpp"

#include <omp.h>

#include <oneapi/dnnl/dnnl.hpp>
#include <vector>

#include "base/random.hpp"

namespace tidelock::bench {

struct OneDnnMatmul::Impl {
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  dnnl::memory source, weights, result;
  dnnl::matmul product;
};

OneDnnMatmul::OneDnnMatmul(PeerFormat format, std::int64_t rows, std::int64_t out, std::int64_t in)
    : impl_(std::make_unique<Impl>()) {
  using dnnl::memory;
  const auto type = format == PeerFormat::bf16 ? memory::data_type::bf16 : memory::data_type::f32;
  const auto& engine = impl_->engine;
  const auto filled = [&](memory::dims dims) {
    Random random(static_cast<std::uint64_t>(dims[0]));
    memory plain({dims, memory::data_type::f32, memory::format_tag::ab}, engine);
    auto* data = static_cast<float*>(plain.get_data_handle());
    for (std::int64_t i = 0; i < dims[0] * dims[1]; ++i) data[i] = random.uniform() - 0.5F;
    return plain;
  };
  const auto reordered = [&](memory from, const memory::desc& desc) {
    memory to(desc, engine);
    dnnl::reorder(from, to).execute(impl_->stream, from, to);
    impl_->stream.wait();
    return to;
  };
  const memory::desc source_desc({rows, in}, type, memory::format_tag::ab);
  const memory::desc weights_desc({in, out}, type, memory::format_tag::any);
  const memory::desc result_desc({rows, out}, memory::data_type::f32, memory::format_tag::ab);
  const dnnl::matmul::primitive_desc chosen(dnnl::matmul::desc(source_desc, weights_desc, result_desc), engine);
  impl_->product = dnnl::matmul(chosen);
  impl_->source = reordered(filled({rows, in}), source_desc);
  impl_->weights = reordered(filled({in, out}), chosen.weights_desc());
  impl_->result = memory(result_desc, engine);
}

OneDnnMatmul::~OneDnnMatmul() = default;

void OneDnnMatmul::run(int threads) {
  omp_set_num_threads(threads);
  impl_->product.execute(
      impl_->stream,
      {{DNNL_ARG_SRC, impl_->source}, {DNNL_ARG_WEIGHTS, impl_->weights}, {DNNL_ARG_DST, impl_->result}});
  impl_->stream.wait();
}

}  // namespace tidelock::bench

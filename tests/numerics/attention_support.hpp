// Stored rows, inputs and lists for the tests of attention and the DSA index.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "numerics/attention.hpp"
#include "numerics/rowops_support.hpp"

namespace tidelock::numerics::testing {

// Blocks as the engine keeps them: other data before and after the rows.
class Stored {
 public:
  Stored(int dim, Format format, std::int64_t tokens) {
    view_.dim = dim;
    view_.format = format;
    view_.row_bytes = static_cast<std::size_t>(dim) * (format == Format::f32 ? 4 : 2);
    view_.offset = 64;
    for (std::int64_t b = 0; b * kBlockTokens < tokens; ++b)
      memory_.emplace_back(2 * view_.offset + kBlockTokens * view_.row_bytes, std::byte{0xFF});  // NaN where unwritten
    for (auto& m : memory_) blocks_.push_back(m.data());
    view_.blocks = blocks_.data();
  }
  const BlockView& view() const { return view_; }

 private:
  std::vector<std::vector<std::byte>> memory_;
  std::vector<std::byte*> blocks_;
  BlockView view_;
};

// Lists of at most `most` positions per row, ascending, the row's own position among them.
struct Lists {
  std::int64_t stride;
  std::vector<std::int32_t> positions, counts;
};

inline Lists random_lists(std::uint64_t seed, std::int64_t rows, int most) {
  Random random(seed, 5);
  Lists lists{most, std::vector<std::int32_t>(static_cast<std::size_t>(rows * most), -1), {}};
  for (std::int64_t r = 0; r < rows; ++r) {
    std::vector<std::int32_t> all;
    for (std::int32_t s = 0; s < r; ++s) all.push_back(s);
    for (std::size_t i = all.size(); i > 1; --i)
      std::swap(all[i - 1], all[random.below(static_cast<std::uint32_t>(i))]);
    all.resize(std::min<std::size_t>(all.size(), static_cast<std::size_t>(most - 1)));
    all.push_back(static_cast<std::int32_t>(r));
    std::sort(all.begin(), all.end());
    std::copy(all.begin(), all.end(), lists.positions.begin() + r * most);
    lists.counts.push_back(static_cast<std::int32_t>(all.size()));
  }
  return lists;
}

inline Lists all_positions(std::int64_t rows) {
  return random_lists(0, rows, static_cast<int>(rows));
}

struct MlaInputs {
  MlaShape shape;
  std::int64_t rows;
  Floats q, keys;
  int key_dim() const { return shape.latent_dim + shape.extra_dim; }
};

inline MlaInputs make_mla_inputs(const MlaShape& shape, std::int64_t rows, std::uint64_t seed) {
  Random random(seed, 6);
  const Index dim = shape.latent_dim + shape.extra_dim;
  MlaInputs in{shape, rows, {}, {}};
  in.q = normals(random, rows * shape.heads * dim);
  in.keys = normals(random, rows * dim);
  return in;
}

struct MlaResult {
  Floats context, lse;
};

inline bool same_bits(const Floats& a, const Floats& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}
inline bool same_bits(const MlaResult& a, const MlaResult& b) {
  return same_bits(a.context, b.context) && same_bits(a.lse, b.lse);
}

// Rows [begin, end); the keys of exactly the rows before `end` are stored.
inline void run_mla(const MlaInputs& in, Format format, const Lists* lists, std::int64_t begin, std::int64_t end,
                    MlaResult& out, bool plain = false) {
  Stored stored(in.key_dim(), format, end);
  store_rows(stored.view(), 0, end, in.keys.data());
  const std::int64_t pair = begin * in.shape.heads;
  const auto run = plain ? &reference::mla_attention : &mla_attention;
  run(in.shape, stored.view(), begin, end - begin, in.q.data() + pair * in.key_dim(),
      lists != nullptr ? lists->positions.data() + begin * lists->stride : nullptr,
      lists != nullptr ? lists->stride : 0, lists != nullptr ? lists->counts.data() + begin : nullptr,
      out.context.data() + pair * in.shape.latent_dim, out.lse.data() + pair);
}

inline MlaResult empty_mla(const MlaInputs& in) {
  const auto pairs = static_cast<std::size_t>(in.rows * in.shape.heads);
  return {Floats(pairs * static_cast<std::size_t>(in.shape.latent_dim)), Floats(pairs)};
}

inline MlaResult run_mla(const MlaInputs& in, Format format, const Lists* lists, bool plain = false) {
  MlaResult out = empty_mla(in);
  run_mla(in, format, lists, 0, in.rows, out, plain);
  return out;
}

}  // namespace tidelock::numerics::testing

#include "model/content_hash.hpp"

#include <xxhash.h>

#include <bit>
#include <cstring>

#include "base/files.hpp"

namespace tidelock::model {
namespace {

struct Hash {
  XXH3_state_t* state = XXH3_createState();
  Hash() {
    if (state == nullptr) throw std::bad_alloc();
    XXH3_128bits_reset(state);
  }
  ~Hash() { XXH3_freeState(state); }
  Hash(const Hash&) = delete;
  Hash& operator=(const Hash&) = delete;
  void add(const void* data, std::size_t bytes) { XXH3_128bits_update(state, data, bytes); }
  void add(const numerics::PackedMatrix& matrix) {
    const std::array<std::int64_t, 4> form{static_cast<std::int64_t>(matrix.format()), matrix.out(), matrix.in(),
                                           matrix.segments()};
    add(form.data(), sizeof form);
    add(matrix.data(), matrix.bytes());
  }
};

XXH128_hash_t hash_of(const Parameter& parameter) {
  Hash hash;
  const auto format = static_cast<std::int64_t>(parameter.format);
  hash.add(&format, sizeof format);
  hash.add(parameter.values.data(), parameter.values.size() * sizeof(float));
  hash.add(parameter.rows.data(), parameter.rows.size());
  for (const Matrix& part : parameter.parts) hash.add(part.forward);
  return XXH3_128bits_digest(hash.state);
}

}  // namespace

std::string content_hash(const Model& model, Team& team) {
  const auto& parameters = model.parameters();
  std::vector<XXH128_hash_t> hashes(parameters.size());
  team.parallel(std::ssize(parameters), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i)
      hashes[static_cast<std::size_t>(i)] = hash_of(parameters[static_cast<std::size_t>(i)]);
  });
  std::string all = config_to_json(model.config());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    all.append(parameters[i].name);
    all.push_back('\0');
    all.append(reinterpret_cast<const char*>(&hashes[i]), sizeof hashes[i]);
  }
  return sha256_hex(all);
}

}  // namespace tidelock::model

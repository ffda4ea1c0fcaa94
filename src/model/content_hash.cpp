#include "model/content_hash.hpp"

#include "base/content_hasher.hpp"
#include "base/files.hpp"

namespace tidelock::model {
namespace {

void add(ContentHasher& hasher, const void* data, std::size_t bytes) {
  hasher.add({static_cast<const std::byte*>(data), bytes});
}

ContentHash hash_of(const Parameter& parameter) {
  ContentHasher hasher;
  const auto format = static_cast<std::int64_t>(parameter.format);
  add(hasher, &format, sizeof format);
  add(hasher, parameter.values.data(), parameter.values.size() * sizeof(float));
  hasher.add(parameter.rows);
  for (const Matrix& part : parameter.parts) {
    const numerics::PackedMatrix& matrix = part.forward;
    const std::array<std::int64_t, 4> form{static_cast<std::int64_t>(matrix.format()), matrix.out(), matrix.in(),
                                           matrix.segments()};
    add(hasher, form.data(), sizeof form);
    hasher.add({matrix.data(), matrix.bytes()});
  }
  return hasher.result();
}

}  // namespace

std::string content_hash(const Model& model, Team& team) {
  const auto& parameters = model.parameters();
  std::vector<ContentHash> hashes(parameters.size());
  team.parallel(std::ssize(parameters), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i)
      hashes[static_cast<std::size_t>(i)] = hash_of(parameters[static_cast<std::size_t>(i)]);
  });
  std::string all = config_to_json(model.config());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    all.append(parameters[i].name);
    all.push_back('\0');
    all.append(reinterpret_cast<const char*>(hashes[i].data()), hashes[i].size());
  }
  return sha256_hex(all);
}

}  // namespace tidelock::model

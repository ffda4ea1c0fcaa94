// What a model computes with, as one name.
#pragma once

#include <string>

#include "base/team.hpp"
#include "model/model.hpp"

namespace tidelock::model {

// SHA-256, hexadecimal, over the config and, for every parameter, its name and XXH3 (128 bits) of its values in the
// form that the kernels read here. Two models with the same hash give the same bits; machines whose kernels pack
// weights differently name the same model differently. Reads all weights once.
std::string content_hash(const Model& model, Team& team);

}  // namespace tidelock::model

// numerics/: the numeric contract. Each header states the order of every reduction; isa.hpp chooses the kernels.
#pragma once

#include "numerics/attention.hpp"
#include "numerics/formats.hpp"
#include "numerics/isa.hpp"
#include "numerics/kda.hpp"
#include "numerics/matmul.hpp"
#include "numerics/quant.hpp"
#include "numerics/rowops.hpp"

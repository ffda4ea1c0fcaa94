// base/: what every room stands on. See each header; this one includes them all.
#pragma once

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "base/memory.hpp"
#include "base/random.hpp"
#include "base/team.hpp"

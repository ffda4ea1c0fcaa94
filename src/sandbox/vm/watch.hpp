// A folder of a guest that is watched over one link. Private to sandbox/.
#pragma once

#include <memory>

#include "sandbox/vm/channel.hpp"

namespace tidelock::sandbox::vm {

// Returns when no later change can be missed. Throws as Sandbox::watch.
std::unique_ptr<FileWatch> start_watch(Link& link, const WatchRequest& request);

}  // namespace tidelock::sandbox::vm

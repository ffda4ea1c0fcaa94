#pragma once

namespace tidelock::sandbox::testing {

// Becomes the user "nobody" and uses a container; 0 when all went well. Prints what did not.
int unprivileged_main(int argc, char** argv);

}  // namespace tidelock::sandbox::testing

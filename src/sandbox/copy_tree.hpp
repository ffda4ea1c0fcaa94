// Copies an overlay's upper directory: files, links, whiteouts, modes, owners, times and the overlay's own attributes.
#pragma once

#include <cstdint>

namespace tidelock::sandbox {

// From one directory descriptor into another (empty) one; neither is followed outside through links. Hard links inside
// the tree stay hard links; sparse files stay sparse. Owners are kept. Throws Error{exhausted} when the target is full,
// Error{io} naming the file.
void copy_tree(int from, int to);

}  // namespace tidelock::sandbox

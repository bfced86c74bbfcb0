// Values of a recorded step in one stretch of memory, those that don't live together on top of each
// other.
#pragma once

#include <cstdint>
#include <vector>

namespace lmi {

struct ArenaValue {
  int64_t num_bytes = 0;   // with what keeps the next one aligned
  int32_t first_node = 0;  // the node that defines it
  int32_t last_node = 0;   // the last node that reads it
  int64_t offset = 0;
};

// Fills in offsets and returns the bytes of all. First fit, largest values first, of equal ones the
// first: a value takes the lowest offset where it overlaps no placed value that is alive at the
// same time.
int64_t assign_offsets(std::vector<ArenaValue>& values);

}  // namespace lmi

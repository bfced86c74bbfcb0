#include "graph/arena.h"

#include <algorithm>

namespace lmi {

int64_t assign_offsets(std::vector<ArenaValue>& values) {
  std::vector<ArenaValue*> order;
  for (ArenaValue& value : values) order.push_back(&value);
  std::stable_sort(order.begin(), order.end(), [](const ArenaValue* a, const ArenaValue* b) {
    return a->num_bytes > b->num_bytes;
  });
  std::vector<const ArenaValue*> placed;  // by offset
  int64_t total = 0;
  for (ArenaValue* value : order) {
    value->offset = 0;
    for (const ArenaValue* other : placed) {
      const bool both_alive =
          value->first_node <= other->last_node && other->first_node <= value->last_node;
      if (!both_alive) continue;
      if (value->offset + value->num_bytes <= other->offset) break;
      value->offset = std::max(value->offset, other->offset + other->num_bytes);
    }
    total = std::max(total, value->offset + value->num_bytes);
    const auto after =
        std::upper_bound(placed.begin(), placed.end(), value,
                         [](const auto* a, const auto* b) { return a->offset < b->offset; });
    placed.insert(after, value);
  }
  return total;
}

}  // namespace lmi

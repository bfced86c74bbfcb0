// The recorded graph in words, a line per node.
#include <sstream>

#include "graph/graph.h"

namespace lmi {

std::vector<std::string> Graph::describe() const {
  std::vector<std::string> lines;
  const auto operand = [this](ValueId id) {
    const Value& value = values_[id];
    std::ostringstream text;
    text << value.name << ' ' << dtype_name(value.dtype) << '['
         << "TLE"[static_cast<int>(value.rows)] << ", " << value.columns << "] @" << value.offset;
    return text.str();
  };
  for (const Node& node : nodes_) {
    std::ostringstream line;
    std::visit(
        [&](const auto& n) {
          line << n.kName;
          if constexpr (requires { n.x; }) line << ' ' << operand(n.x);
          if constexpr (requires { n.qkv; }) line << ' ' << operand(n.qkv);
          if constexpr (requires {
                          n.q;
                          n.y;
                        })
            line << ' ' << operand(n.q);
          if constexpr (requires { n.logits; }) line << ' ' << operand(n.logits);
          if constexpr (requires { n.args.weight.num_outputs; }) {
            line << " x " << dtype_name(n.args.weight.dtype) << '[';
            if (n.args.weight.num_experts > 1) line << n.args.weight.num_experts << ", ";
            line << n.args.weight.num_outputs << ", " << n.args.weight.num_inputs << ']';
          }
          if constexpr (requires { n.y; }) {
            line << " -> " << operand(n.y);
          } else if constexpr (requires { n.qkv; }) {
            line << " -> " << operand(n.q);
          }
        },
        node);
    lines.push_back(line.str());
  }
  return lines;
}

}  // namespace lmi

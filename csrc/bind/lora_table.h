// A LoRA table as Python sees it: it keeps alive the weights in its slots.
#pragma once

#include <pybind11/pybind11.h>

#include <unordered_map>
#include <utility>

#include "graph/lora_table.h"

namespace lmi {

struct PyLoraTable {
  LoraTable table;
  std::unordered_map<int32_t, pybind11::object> adapters;
};

}  // namespace lmi

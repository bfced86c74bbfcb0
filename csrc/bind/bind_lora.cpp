// LoRA adapters.
#include <pybind11/stl.h>

#include <memory>
#include <tuple>
#include <vector>

#include "bind/arrays.h"
#include "bind/bind.h"
#include "bind/lora_table.h"
#include "graph/linear_weight.h"

namespace py = pybind11;

namespace lmi {
namespace {

using Part = std::tuple<const LinearWeight*, const LinearWeight*, int64_t>;

cpu::LoraLinear lora_linear(const std::vector<Part>& parts) {
  LMI_CHECK(parts.size() <= cpu::kMaxLoraParts, parts.size(), " parts of a linear, at most ",
            cpu::kMaxLoraParts);
  cpu::LoraLinear linear;
  for (const auto& [a, b, first_output] : parts) {
    linear.parts[linear.num_parts++] = {a->packed(), b->packed(), first_output};
  }
  return linear;
}

void set(PyLoraTable& self, int32_t slot, const py::object& adapter) {
  std::vector<cpu::LoraLinear> linears;
  for (const auto& parts : adapter.cast<std::vector<std::vector<Part>>>()) {
    linears.push_back(lora_linear(parts));
  }
  self.table.set(slot, std::move(linears));
  self.adapters[slot] = adapter;
}

}  // namespace

void bind_lora(py::module_& m) {
  py::class_<PyLoraTable>(m, "LoraTable")
      .def(py::init([](const std::vector<std::pair<int64_t, int64_t>>& linears,
                       const std::string& dtype) {
             std::vector<LoraShape> shapes;
             for (const auto& [num_inputs, num_outputs] : linears) {
               shapes.push_back({num_inputs, num_outputs});
             }
             return std::make_unique<PyLoraTable>(
                 PyLoraTable{LoraTable(std::move(shapes), parse_dtype(dtype)), {}});
           }),
           py::arg("linears"), py::kw_only(), py::arg("dtype"))
      .def("set", &set, py::arg("slot"), py::arg("adapter"))
      .def(
          "clear",
          [](PyLoraTable& self, int32_t slot) {
            self.table.clear(slot);
            self.adapters.erase(slot);
          },
          py::arg("slot"));
}

}  // namespace lmi

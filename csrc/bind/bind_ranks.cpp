// Sums over slices, and the group of ranks that compute a model together.
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <utility>

#include "bind/arrays.h"
#include "bind/bind.h"
#include "bind/lora_table.h"
#include "bind/py_graph.h"
#include "graph/graph.h"
#include "graph/linear_weight.h"
#include "graph/rank_group.h"
#include "graph/rank_worker.h"

namespace py = pybind11;

namespace lmi {
namespace {

cpu::LinearArgs args_of(const py::object& weight) {
  cpu::LinearArgs args;
  args.weight = weight.cast<const LinearWeight&>().packed();
  return args;
}

Handle summed_linear(PyGraph& self, const Handle& x, const py::object& slices,
                     const std::optional<FloatArray>& bias, const Handle* residual,
                     const py::object& table, const std::vector<int32_t>& linear_ids) {
  std::vector<cpu::LinearArgs> parts;
  for (const py::object& owner : weights_of(self, slices)) {
    parts.push_back(args_of(owner));
  }
  if (bias) self.keep(*bias);
  LMI_CHECK(!parts.empty(), "a linear has a weight");
  const float* added = floats(bias, parts[0].weight.num_outputs, "the bias");
  const ValueId onto = residual == nullptr ? -1 : id_of(self, *residual);
  if (!table.is_none()) self.keep(table);
  const LoraTable* adapters = table.is_none() ? nullptr : &table.cast<const PyLoraTable&>().table;
  return {&self,
          self.graph.summed_linear(id_of(self, x), parts, added, onto, adapters, linear_ids)};
}

Handle summed_experts(PyGraph& self, const Handle& x, const Handle& routes,
                      const py::object& slices, const std::optional<FloatArray>& bias,
                      const Handle& residual) {
  std::vector<cpu::LinearArgs> parts;
  for (const py::object& owner : weights_of(self, slices)) {
    parts.push_back(args_of(owner));
  }
  if (bias) self.keep(*bias);
  LMI_CHECK(!parts.empty(), "experts have weights");
  const cpu::PackedLinear& first = parts[0].weight;
  parts[0].bias = floats(bias, first.num_experts * first.num_outputs, "the bias");
  return {&self, self.graph.summed_experts(id_of(self, x), id_of(self, routes), parts,
                                           id_of(self, residual))};
}

Handle norm_all_heads(PyGraph& self, const Handle& qkv, const FloatArray& q_weight,
                      const FloatArray& k_weight, float eps, int64_t head_dim, int32_t num_alike) {
  LMI_CHECK(head_dim > 0 && q_weight.size() % head_dim == 0 && k_weight.size() % head_dim == 0,
            q_weight.size(), " and ", k_weight.size(), " weights of heads of ", head_dim);
  self.keep(q_weight);
  self.keep(k_weight);
  return {&self, self.graph.norm_all_heads(id_of(self, qkv), q_weight.data(), k_weight.data(), eps,
                                           head_dim, q_weight.size() / head_dim,
                                           k_weight.size() / head_dim, num_alike)};
}

Handle gathered_linear(PyGraph& self, const Handle& x, const py::object& weight,
                       const std::optional<FloatArray>& bias, int64_t first_column) {
  if (bias) self.keep(*bias);
  std::vector<cpu::LinearArgs> parts;
  int64_t num_outputs = 0;
  for (const py::object& owner : weights_of(self, weight)) {
    parts.push_back(args_of(owner));
    if (bias) parts.back().bias = bias->data() + num_outputs;
    num_outputs += parts.back().weight.num_outputs;
  }
  floats(bias, num_outputs, "the bias");
  return {&self, self.graph.gathered_linear(id_of(self, x), parts, first_column)};
}

void bind_rank_group(py::module_& m) {
  py::class_<RankGroup>(m, "RankGroup")
      .def(py::init([](int32_t num_ranks, int32_t rank, int descriptor, int32_t max_tokens,
                       int32_t max_seqs, int32_t max_logit_rows, int32_t max_blocks_per_seq,
                       int32_t block_size, int64_t num_columns, int64_t vocab_size) {
             const StepCapacity capacity{.max_tokens = max_tokens,
                                         .max_seqs = max_seqs,
                                         .max_logit_rows = max_logit_rows,
                                         .max_copies = max_seqs,
                                         .max_blocks_per_seq = max_blocks_per_seq,
                                         .block_size = block_size};
             return std::make_unique<RankGroup>(
                 RankSizes{num_ranks, capacity, num_columns, vocab_size}, rank, descriptor);
           }),
           py::kw_only(), py::arg("num_ranks"), py::arg("rank"), py::arg("descriptor") = -1,
           py::arg("max_tokens"), py::arg("max_seqs"), py::arg("max_logit_rows"),
           py::arg("max_blocks_per_seq"), py::arg("block_size"), py::arg("num_columns"),
           py::arg("vocab_size"))
      .def_property_readonly("descriptor", &RankGroup::descriptor)
      .def_property_readonly("is_lost", &RankGroup::is_lost)
      .def_property_readonly("reason", &RankGroup::reason)
      .def("wait_until_over", &RankGroup::wait_until_over, py::call_guard<py::gil_scoped_release>())
      .def("lose", &RankGroup::lose, py::arg("why"))
      .def("close", &RankGroup::close)
      .def("add_order", &RankGroup::add_order)
      .def("finish_order", &RankGroup::finish_order)
      .def(
          "serve",
          [](RankGroup& self, PyGraph& graph, int32_t num_threads) {
            const py::gil_scoped_release release;
            serve_rank(self, graph.graph, num_threads);
          },
          py::arg("graph"), py::arg("num_threads"));
}

}  // namespace

void bind_ranks(py::module_& m, py::class_<PyGraph>& graph) {
  bind_rank_group(m);
  graph
      .def("summed_linear", &summed_linear, py::arg("x"), py::arg("slices"), py::kw_only(),
           py::arg("bias") = py::none(), py::arg("residual") = py::none(),
           py::arg("table") = py::none(), py::arg("linear_ids") = std::vector<int32_t>(),
           py::keep_alive<0, 1>())
      .def("summed_experts", &summed_experts, py::arg("x"), py::arg("routes"), py::arg("slices"),
           py::kw_only(), py::arg("bias") = py::none(), py::arg("residual"), py::keep_alive<0, 1>())
      .def("norm_all_heads", &norm_all_heads, py::arg("qkv"), py::arg("q_weight"),
           py::arg("k_weight"), py::arg("eps"), py::kw_only(), py::arg("head_dim"),
           py::arg("num_alike") = 1, py::keep_alive<0, 1>())
      .def("gathered_linear", &gathered_linear, py::arg("x"), py::arg("weight"), py::kw_only(),
           py::arg("bias") = py::none(), py::arg("first_column"), py::keep_alive<0, 1>())
      .def(
          "meet", [](PyGraph& self, const Handle& x) { self.graph.meet(id_of(self, x)); },
          py::arg("x"))
      .def(
          "join",
          [](PyGraph& self, py::object group) {
            self.graph.join(group.cast<RankGroup&>());
            self.keep(std::move(group));
          },
          py::arg("group"));
}

}  // namespace lmi

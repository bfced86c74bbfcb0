// The step graph.
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <unordered_map>

#include "bind/arrays.h"
#include "bind/bind.h"
#include "bind/lora_table.h"
#include "bind/owned_where_made.h"
#include "bind/py_graph.h"
#include "graph/graph.h"
#include "graph/linear_weight.h"
#include "kv/kv_cache.h"

namespace py = pybind11;

namespace lmi {
namespace {

cpu::InstructionSet instruction_set(const std::string& name) {
  return name.empty() ? cpu::default_instruction_set() : cpu::parse_instruction_set(name);
}

void bind_handle(py::module_& m) {
  py::class_<Handle>(m, "Handle")
      .def_property_readonly("name", [](const Handle& h) { return h.value().name; })
      .def_property_readonly("dtype", [](const Handle& h) { return dtype_name(h.value().dtype); })
      .def_property_readonly("columns", [](const Handle& h) { return h.value().columns; })
      .def_property_readonly(
          "rows",
          [](const Handle& h) { return std::string(1, "TLE"[static_cast<int>(h.value().rows)]); })
      .def("__bool__", [](const Handle& h) -> bool {
        throw py::type_error("handle " + h.value().name +
                             " has no truth value: it stands for data that a step will compute");
      });
}

Handle embed(PyGraph& self, const py::array& table, float scale, const std::string& format) {
  check_matrix(table, "the embedding table");
  self.keep(table);
  cpu::EmbedArgs args = table_args(table, format);
  args.scale = scale;
  return {&self, self.graph.embed(args)};
}

Handle add_positions(PyGraph& self, const Handle& x, const py::array& table, int32_t offset,
                     const std::string& format) {
  check_matrix(table, "the table of positions");
  self.keep(table);
  cpu::EmbedArgs args = table_args(table, format);
  args.offset = offset;
  return {&self, self.graph.add_positions(id_of(self, x), args)};
}

Handle add_token_types(PyGraph& self, const Handle& x, const py::array& table) {
  check_matrix(table, "the table of token types");
  self.keep(table);
  return {&self, self.graph.add_token_types(id_of(self, x), {.table = table.data(),
                                                             .table_dtype = array_dtype(table),
                                                             .num_columns = table.shape(1)})};
}

// Weights and biases for columns of the graph's, in groups that are normalised each on its own.
cpu::NormArgs norm_args(PyGraph& self, const std::optional<FloatArray>& weight,
                        const std::optional<FloatArray>& bias, float eps, const std::string& kind,
                        int64_t num_columns, int64_t num_groups) {
  if (weight) self.keep(*weight);
  if (bias) self.keep(*bias);
  return {.kind = parse_norm(kind),
          .weight = floats(weight, num_columns, "the norm's weight"),
          .bias = floats(bias, num_columns, "the norm's bias"),
          .eps = eps,
          .num_columns = num_columns / num_groups,
          .num_groups = num_groups};
}

Handle norm(PyGraph& self, const Handle& x, const std::optional<FloatArray>& weight,
            const std::optional<FloatArray>& bias, float eps, const std::string& kind,
            const Handle* residual, const std::string& out_dtype, const LinearWeight* reader) {
  cpu::NormArgs args = norm_args(self, weight, bias, eps, kind, x.value().columns, 1);
  if (residual != nullptr) {
    return {&self, self.graph.norm_add(id_of(self, x), id_of(self, *residual), args)};
  }
  LMI_CHECK(out_dtype == "fp32" || out_dtype == "act", "out_dtype '", out_dtype,
            "'; known are fp32, act");
  args.y_dtype = out_dtype == "act" ? self.graph.config().act_dtype : DType::kF32;
  return {&self,
          self.graph.norm(id_of(self, x), args, reader == nullptr ? nullptr : &reader->packed())};
}

Handle rms_norm(PyGraph& self, const Handle& x, const FloatArray& weight, float eps,
                const LinearWeight* reader) {
  return norm(self, x, weight, std::nullopt, eps, "rms", nullptr, "act", reader);
}

Handle norm_heads(PyGraph& self, const Handle& x, const FloatArray& weight,
                  const std::optional<FloatArray>& bias, float eps, const std::string& kind,
                  int64_t first_column, int64_t num_groups) {
  LMI_CHECK(num_groups > 0 && weight.size() % num_groups == 0, weight.size(), " weights for ",
            num_groups, " groups");
  cpu::NormArgs args = norm_args(self, weight, bias, eps, kind, weight.size(), num_groups);
  args.first_column = first_column;
  return {&self, self.graph.norm_heads(id_of(self, x), args)};
}

// weight: one, or a list of the parts of one.
Handle linear(PyGraph& self, const Handle& x, const py::object& weight,
              const std::optional<FloatArray>& bias, const std::string& activation,
              const Handle* residual, const std::string& out_dtype, bool gated) {
  if (bias) self.keep(*bias);
  LMI_CHECK(out_dtype == "fp32" || out_dtype == "act", "out_dtype '", out_dtype,
            "'; known are fp32, act");
  std::vector<cpu::LinearArgs> parts;
  int64_t num_outputs = 0;
  for (const py::object& owner : weights_of(self, weight)) {
    cpu::LinearArgs args;
    args.weight = owner.cast<const LinearWeight&>().packed();
    args.activation = parse_activation(activation);
    const bool is_activated = args.activation != cpu::Activation::kNone;
    LMI_CHECK(!is_activated || gated == args.weight.gated, "gated is ", gated,
              " of a weight that is ", args.weight.gated);
    args.y_dtype = is_activated || out_dtype == "act" ? self.graph.config().act_dtype : DType::kF32;
    if (bias) args.bias = bias->data() + num_outputs;
    num_outputs += args.weight.num_outputs;
    parts.push_back(args);
  }
  floats(bias, num_outputs, "the bias");
  if (residual == nullptr) return {&self, self.graph.linear(id_of(self, x), parts)};
  LMI_CHECK(parts.size() == 1, "parts have no residual");
  return {&self, self.graph.linear_add(id_of(self, x), id_of(self, *residual), parts[0])};
}

Handle bounded(PyGraph& self, const Handle& x, cpu::Activation kind, float cap) {
  return {&self, self.graph.bounded(id_of(self, x), kind, cap)};
}

Handle lora_add(PyGraph& self, const Handle& x, const Handle& y, const py::object& table,
                int32_t linear_id) {
  self.keep(table);
  const LoraTable& adapters = table.cast<const PyLoraTable&>().table;
  return {&self, self.graph.lora_add(id_of(self, x), id_of(self, y), adapters, linear_id)};
}

Handle route(PyGraph& self, const Handle& x, int32_t top_k, const std::string& scoring,
             const std::optional<FloatArray>& bias, int32_t num_groups, int32_t top_groups,
             int32_t group_best, bool normalizes, float scale, float threshold) {
  if (bias) self.keep(*bias);
  const auto num_experts = static_cast<int32_t>(x.value().columns);
  return {&self, self.graph.route(id_of(self, x), {.num_experts = num_experts,
                                                   .top_k = top_k,
                                                   .scoring = parse_scoring(scoring),
                                                   .bias = floats(bias, num_experts, "the bias"),
                                                   .num_groups = num_groups,
                                                   .top_groups = top_groups,
                                                   .group_best = group_best,
                                                   .normalizes = normalizes,
                                                   .scale = scale,
                                                   .threshold = threshold})};
}

Handle grouped_linear(PyGraph& self, const Handle& x, const Handle& routes,
                      const py::object& weight_object, const std::optional<FloatArray>& bias,
                      const std::string& activation, const Handle* residual) {
  const auto& weight = weight_object.cast<const LinearWeight&>();
  self.keep(weight_object);
  if (bias) self.keep(*bias);
  cpu::LinearArgs args;
  args.weight = weight.packed();
  args.bias = floats(bias, args.weight.num_experts * args.weight.num_outputs, "the bias");
  args.activation = parse_activation(activation);
  args.y_dtype = self.graph.config().act_dtype;
  if (residual == nullptr) {
    return {&self, self.graph.grouped_linear(id_of(self, x), id_of(self, routes), args)};
  }
  return {&self, self.graph.grouped_linear_add(id_of(self, x), id_of(self, routes),
                                               id_of(self, *residual), args)};
}

Handle head_linear(PyGraph& self, const Handle& x, const py::object& weight_object,
                   int64_t num_heads, const std::string& out_dtype) {
  const auto& weight = weight_object.cast<const LinearWeight&>();
  self.keep(weight_object);
  LMI_CHECK(weight.packed().num_experts == num_heads, "matrices of ", weight.packed().num_experts,
            " heads, not ", num_heads);
  cpu::LinearArgs args;
  args.weight = weight.packed();
  args.y_dtype = out_dtype == "act" ? self.graph.config().act_dtype : DType::kF32;
  return {&self, self.graph.head_linear(id_of(self, x), args)};
}

Handle rope_cache_write(PyGraph& self, const Handle& qkv, const py::object& cache_object,
                        int32_t layer, int32_t num_q_heads, const FloatArray& cos,
                        const FloatArray& sin, const std::optional<FloatArray>& q_norm,
                        const std::optional<FloatArray>& k_norm, float norm_eps,
                        const Handle* latent) {
  const KvCacheView& cache = cache_object.cast<const KvCache&>().view();
  LMI_CHECK(cos.ndim() == 2 && sin.ndim() == 2 && cos.size() == sin.size(),
            "cos and sin are [positions, rotary / 2]");
  self.keep(cache_object);
  self.keep(cos);
  self.keep(sin);
  if (q_norm) self.keep(*q_norm);
  if (k_norm) self.keep(*k_norm);
  return {&self, self.graph.rope_cache_write(id_of(self, qkv),
                                             {.num_q_heads = num_q_heads,
                                              .cache = cache,
                                              .layer = layer,
                                              .cos = cos.data(),
                                              .sin = sin.data(),
                                              .rotary_dim = static_cast<int32_t>(2 * cos.shape(1)),
                                              .q_norm = floats(q_norm, cache.head_dim, "q_norm"),
                                              .k_norm = floats(k_norm, cache.head_dim, "k_norm"),
                                              .norm_eps = norm_eps},
                                             latent == nullptr ? -1 : id_of(self, *latent))};
}

Handle attention(PyGraph& self, const Handle& q, const py::object& cache_object, int32_t layer,
                 int32_t num_q_heads, float scale, int32_t window, float soft_cap,
                 const std::optional<FloatArray>& slopes, const std::optional<FloatArray>& sinks,
                 bool sees_later, const std::optional<FloatArray>& relative) {
  self.keep(cache_object);
  if (sinks) self.keep(*sinks);
  if (slopes) self.keep(*slopes);
  if (relative) self.keep(*relative);
  const int64_t span = relative ? relative->size() / num_q_heads / 2 : 0;
  return {&self, self.graph.attention(
                     id_of(self, q),
                     {.num_q_heads = num_q_heads,
                      .cache = cache_object.cast<const KvCache&>().view(),
                      .layer = layer,
                      .scale = scale,
                      .window = window,
                      .soft_cap = soft_cap,
                      .slopes = floats(slopes, num_q_heads, "slopes"),
                      .sees_later = sees_later,
                      .relative = floats(relative, 2 * span * num_q_heads, "the relative bias"),
                      .relative_span = static_cast<int32_t>(span),
                      .sinks = floats(sinks, num_q_heads, "sinks")})};
}

FloatArray read_value(const PyGraph& self, const Handle& x, int64_t num_rows) {
  const Value& value = x.value();
  const uint8_t* data = self.graph.data(id_of(self, x));
  FloatArray result({num_rows, value.columns});
  float* target = result.mutable_data();
  for (int64_t i = 0; i < num_rows * value.columns; ++i) {
    target[i] = value.dtype == DType::kF32
                    ? reinterpret_cast<const float*>(data)[i]
                    : bf16_to_float(reinterpret_cast<const bf16_t*>(data)[i]);
  }
  return result;
}

void bind_graph_class(py::module_& m) {
  py::class_<PyGraph> graph(m, "Graph");
  graph
      .def(py::init([](int32_t max_tokens, int32_t max_seqs, int32_t max_logit_rows,
                       int32_t max_blocks_per_seq, int32_t block_size, const std::string& act_dtype,
                       const std::string& level) {
             const StepCapacity capacity{.max_tokens = max_tokens,
                                         .max_seqs = max_seqs,
                                         .max_logit_rows = max_logit_rows,
                                         .max_blocks_per_seq = max_blocks_per_seq,
                                         .block_size = block_size};
             return std::make_unique<PyGraph>(
                 GraphConfig{.capacity = capacity,
                             .act_dtype = parse_dtype(act_dtype),
                             .instruction_set = instruction_set(level)});
           }),
           py::kw_only(), py::arg("max_tokens"), py::arg("max_seqs"), py::arg("max_logit_rows"),
           py::arg("max_blocks_per_seq"), py::arg("block_size"), py::arg("act_dtype"),
           py::arg("instruction_set") = "")
      .def("embed", &embed, py::arg("table"), py::arg("scale") = 1.0f, py::arg("format") = "",
           py::keep_alive<0, 1>())
      .def("add_positions", &add_positions, py::arg("x"), py::arg("table"), py::arg("offset"),
           py::arg("format") = "", py::keep_alive<0, 1>())
      .def("add_token_types", &add_token_types, py::arg("x"), py::arg("table"),
           py::keep_alive<0, 1>())
      .def("norm", &norm, py::arg("x"), py::arg("weight"), py::arg("bias"), py::arg("eps"),
           py::kw_only(), py::arg("kind"), py::arg("residual") = py::none(),
           py::arg("out_dtype") = "act", py::arg("reader") = py::none(), py::keep_alive<0, 1>())
      .def("norm_heads", &norm_heads, py::arg("x"), py::arg("weight"), py::arg("bias"),
           py::arg("eps"), py::kw_only(), py::arg("kind"), py::arg("first_column"),
           py::arg("num_groups"), py::keep_alive<0, 1>())
      .def("rms_norm", &rms_norm, py::arg("x"), py::arg("weight"), py::arg("eps"),
           py::arg("reader") = py::none(), py::keep_alive<0, 1>())
      .def("linear", &linear, py::arg("x"), py::arg("weight"), py::kw_only(),
           py::arg("bias") = py::none(), py::arg("activation") = "",
           py::arg("residual") = py::none(), py::arg("out_dtype") = "fp32", py::arg("gated") = true,
           py::keep_alive<0, 1>())
      .def(
          "gated_activation",
          [](PyGraph& self, const Handle& x, const std::string& activation) {
            return Handle{
                &self, self.graph.activation(id_of(self, x), parse_activation(activation), true)};
          },
          py::arg("x"), py::arg("activation"), py::keep_alive<0, 1>())
      .def(
          "activation",
          [](PyGraph& self, const Handle& x, const std::string& activation) {
            return Handle{
                &self, self.graph.activation(id_of(self, x), parse_activation(activation), false)};
          },
          py::arg("x"), py::arg("activation"), py::keep_alive<0, 1>())
      .def(
          "soft_cap",
          [](PyGraph& self, const Handle& x, float cap) {
            return bounded(self, x, cpu::Activation::kSoftCap, cap);
          },
          py::arg("x"), py::arg("cap"), py::keep_alive<0, 1>())
      .def(
          "clip",
          [](PyGraph& self, const Handle& x, float cap) {
            return bounded(self, x, cpu::Activation::kClip, cap);
          },
          py::arg("x"), py::arg("cap"), py::keep_alive<0, 1>())
      .def("lora_add", &lora_add, py::arg("x"), py::arg("y"), py::arg("table"),
           py::arg("linear_id"), py::keep_alive<0, 1>())
      .def("route", &route, py::arg("x"), py::kw_only(), py::arg("top_k"), py::arg("scoring"),
           py::arg("bias") = py::none(), py::arg("num_groups") = 1, py::arg("top_groups") = 1,
           py::arg("group_best") = 1, py::arg("normalizes") = false, py::arg("scale") = 1.0f,
           py::arg("threshold") = 0.0f, py::keep_alive<0, 1>())
      .def("grouped_linear", &grouped_linear, py::arg("x"), py::arg("routes"), py::arg("weight"),
           py::kw_only(), py::arg("bias") = py::none(), py::arg("activation") = "",
           py::arg("residual") = py::none(), py::keep_alive<0, 1>())
      .def("head_linear", &head_linear, py::arg("x"), py::arg("weight"), py::kw_only(),
           py::arg("num_heads"), py::arg("out_dtype") = "fp32", py::keep_alive<0, 1>())
      .def("rope_cache_write", &rope_cache_write, py::arg("qkv"), py::arg("cache"),
           py::arg("layer"), py::kw_only(), py::arg("num_q_heads"), py::arg("cos"), py::arg("sin"),
           py::arg("q_norm") = py::none(), py::arg("k_norm") = py::none(),
           py::arg("norm_eps") = 0.0f, py::arg("latent") = py::none(), py::keep_alive<0, 1>())
      .def("attention", &attention, py::arg("q"), py::arg("cache"), py::arg("layer"), py::kw_only(),
           py::arg("num_q_heads"), py::arg("scale"), py::arg("window") = 0,
           py::arg("soft_cap") = 0.0f, py::arg("slopes") = py::none(),
           py::arg("sinks") = py::none(), py::arg("sees_later") = false,
           py::arg("relative") = py::none(), py::keep_alive<0, 1>())
      .def(
          "gather_logit_rows",
          [](PyGraph& self, const Handle& x) {
            return Handle{&self, self.graph.gather_logit_rows(id_of(self, x))};
          },
          py::arg("x"), py::keep_alive<0, 1>())
      .def(
          "sample",
          [](PyGraph& self, const Handle& logits) { self.graph.sample(id_of(self, logits)); },
          py::arg("logits"))
      .def(
          "output", [](PyGraph& self, const Handle& x) { self.graph.output(id_of(self, x)); },
          py::arg("x"))
      .def("finish", [](PyGraph& self) { self.graph.finish(); })
      .def("read", &read_value, py::arg("x"), py::arg("num_rows"))
      .def_property_readonly("arena_bytes",
                             [](const PyGraph& self) { return self.graph.arena_bytes(); })
      .def("describe", [](const PyGraph& self) { return self.graph.describe(); })
      .def(
          "measure_nodes",
          [](PyGraph& self, int32_t num_tokens, int32_t as_threads) {
            self.graph.measure_nodes(num_tokens, as_threads);
          },
          py::arg("num_tokens"), py::arg("as_threads") = 0)
      .def("node_times", [](const PyGraph& self) {
        py::list rows;
        for (const NodeTime& time : self.graph.node_times()) {
          rows.append(
              py::make_tuple(time.num_steps, time.wall_ns, time.cpu_ns.load(), time.num_chunks));
        }
        return rows;
      });
  bind_kept_rows(graph);
  bind_ranks(m, graph);
}

}  // namespace

void bind_graph(py::module_& m) {
  bind_handle(m);
  bind_graph_class(m);
}

}  // namespace lmi

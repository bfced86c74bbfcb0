// Weights, the KV cache, the step graph and the worker.
#include <pybind11/stl.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <unordered_map>

#include "bind/arrays.h"
#include "bind/bind.h"
#include "common/checksum.h"
#include "graph/graph.h"
#include "graph/linear_weight.h"
#include "graph/worker.h"
#include "kv/kv_cache.h"

namespace py = pybind11;

namespace lmi {
namespace {

cpu::InstructionSet instruction_set(const std::string& name) {
  return name.empty() ? cpu::default_instruction_set() : cpu::parse_instruction_set(name);
}

const float* floats(const std::optional<FloatArray>& array, int64_t size, const char* what) {
  if (!array) return nullptr;
  LMI_CHECK(array->size() == size, what, " has ", array->size(), " elements, not ", size);
  return array->data();
}

// A step graph as Python sees it: handles know their graph, and the graph keeps alive every Python
// object whose memory its nodes read.
class PyGraph {
 public:
  explicit PyGraph(const GraphConfig& config) : graph(config) {}

  void keep(py::object object) { kept_.push_back(std::move(object)); }

  Graph graph;

 private:
  std::vector<py::object> kept_;
};

struct Handle {
  const PyGraph* owner;
  ValueId id;
  const Value& value() const { return owner->graph.value(id); }
};

ValueId id_of(const PyGraph& graph, const Handle& handle) {
  LMI_CHECK(handle.owner == &graph, "handle ", handle.value().name, " belongs to another graph");
  return handle.id;
}

// A matrix, or e4m3 bytes of one (uint8) and their scales.
cpu::LinearPart linear_part(const py::object& source, int64_t& num_inputs) {
  const bool is_scaled = py::isinstance<py::tuple>(source);
  const auto matrix = py::cast<py::array>(is_scaled ? py::cast<py::tuple>(source)[0] : source);
  check_matrix(matrix, "a weight's part");
  LMI_CHECK(num_inputs == 0 || matrix.shape(1) == num_inputs, "parts have ", num_inputs, " and ",
            matrix.shape(1), " inputs");
  num_inputs = matrix.shape(1);
  if (!is_scaled) return {matrix.data(), array_dtype(matrix), matrix.shape(0)};
  LMI_CHECK(matrix.dtype().kind() == 'u' && matrix.itemsize() == 1, "e4m3 weights are uint8");
  const auto scales = py::cast<py::array>(py::cast<py::tuple>(source)[1]);
  check_matrix(scales, "a part's scales");
  const int64_t num_blocks = (num_inputs + cpu::kScaleInputs - 1) / cpu::kScaleInputs;
  LMI_CHECK(array_dtype(scales) == DType::kF32 && scales.shape(0) == matrix.shape(0) &&
                (scales.shape(1) == 1 || scales.shape(1) == num_blocks),
            "scales are fp32 [", matrix.shape(0), ", 1 or ", num_blocks, "]");
  return {matrix.data(), DType::kE4M3, matrix.shape(0), static_cast<const float*>(scales.data()),
          scales.shape(1)};
}

std::unique_ptr<LinearWeight> pack(const std::vector<py::object>& parts, const std::string& format,
                                   bool gated, int32_t group_size, const std::string& level,
                                   int32_t num_threads) {
  instruction_set(level);  // only checked: every level reads the same order
  LMI_CHECK(!parts.empty(), "a weight needs at least one part");
  std::vector<cpu::LinearPart> sources;
  int64_t num_inputs = 0;
  for (const py::object& part : parts) sources.push_back(linear_part(part, num_inputs));
  const cpu::LinearFormat target{parse_dtype(format), group_size};
  const py::gil_scoped_release release;
  return std::make_unique<LinearWeight>(sources, num_inputs, gated, target, num_threads);
}

FloatArray unpack(const LinearWeight& weight) {
  const cpu::PackedLinear& packed = weight.packed();
  FloatArray result({packed.num_outputs, packed.num_inputs});
  cpu::unpack_linear(packed, result.mutable_data());
  return result;
}

std::unique_ptr<LinearWeight> read(std::shared_ptr<MappedFile> file, int64_t offset,
                                   int64_t num_bytes, uint64_t checksum, int64_t num_outputs,
                                   int64_t num_inputs, const std::string& format, bool gated,
                                   int32_t group_size, int32_t num_threads) {
  const LinearShape shape{num_outputs, num_inputs, gated, {parse_dtype(format), group_size}};
  const py::gil_scoped_release release;
  return std::make_unique<LinearWeight>(
      shape, PackedSlice{std::move(file), offset, num_bytes, checksum}, num_threads);
}

py::array_t<uint8_t> packed_bytes(const py::object& self) {
  const auto& weight = self.cast<const LinearWeight&>();
  py::array_t<uint8_t> array = array_view<uint8_t>({weight.num_bytes()}, weight.data(), self);
  array.attr("setflags")(py::arg("write") = false);
  return array;
}

uint64_t packed_checksum(const LinearWeight& weight) {
  const py::gil_scoped_release release;
  return checksum(weight.data(), weight.num_bytes());
}

void bind_linear_weight(py::module_& m) {
  py::class_<LinearWeight>(m, "LinearWeight")
      .def_static("pack", &pack, py::arg("parts"), py::kw_only(), py::arg("format"),
                  py::arg("gated") = false, py::arg("group_size") = 0,
                  py::arg("instruction_set") = "", py::arg("num_threads") = 0)
      .def_static("read", &read, py::kw_only(), py::arg("file"), py::arg("offset"),
                  py::arg("num_bytes"), py::arg("checksum"), py::arg("num_outputs"),
                  py::arg("num_inputs"), py::arg("format"), py::arg("gated") = false,
                  py::arg("group_size") = 0, py::arg("num_threads") = 0)
      .def_readonly_static("layout_version", &cpu::kPackedLayoutVersion)
      .def_property_readonly("num_outputs",
                             [](const LinearWeight& w) { return w.packed().num_outputs; })
      .def_property_readonly("num_inputs",
                             [](const LinearWeight& w) { return w.packed().num_inputs; })
      .def_property_readonly("format",
                             [](const LinearWeight& w) { return dtype_name(w.packed().dtype); })
      .def_property_readonly("group_size",
                             [](const LinearWeight& w) { return w.packed().group_size; })
      .def_property_readonly("num_bytes", &LinearWeight::num_bytes)
      .def("packed", &packed_bytes)
      .def("checksum", &packed_checksum)
      .def("unpack", &unpack);
}

KvCacheView cache_shape(int32_t num_layers, int32_t num_blocks, int32_t block_size,
                        int32_t num_kv_heads, int32_t head_dim, const std::string& dtype) {
  return {.base = nullptr,
          .dtype = parse_dtype(dtype),
          .num_layers = num_layers,
          .num_blocks = num_blocks,
          .block_size = block_size,
          .num_kv_heads = num_kv_heads,
          .head_dim = head_dim};
}

py::tuple read_block(const KvCache& cache, int32_t layer, int32_t block) {
  const KvCacheView& view = cache.view();
  LMI_CHECK(layer >= 0 && layer < view.num_layers, "layer ", layer);
  LMI_CHECK(block >= 0 && block < view.num_blocks, "block ", block);
  const std::vector<py::ssize_t> shape{view.block_size, view.num_kv_heads, view.head_dim};
  FloatArray keys(shape);
  FloatArray values(shape);
  const auto element = [&](const uint8_t* base, int64_t index, int32_t token) {
    if (view.dtype == DType::kF32) return reinterpret_cast<const float*>(base)[index];
    if (view.dtype == DType::kBF16) {
      return bf16_to_float(reinterpret_cast<const bf16_t*>(base)[index]);
    }
    const float* scales = reinterpret_cast<const float*>(base + view.scale_offset());
    return scales[token] * static_cast<float>(reinterpret_cast<const int8_t*>(base)[index]);
  };
  for (int32_t token = 0; token < view.block_size; ++token) {
    for (int32_t head = 0; head < view.num_kv_heads; ++head) {
      for (int32_t dim = 0; dim < view.head_dim; ++dim) {
        keys.mutable_at(token, head, dim) =
            element(view.key(layer, block, head), view.key_element(token, dim), token);
        values.mutable_at(token, head, dim) =
            element(view.value(layer, block, head), view.value_element(token, dim), token);
      }
    }
  }
  return py::make_tuple(keys, values);
}

void bind_kv_cache(py::module_& m) {
  py::class_<KvCache>(m, "KvCache")
      .def(py::init([](int32_t num_layers, int32_t num_blocks, int32_t block_size,
                       int32_t num_kv_heads, int32_t head_dim, const std::string& dtype) {
             return std::make_unique<KvCache>(
                 cache_shape(num_layers, num_blocks, block_size, num_kv_heads, head_dim, dtype));
           }),
           py::kw_only(), py::arg("num_layers"), py::arg("num_blocks"), py::arg("block_size"),
           py::arg("num_kv_heads"), py::arg("head_dim"), py::arg("dtype"))
      .def_static(
          "block_bytes",
          [](int32_t num_layers, int32_t block_size, int32_t num_kv_heads, int32_t head_dim,
             const std::string& dtype) {
            return cache_shape(num_layers, 1, block_size, num_kv_heads, head_dim, dtype)
                .total_bytes();
          },
          py::kw_only(), py::arg("num_layers"), py::arg("block_size"), py::arg("num_kv_heads"),
          py::arg("head_dim"), py::arg("dtype"))
      .def_property_readonly("num_bytes", &KvCache::num_bytes)
      .def("read", &read_block, py::arg("layer"), py::arg("block_id"));
}

void bind_handle(py::module_& m) {
  py::class_<Handle>(m, "Handle")
      .def_property_readonly("name", [](const Handle& h) { return h.value().name; })
      .def_property_readonly("dtype", [](const Handle& h) { return dtype_name(h.value().dtype); })
      .def_property_readonly("columns", [](const Handle& h) { return h.value().columns; })
      .def_property_readonly(
          "rows", [](const Handle& h) { return h.value().rows == RowSymbol::kTokens ? "T" : "L"; })
      .def("__bool__", [](const Handle& h) -> bool {
        throw py::type_error("handle " + h.value().name +
                             " has no truth value: it stands for data that a step will compute");
      });
}

Handle embed(PyGraph& self, const py::array& table, float scale) {
  check_matrix(table, "the embedding table");
  self.keep(table);
  return {&self, self.graph.embed({.table = table.data(),
                                   .table_dtype = array_dtype(table),
                                   .scale = scale,
                                   .num_columns = table.shape(1)})};
}

Handle rms_norm(PyGraph& self, const Handle& x, const FloatArray& weight, float eps) {
  self.keep(weight);
  return {&self,
          self.graph.rms_norm(id_of(self, x),
                              {.weight = weight.data(), .eps = eps, .num_columns = weight.size()})};
}

Handle linear(PyGraph& self, const Handle& x, const py::object& weight_object,
              const std::optional<FloatArray>& bias, const std::string& activation,
              const Handle* residual, const std::string& out_dtype) {
  const auto& weight = weight_object.cast<const LinearWeight&>();
  self.keep(weight_object);
  if (bias) self.keep(*bias);
  cpu::LinearArgs args;
  args.weight = weight.packed();
  args.bias = floats(bias, args.weight.num_outputs, "the bias");
  args.activation = parse_activation(activation);
  LMI_CHECK(out_dtype == "fp32" || out_dtype == "act", "out_dtype '", out_dtype,
            "'; known are fp32, act");
  const bool is_gated = args.activation != cpu::Activation::kNone;
  args.y_dtype = is_gated || out_dtype == "act" ? self.graph.config().act_dtype : DType::kF32;
  if (residual == nullptr) return {&self, self.graph.linear(id_of(self, x), args)};
  return {&self, self.graph.linear_add(id_of(self, x), id_of(self, *residual), args)};
}

Handle rope_cache_write(PyGraph& self, const Handle& qkv, const py::object& cache_object,
                        int32_t layer, int32_t num_q_heads, const FloatArray& cos,
                        const FloatArray& sin, const std::optional<FloatArray>& q_norm,
                        const std::optional<FloatArray>& k_norm, float norm_eps) {
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
                                              .norm_eps = norm_eps})};
}

Handle attention(PyGraph& self, const Handle& q, const py::object& cache_object, int32_t layer,
                 int32_t num_q_heads, float scale, int32_t window, float soft_cap) {
  self.keep(cache_object);
  return {&self,
          self.graph.attention(id_of(self, q), {.num_q_heads = num_q_heads,
                                                .cache = cache_object.cast<const KvCache&>().view(),
                                                .layer = layer,
                                                .scale = scale,
                                                .window = window,
                                                .soft_cap = soft_cap})};
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
  py::class_<PyGraph>(m, "Graph")
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
      .def("embed", &embed, py::arg("table"), py::arg("scale") = 1.0f, py::keep_alive<0, 1>())
      .def("rms_norm", &rms_norm, py::arg("x"), py::arg("weight"), py::arg("eps"),
           py::keep_alive<0, 1>())
      .def("linear", &linear, py::arg("x"), py::arg("weight"), py::kw_only(),
           py::arg("bias") = py::none(), py::arg("activation") = "",
           py::arg("residual") = py::none(), py::arg("out_dtype") = "fp32", py::keep_alive<0, 1>())
      .def("rope_cache_write", &rope_cache_write, py::arg("qkv"), py::arg("cache"),
           py::arg("layer"), py::kw_only(), py::arg("num_q_heads"), py::arg("cos"), py::arg("sin"),
           py::arg("q_norm") = py::none(), py::arg("k_norm") = py::none(),
           py::arg("norm_eps") = 0.0f, py::keep_alive<0, 1>())
      .def("attention", &attention, py::arg("q"), py::arg("cache"), py::arg("layer"), py::kw_only(),
           py::arg("num_q_heads"), py::arg("scale"), py::arg("window") = 0,
           py::arg("soft_cap") = 0.0f, py::keep_alive<0, 1>())
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
          [](PyGraph& self, int32_t num_tokens) { self.graph.measure_nodes(num_tokens); },
          py::arg("num_tokens"))
      .def("node_times", [](const PyGraph& self) {
        py::list rows;
        for (const NodeTime& time : self.graph.node_times()) {
          rows.append(py::make_tuple(time.num_steps, time.wall_ns, time.cpu_ns.load()));
        }
        return rows;
      });
}

// A child of fork() has a copy of the object but not its threads, for which closing would wait.
struct DeleteWhereMade {
  pid_t process_id = getpid();
  void operator()(Worker* worker) const {
    if (getpid() == process_id) delete worker;
  }
};

void bind_worker(py::module_& m) {
  py::class_<Worker, std::unique_ptr<Worker, DeleteWhereMade>>(m, "Worker")
      .def(py::init<int32_t>(), py::arg("num_threads"))
      .def_property_readonly("num_threads", &Worker::num_threads)
      .def(
          "submit",
          [](Worker& worker, PyGraph& graph, StepBuffer& step, int completion_fd) {
            worker.submit(graph.graph, step, completion_fd);
          },
          py::arg("graph"), py::arg("step"), py::arg("completion_fd"))
      .def(
          "run",
          [](Worker& worker, PyGraph& graph, StepBuffer& step) {
            {
              const py::gil_scoped_release release;
              worker.submit(graph.graph, step, -1);
              worker.drain();
            }
            LMI_CHECK(step.error.empty(), step.error);
          },
          py::arg("graph"), py::arg("step"))
      .def("drain", &Worker::drain, py::call_guard<py::gil_scoped_release>())
      .def("close", &Worker::close, py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bind_graph(py::module_& m) {
  m.def("default_instruction_set",
        [] { return cpu::instruction_set_name(cpu::default_instruction_set()); });
  bind_linear_weight(m);
  bind_kv_cache(m);
  bind_handle(m);
  bind_graph_class(m);
  bind_worker(m);
}

}  // namespace lmi

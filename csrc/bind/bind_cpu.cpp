// Kernels one at a time over numpy arrays, for tests: submodule _native.kernels. bf16 arrays are
// uint16. Chunks run on the calling thread, in the order of a stride through them, in the partition
// that num_threads asks for.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "bind/arrays.h"
#include "bind/bind.h"
#include "bind/lora_table.h"
#include "common/aligned_memory.h"
#include "common/check.h"
#include "cpu/kernels.h"
#include "graph/linear_weight.h"

namespace py = pybind11;

namespace lmi {

namespace {

using cpu::Kernels;

const Kernels& find_kernels(const std::string& name) {
  return cpu::kernels(cpu::parse_instruction_set(name));
}

py::array make_array(DType dtype, int64_t num_rows, int64_t num_columns) {
  const char* name = dtype == DType::kF32 ? "float32" : "uint16";
  return py::array(py::dtype(name), {num_rows, num_columns});
}

// Every chunk once: 0, stride, 2 stride, ... modulo their number, which stride is made coprime to.
template <typename Args>
void run_chunks(const cpu::Kernel<Args>& kernel, const Args& args, int32_t num_threads,
                int64_t stride) {
  const AlignedMemory memory(cpu::kScratchBytes);
  cpu::Scratch scratch{memory.data(), memory.num_bytes()};
  const int64_t num_chunks = kernel.num_chunks(args, num_threads);
  while (num_chunks > 0 && std::gcd(stride, num_chunks) != 1) ++stride;
  for (int64_t i = 0; i < num_chunks; ++i) {
    kernel.run(args, i * stride % num_chunks, num_threads, scratch);
  }
}

// Rows of x as quantized_row_bytes() lays them out, as the weight takes them.
py::array_t<uint8_t> quantize_for(const cpu::PackedLinear& weight,
                                  const std::string& instruction_set, const py::array& x,
                                  int32_t num_threads) {
  LMI_CHECK(x.ndim() == 2 && x.strides(1) == x.itemsize(), "x is [rows, inputs]");
  const int64_t row_bytes =
      cpu::quantized_row_bytes(x.shape(1), weight.group_size, weight.rounding);
  py::array_t<uint8_t> y({static_cast<int64_t>(x.shape(0)), row_bytes});
  const cpu::QuantizeRowsArgs args{.x = x.data(),
                                   .x_dtype = array_dtype(x),
                                   .x_stride = x.strides(0) / x.itemsize(),
                                   .num_columns = x.shape(1),
                                   .group_size = weight.group_size,
                                   .rounding = weight.rounding,
                                   .input_order = weight.input_order,
                                   .y = y.mutable_data(),
                                   .num_rows = x.shape(0)};
  run_chunks(find_kernels(instruction_set).quantize_rows, args, num_threads, 1);
  return y;
}

py::array_t<uint8_t> run_quantize_rows(const std::string& instruction_set, const py::array& x,
                                       int32_t group_size, const std::string& rounding,
                                       int32_t num_threads) {
  cpu::PackedLinear weight;
  weight.group_size = group_size;
  weight.rounding = cpu::parse_row_rounding(rounding);
  return quantize_for(weight, instruction_set, x, num_threads);
}

py::array run_linear(const std::string& instruction_set, const py::array& x,
                     const LinearWeight& owner, const std::optional<py::array_t<float>>& bias,
                     const std::string& activation,
                     const std::optional<py::array_t<float>>& residual,
                     const std::string& out_dtype, int32_t num_threads, int64_t stride) {
  const cpu::PackedLinear& weight = owner.packed();
  cpu::LinearArgs args;
  LMI_CHECK(x.ndim() == 2 && x.shape(1) == weight.num_inputs, "x is [rows, inputs]");
  py::array_t<uint8_t> quantized;
  if (weight.takes_quantized_rows()) {
    quantized = quantize_for(weight, instruction_set, x, num_threads);
    args.x = quantized.data();
    args.x_stride = quantized.shape(1);
  } else {
    LMI_CHECK(weight.is_quantized() || array_dtype(x) == weight.dtype,
              "x has the dtype of the weight");
    args.x = x.data();
    args.x_dtype = array_dtype(x);
    args.x_stride = x.strides(0) / x.itemsize();
  }
  args.weight = weight;
  args.bias = bias ? bias->data() : nullptr;
  args.activation = parse_activation(activation);
  args.num_rows = x.shape(0);
  args.y_dtype = parse_dtype(out_dtype);
  args.y_stride = weight.num_outputs / (weight.gated ? 2 : 1);
  py::array y = make_array(args.y_dtype, args.num_rows, args.y_stride);
  args.y = y.mutable_data();
  if (residual) {
    LMI_CHECK(residual->size() == y.size() && args.y_dtype == DType::kF32, "residual is like y");
    std::copy_n(residual->data(), y.size(), static_cast<float*>(args.y));
    args.add_to_y = true;
  }
  run_chunks(find_kernels(instruction_set).linear, args, num_threads, stride);
  return y;
}

py::array run_activation(const std::string& instruction_set, const py::array_t<float>& x,
                         const std::string& name, bool gated, float cap,
                         const std::string& out_dtype, int32_t num_threads) {
  const DType dtype = parse_dtype(out_dtype);
  const int64_t num_columns = x.shape(1) / (gated ? 2 : 1);
  py::array y = make_array(dtype, x.shape(0), num_columns);
  const cpu::Activation bound = name == "clip" ? cpu::Activation::kClip : cpu::Activation::kSoftCap;
  const cpu::ActivationArgs args{.x = x.data(),
                                 .activation = cap > 0.0f ? bound : parse_activation(name),
                                 .gated = gated,
                                 .cap = cap,
                                 .y = y.mutable_data(),
                                 .y_dtype = dtype,
                                 .num_columns = num_columns,
                                 .num_rows = x.shape(0)};
  run_chunks(find_kernels(instruction_set).activation, args, num_threads, 1);
  return y;
}

// runs [num_runs, 3]: first row, rows, adapter slot. The sum is a copy.
FloatArray run_lora_add(const std::string& instruction_set, const py::array& x, const FloatArray& y,
                        const PyLoraTable& table, int32_t linear_id,
                        const std::vector<std::array<int32_t, 3>>& runs, int32_t num_threads,
                        int64_t stride) {
  std::vector<int32_t> first_rows, num_rows, slots;
  for (const auto& [first, count, slot] : runs) {
    LMI_CHECK(table.table.has(slot), "adapter slot ", slot, " is empty");
    first_rows.push_back(first);
    num_rows.push_back(count);
    slots.push_back(slot);
  }
  StepView step;
  step.num_adapter_runs = static_cast<int32_t>(runs.size());
  step.adapter_first_rows = first_rows.data();
  step.adapter_num_rows = num_rows.data();
  step.adapter_slots = slots.data();
  FloatArray sum({y.shape(0), y.shape(1)});
  std::copy_n(y.data(), y.size(), sum.mutable_data());
  const cpu::LoraAddArgs args{.x = x.data(),
                              .dtype = array_dtype(x),
                              .x_stride = x.strides(0) / x.itemsize(),
                              .y = sum.mutable_data(),
                              .y_stride = y.shape(1),
                              .slots = table.table.slots(),
                              .linear_id = linear_id,
                              .step = &step};
  run_chunks(find_kernels(instruction_set).lora_add, args, num_threads, stride);
  return sum;
}

py::array run_norm(const std::string& instruction_set, const py::array_t<float>& x,
                   const std::optional<FloatArray>& weight, const std::optional<FloatArray>& bias,
                   float eps, const std::string& kind, int64_t num_groups,
                   const std::string& out_dtype, int32_t group_size, const std::string& rounding,
                   int32_t num_threads) {
  const DType dtype = parse_dtype(out_dtype);
  const cpu::RowRounding row_rounding = cpu::parse_row_rounding(rounding);
  const int64_t row_bytes = cpu::quantized_row_bytes(x.shape(1), group_size, row_rounding);
  py::array y = dtype == DType::kI8
                    ? py::array_t<uint8_t>({static_cast<int64_t>(x.shape(0)), row_bytes})
                    : make_array(dtype, x.shape(0), x.shape(1));
  const cpu::NormArgs args{.x = x.data(),
                           .x_stride = x.shape(1),
                           .kind = parse_norm(kind),
                           .weight = weight ? weight->data() : nullptr,
                           .bias = bias ? bias->data() : nullptr,
                           .eps = eps,
                           .y = y.mutable_data(),
                           .y_dtype = dtype,
                           .num_columns = x.shape(1) / num_groups,
                           .num_groups = num_groups,
                           .num_rows = x.shape(0),
                           .group_size = group_size,
                           .rounding = row_rounding};
  run_chunks(find_kernels(instruction_set).norm, args, num_threads, 1);
  return y;
}

py::array run_embed(const std::string& instruction_set, const py::array_t<int32_t>& token_ids,
                    const py::array& table, float scale, const std::string& format,
                    int32_t num_threads) {
  cpu::EmbedArgs args = table_args(table, format);
  py::array y = make_array(DType::kF32, token_ids.size(), args.num_columns);
  args.ids = token_ids.data();
  args.scale = scale;
  args.y = static_cast<float*>(y.mutable_data());
  args.num_rows = token_ids.size();
  run_chunks(find_kernels(instruction_set).embed, args, num_threads, 1);
  return y;
}

py::array run_gather_rows(const std::string& instruction_set, const py::array_t<float>& x,
                          const py::array_t<int32_t>& rows, int32_t num_threads) {
  py::array y = make_array(DType::kF32, rows.size(), x.shape(1));
  const cpu::GatherRowsArgs args{x.data(), rows.data(), static_cast<float*>(y.mutable_data()),
                                 x.shape(1), rows.size()};
  run_chunks(find_kernels(instruction_set).gather_rows, args, num_threads, 1);
  return y;
}

}  // namespace

void bind_cpu(py::module_& m) {
  py::module_ k = m.def_submodule("kernels", "Kernels one at a time, for tests and benches.");
  k.def("activation", &run_activation, py::arg("instruction_set"), py::arg("x"),
        py::arg("activation") = "", py::kw_only(), py::arg("gated") = true, py::arg("cap") = 0.0f,
        py::arg("out_dtype") = "fp32", py::arg("num_threads") = 1);
  k.def("lora_add", &run_lora_add, py::arg("instruction_set"), py::arg("x"), py::arg("y"),
        py::arg("table"), py::arg("linear_id"), py::arg("runs"), py::kw_only(),
        py::arg("num_threads") = 1, py::arg("stride") = 1);
  k.def("linear", &run_linear, py::arg("instruction_set"), py::arg("x"), py::arg("weight"),
        py::kw_only(), py::arg("bias") = py::none(), py::arg("activation") = "",
        py::arg("residual") = py::none(), py::arg("out_dtype") = "fp32", py::arg("num_threads") = 2,
        py::arg("stride") = 1);
  k.def("quantize_rows", &run_quantize_rows, py::arg("instruction_set"), py::arg("x"),
        py::kw_only(), py::arg("group_size") = 0, py::arg("rounding") = "outliers",
        py::arg("num_threads") = 2);
  k.def("norm", &run_norm, py::arg("instruction_set"), py::arg("x"), py::arg("weight") = py::none(),
        py::arg("bias") = py::none(), py::kw_only(), py::arg("eps"), py::arg("kind") = "rms",
        py::arg("num_groups") = 1, py::arg("out_dtype") = "fp32", py::arg("group_size") = 0,
        py::arg("rounding") = "outliers", py::arg("num_threads") = 2);
  k.def("embed", &run_embed, py::arg("instruction_set"), py::arg("token_ids"), py::arg("table"),
        py::kw_only(), py::arg("scale") = 1.0f, py::arg("format") = "", py::arg("num_threads") = 2);
  k.def("gather_rows", &run_gather_rows, py::arg("instruction_set"), py::arg("x"), py::arg("rows"),
        py::kw_only(), py::arg("num_threads") = 2);
  bind_cpu_bench(k);
}

}  // namespace lmi

// Timing of kernels and of the machine's roofs on a thread pool, for benches:
// _native.kernels.time_*. Every function returns the seconds of each repeat and runs without the
// GIL.
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "bind/arrays.h"
#include "bind/bench_clock.h"
#include "bind/bind.h"
#include "common/aligned_memory.h"
#include "common/thread_pool.h"
#include "cpu/kernels.h"
#include "graph/linear_weight.h"

namespace py = pybind11;

namespace lmi {

namespace {

template <typename Run>
std::vector<double> time_repeats(int32_t num_threads, int32_t repeats, Run&& run) {
  std::vector<double> seconds;
  for (int32_t i = 0; i < repeats; ++i) {
    const double start = read_clock(num_threads);
    run();
    seconds.push_back(read_clock(num_threads) - start);
  }
  return seconds;
}

// Evenly spread ones in each of a matrix of quantised rows.
void set_outliers(uint8_t* rows, int64_t num_rows, const cpu::PackedLinear& shape,
                  int32_t num_outliers) {
  if (shape.rounding == cpu::RowRounding::kLlmInt8) return;
  LMI_CHECK(num_outliers <= cpu::max_outliers(shape.num_inputs), "a row of ", shape.num_inputs,
            " has at most ", cpu::max_outliers(shape.num_inputs), " outliers");
  for (int64_t row = 0; row < num_rows; ++row) {
    uint8_t* x =
        rows + row * cpu::quantized_row_bytes(shape.num_inputs, shape.group_size, shape.rounding);
    std::memcpy(x + cpu::quantized_sums_offset(shape.num_inputs) - 4, &num_outliers, 4);
    uint8_t* entries = x + cpu::outliers_offset(shape.num_inputs, shape.group_size);
    for (int32_t i = 0; i < num_outliers; ++i) {
      const auto entry = static_cast<int32_t>(shape.num_inputs * i / num_outliers << 8 | 1);
      std::memcpy(entries + 4 * i, &entry, sizeof(entry));
    }
  }
}

// All weights one after the other on the same x, as the layers of a model would run them.
std::vector<double> time_linear(const std::string& instruction_set, int64_t num_rows,
                                const std::vector<const LinearWeight*>& weights,
                                int32_t num_threads, int32_t repeats, int32_t num_outliers) {
  const auto kernel = cpu::kernels(cpu::parse_instruction_set(instruction_set)).linear;
  const cpu::PackedLinear& shape = weights.at(0)->packed();
  // A quantised row's scale and sums are set to something just as well.
  const int64_t row_bytes =
      shape.takes_quantized_rows()
          ? cpu::quantized_row_bytes(shape.num_inputs, shape.group_size, shape.rounding)
          : shape.num_inputs * dtype_size(shape.is_quantized() ? DType::kBF16 : shape.dtype);
  const int64_t x_bytes = num_rows * row_bytes;
  const AlignedMemory x(x_bytes), y(num_rows * shape.num_outputs * 4);
  std::fill_n(reinterpret_cast<uint16_t*>(x.data()), x_bytes / 2, uint16_t{0x3c3c});
  if (shape.takes_quantized_rows()) set_outliers(x.data(), num_rows, shape, num_outliers);
  std::vector<cpu::LinearArgs> args;
  for (const LinearWeight* weight : weights) {
    cpu::LinearArgs node;
    node.x = x.data();
    node.x_stride = shape.takes_quantized_rows() ? row_bytes : shape.num_inputs;
    node.weight = weight->packed();
    if (shape.gated) node.activation = cpu::Activation::kSilu;
    node.y = y.data();
    const DType act_dtype = shape.is_quantized() ? DType::kBF16 : shape.dtype;
    node.y_dtype = shape.gated ? act_dtype : DType::kF32;
    node.y_stride = shape.gated ? shape.num_outputs / 2 : shape.num_outputs;
    node.num_rows = num_rows;
    args.push_back(node);
  }
  ThreadPool pool(num_threads);
  std::vector<AlignedMemory> memory;
  std::vector<cpu::Scratch> scratch;
  for (int32_t i = 0; i < num_threads; ++i) {
    memory.emplace_back(cpu::kScratchBytes);
    scratch.push_back({memory.back().data(), cpu::kScratchBytes});
  }
  return time_repeats(num_threads, repeats, [&] {
    pool.run(
        static_cast<int32_t>(args.size()),
        [&](int32_t phase) { return kernel.num_chunks(args[phase], num_threads); },
        [&](int32_t phase, int64_t chunk, int32_t thread_id) {
          kernel.run(args[phase], chunk, num_threads, scratch[thread_id]);
        });
  });
}

// Reading num_bytes once, handed out in pieces of 256 KiB.
std::vector<double> time_read(const std::string& instruction_set, int64_t num_bytes,
                              int32_t num_threads, int32_t repeats) {
  constexpr int64_t kPiece = 256 << 10;
  const auto read = cpu::kernels(cpu::parse_instruction_set(instruction_set)).roofs.read_memory;
  const AlignedMemory memory(num_bytes, true);
  std::fill_n(memory.data(), num_bytes, uint8_t{1});
  ThreadPool pool(num_threads);
  return time_repeats(num_threads, repeats, [&] {
    pool.parallel_for(num_bytes / kPiece, [&](int64_t chunk, int32_t) {
      read(memory.data() + chunk * kPiece, kPiece);
    });
  });
}

// Returns also the operations of one repeat.
std::pair<std::vector<double>, double> time_multiply_add(const std::string& instruction_set,
                                                         const std::string& dtype,
                                                         int64_t num_steps, int32_t num_threads,
                                                         int32_t repeats) {
  const auto& roofs = cpu::kernels(cpu::parse_instruction_set(instruction_set)).roofs;
  const DType type = parse_dtype(dtype);
  const auto run = type == DType::kBF16  ? roofs.multiply_add_bf16
                   : type == DType::kF32 ? roofs.multiply_add_f32
                                         : roofs.multiply_add_int8;
  const int64_t num_chunks = 8 * static_cast<int64_t>(num_threads);
  ThreadPool pool(num_threads);
  const std::vector<double> seconds = time_repeats(num_threads, repeats, [&] {
    pool.parallel_for(num_chunks, [&](int64_t, int32_t) { run(num_steps / num_chunks); });
  });
  return {seconds, run(num_steps / num_chunks) * static_cast<double>(num_chunks)};
}

}  // namespace

void bind_cpu_bench(py::module_& kernels) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  kernels.def("time_linear", &time_linear, py::arg("instruction_set"), py::arg("num_rows"),
              py::arg("weights"), py::arg("num_threads"), py::arg("repeats"),
              py::arg("num_outliers") = 0, no_gil);
  kernels.def("time_read", &time_read, py::arg("instruction_set"), py::arg("num_bytes"),
              py::arg("num_threads"), py::arg("repeats"), no_gil);
  kernels.def("time_multiply_add", &time_multiply_add, py::arg("instruction_set"), py::arg("dtype"),
              py::arg("num_steps"), py::arg("num_threads"), py::arg("repeats"), no_gil);
}

}  // namespace lmi

// The kernels of the level "amx" on tiles in plain C++, over the portable level's other kernels: a
// processor with AMX isn't needed. test_linear_levels.cpp has this table among the levels.
#define LMI_ISA amx_stand_in
#define LMI_LEVEL kAmx
#define LMI_BASE scalar
#define LMI_SIMD 0
#include "amx_stand_in.h"
#include "cpu/isa/table_amx.inc"

// Below, nothing is of the level.
#include <algorithm>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "common/aligned_memory.h"
#include "graph/linear_weight.h"

namespace lmi {
namespace {

constexpr int32_t kThreads = 3;

template <typename Args>
void run_tiles(cpu::Kernel<Args> cpu::Kernels::* op, const Args& args,
               const cpu::Kernels& kernels = cpu::amx_stand_in::table()) {
  static AlignedMemory memory(cpu::kScratchBytes);
  cpu::Scratch scratch{memory.data(), cpu::kScratchBytes};
  const cpu::Kernel<Args>& kernel = kernels.*op;
  const int64_t num_chunks = kernel.num_chunks(args, kThreads);
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) kernel.run(args, chunk, kThreads, scratch);
  EXPECT(!cpu::tiles::registers.is_configured, "tiles are kept behind a chunk");
}

std::vector<bf16_t> random_halves(int64_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<bf16_t> values(static_cast<size_t>(count));
  for (bf16_t& value : values) value = float_to_bf16(normal(generator));
  return values;
}

LinearWeight pack(const std::vector<bf16_t>& values, int64_t num_inputs, cpu::LinearFormat format,
                  int64_t num_experts = 1) {
  const int64_t num_outputs = static_cast<int64_t>(values.size()) / num_inputs / num_experts;
  std::vector<cpu::LinearPart> parts(static_cast<size_t>(num_experts));
  for (size_t i = 0; i < parts.size(); ++i) {
    parts[i] = {.data = values.data() + i * num_outputs * num_inputs, .num_outputs = num_outputs};
  }
  return {parts, num_inputs, false, format, 1, num_experts};
}

// The product of rows in bf16.
std::vector<float> multiply(const std::vector<bf16_t>& x, const LinearWeight& weight,
                            int64_t num_rows) {
  const cpu::PackedLinear& packed = weight.packed();
  std::vector<float> y(static_cast<size_t>(num_rows * packed.num_outputs));
  cpu::LinearArgs args;
  args.x = x.data();
  args.x_stride = packed.num_inputs;
  args.weight = packed;
  args.y = y.data();
  args.y_stride = packed.num_outputs;
  args.num_rows = num_rows;
  run_tiles(&cpu::Kernels::linear, args);
  return y;
}

// The instruction's order of sums, from rows as they are.
float add_products(const bf16_t* x, const bf16_t* weights, int64_t num_inputs) {
  float sum = 0.0f;
  for (int64_t first = 0; first < num_inputs; first += 32) {
    float even = 0.0f, odd = 0.0f;
    for (int64_t i = first; i < std::min(first + 32, num_inputs); ++i) {
      float& half = i % 2 == 0 ? even : odd;
      half = __builtin_fmaf(bf16_to_float(x[i]), bf16_to_float(weights[i]), half);
    }
    sum = sum + (even + odd);
  }
  return sum;
}

struct Shape {
  int64_t num_rows, num_outputs, num_inputs;
};

constexpr Shape kShapes[] = {{1, 5, 1},      {1, 129, 1537}, {2, 16, 31},   {15, 75, 33},
                             {16, 64, 768},  {17, 33, 767},  {31, 65, 96},  {33, 48, 801},
                             {64, 128, 100}, {70, 83, 77},   {97, 200, 65}, {1100, 17, 40}};

TEST(amx_adds_up_bf16_in_one_order_whatever_the_shape) {
  for (const Shape& shape : kShapes) {
    const auto x = random_halves(shape.num_rows * shape.num_inputs, 1);
    const auto values = random_halves(shape.num_outputs * shape.num_inputs, 2);
    const LinearWeight weight = pack(values, shape.num_inputs, {.dtype = DType::kBF16});
    const auto y = multiply(x, weight, shape.num_rows);
    for (int64_t row = 0; row < shape.num_rows; ++row) {
      for (int64_t output = 0; output < shape.num_outputs; ++output) {
        EXPECT_EQ(y[row * shape.num_outputs + output],
                  add_products(x.data() + row * shape.num_inputs,
                               values.data() + output * shape.num_inputs, shape.num_inputs));
      }
    }
  }
}

TEST(amx_keeps_rows_that_are_not_numbers_to_themselves) {
  constexpr int64_t kRows = 40, kInputs = 50, kOutputs = 20;
  auto x = random_halves(kRows * kInputs, 3);
  std::fill_n(x.begin(), kInputs, float_to_bf16(std::numeric_limits<float>::quiet_NaN()));
  const LinearWeight weight =
      pack(random_halves(kOutputs * kInputs, 4), kInputs, {.dtype = DType::kBF16});
  const auto y = multiply(x, weight, kRows);
  const auto is_nan = [](float value) { return std::isnan(value); };
  EXPECT_EQ(std::count_if(y.begin(), y.end(), is_nan), kOutputs);
  EXPECT(std::all_of(y.begin(), y.begin() + kOutputs, is_nan));
}

// The rows that int8 weights are multiplied with.
std::vector<uint8_t> quantize(const std::vector<bf16_t>& x, const cpu::PackedLinear& weight,
                              int64_t num_rows, int64_t row_bytes) {
  std::vector<uint8_t> rows(static_cast<size_t>(num_rows * row_bytes));
  run_tiles(&cpu::Kernels::quantize_rows, cpu::QuantizeRowsArgs{.x = x.data(),
                                                                .x_stride = weight.num_inputs,
                                                                .num_columns = weight.num_inputs,
                                                                .rounding = weight.rounding,
                                                                .y = rows.data(),
                                                                .num_rows = num_rows});
  return rows;
}

TEST(amx_has_the_bits_of_every_level_in_int8) {
  for (const auto rounding :
       {cpu::RowRounding::kInt8, cpu::RowRounding::kOutliers, cpu::RowRounding::kLlmInt8}) {
    for (const Shape& shape : kShapes) {
      auto x = random_halves(shape.num_rows * shape.num_inputs, 5);
      for (size_t i = 0; i < x.size(); i += 37) x[i] = float_to_bf16(bf16_to_float(x[i]) * 60.0f);
      const auto values = random_halves(shape.num_outputs * shape.num_inputs, 6);
      const LinearWeight weight =
          pack(values, shape.num_inputs, {.dtype = DType::kI8, .rounding = rounding});
      cpu::LinearArgs args;
      args.x_stride = cpu::quantized_row_bytes(shape.num_inputs, 0, rounding);
      const auto rows = quantize(x, weight.packed(), shape.num_rows, args.x_stride);
      args.x = rows.data();
      args.weight = weight.packed();
      args.y_stride = shape.num_outputs;
      args.num_rows = shape.num_rows;
      std::vector<float> y(static_cast<size_t>(shape.num_rows * shape.num_outputs)), wanted = y;
      args.y = y.data();
      run_tiles(&cpu::Kernels::linear, args);
      args.y = wanted.data();
      run_tiles(&cpu::Kernels::linear, args, cpu::kernels(cpu::InstructionSet::kScalar));
      EXPECT(y == wanted, "of ", shape.num_rows, " rows");
    }
  }
}

TEST(amx_multiplies_rows_of_experts_as_rows_of_one_matrix) {
  constexpr int64_t kInputs = 70, kOutputs = 40, kExperts = 4, kRows = 60;
  const auto x = random_halves(kRows * kInputs, 7);
  const auto values = random_halves(kExperts * kOutputs * kInputs, 8);
  const LinearWeight weight = pack(values, kInputs, {.dtype = DType::kBF16}, kExperts);
  int32_t first_rows[kExperts + 1] = {0, 1, 1, 18, kRows};
  int32_t active[] = {0, 2, 3}, num_active = 3;
  std::vector<float> y(kRows * kOutputs);
  cpu::GroupedLinearArgs args;
  args.x = x.data();
  args.x_stride = kInputs;
  args.weight = weight.packed();
  args.y = y.data();
  args.y_stride = kOutputs;
  args.num_rows = kRows;
  args.experts.first_rows = first_rows;
  args.experts.active = active;
  args.experts.num_active = &num_active;
  run_tiles(&cpu::Kernels::grouped_linear, args);
  for (int64_t expert = 0; expert < kExperts; ++expert) {
    for (int64_t row = first_rows[expert]; row < first_rows[expert + 1]; ++row) {
      for (int64_t output = 0; output < kOutputs; ++output) {
        EXPECT_EQ(y[row * kOutputs + output],
                  add_products(x.data() + row * kInputs,
                               values.data() + (expert * kOutputs + output) * kInputs, kInputs));
      }
    }
  }
}

}  // namespace
}  // namespace lmi

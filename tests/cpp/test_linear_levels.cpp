// Linears on every instruction set that runs here: near those of the portable one, and with bits of
// a row that depend on no other row. tests/kernels asks for more, where there is a Python.
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "common/aligned_memory.h"
#include "cpu/kernels.h"
#include "cpu/unbuilt_levels.h"
#include "graph/linear_weight.h"

namespace lmi {

namespace cpu::amx_stand_in {
const Kernels& table();  // of test_amx.cpp
}

namespace {

constexpr int64_t kInputs = 768, kOutputs = 75, kRows = 37;

struct Table {
  std::string name;
  const cpu::Kernels& kernels;
};

std::vector<Table> tables() {
  std::vector<Table> all = {{"amx's stand-in", cpu::amx_stand_in::table()}};
  for (const auto level : cpu::available_instruction_sets()) {
    all.push_back({cpu::instruction_set_name(level), cpu::kernels(level)});
  }
  return all;
}

struct Case {
  std::string name;
  DType dtype;
  int32_t group_size = 0;
  int scale_at = -1;  // of GGUF's blocks: where in its bytes a block has its fp16 scale
};

const std::vector<Case>& linear_cases() {
  static const std::vector<Case> all = {{"fp32", DType::kF32},
                                        {"bf16", DType::kBF16},
                                        {"int8", DType::kI8},
                                        {"int4", DType::kI4, 64},
                                        {"fp16", DType::kF16},
                                        {"q4_0", DType::kQ4_0, cpu::kBlockSumInputs, 0},
                                        {"q8_0", DType::kQ8_0, cpu::kBlockSumInputs, 0},
                                        {"q6_k", DType::kQ6_K, cpu::kBlockSumInputs, 208},
                                        {"iq4_nl", DType::kIQ4_NL, cpu::kBlockSumInputs, 0}};
  return all;
}

std::vector<float> normal_floats(int64_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(generator);
  return values;
}

// Random blocks whose scales are 1/64.
std::vector<uint8_t> random_blocks(const Case& test) {
  const cpu::BlockFormat format = cpu::block_format(test.dtype);
  std::vector<uint8_t> bytes(
      static_cast<size_t>(kOutputs * kInputs / format.num_inputs * format.num_bytes));
  std::mt19937 generator(5);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(generator());
  const uint16_t scale = 0x2400;
  for (size_t at = 0; at < bytes.size(); at += static_cast<size_t>(format.num_bytes)) {
    std::memcpy(bytes.data() + at + test.scale_at, &scale, sizeof(scale));
  }
  return bytes;
}

LinearWeight make_weight(const Case& test) {
  const auto floats = normal_floats(kOutputs * kInputs, 1);
  std::vector<uint8_t> blocks;
  cpu::LinearPart part{.data = floats.data(), .dtype = DType::kF32, .num_outputs = kOutputs};
  std::vector<uint16_t> halves;
  if (test.dtype == DType::kF16) {
    std::mt19937 generator(6);
    halves.resize(floats.size());
    for (uint16_t& half : halves) half = generator() & 0xbbff;  // below 1 in magnitude
    part.data = halves.data();
    part.dtype = test.dtype;
  } else if (test.scale_at >= 0) {
    blocks = random_blocks(test);
    part.data = blocks.data();
    part.dtype = test.dtype;
  }
  return {{part}, kInputs, false, {.dtype = test.dtype, .group_size = test.group_size}, 1};
}

template <typename Args>
void run_kernel(const cpu::Kernel<Args>& kernel, const Args& args, int32_t num_threads = 1) {
  static AlignedMemory memory(cpu::kScratchBytes);
  cpu::Scratch scratch{memory.data(), cpu::kScratchBytes};
  const int64_t num_chunks = kernel.num_chunks(args, num_threads);
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    kernel.run(args, chunk, num_threads, scratch);
  }
}

// Rows [first, first + count) of the inputs, with an outlier each, times the weight.
std::vector<float> multiply(const cpu::Kernels& kernels, const LinearWeight& owner, int64_t first,
                            int64_t count, int32_t num_threads = 1) {
  const cpu::PackedLinear& weight = owner.packed();
  auto floats = normal_floats(kRows * kInputs, 2);
  for (int64_t row = 0; row < kRows; ++row) floats[row * kInputs + 7 * row] *= 60.0f;
  std::vector<bf16_t> halves(floats.size());
  std::transform(floats.begin(), floats.end(), halves.begin(), float_to_bf16);
  const bool is_bf16 = weight.dtype == DType::kBF16;
  std::vector<uint8_t> quantized;
  std::vector<float> y(static_cast<size_t>(count * kOutputs));
  cpu::LinearArgs args;
  args.x = is_bf16 ? static_cast<const void*>(halves.data() + first * kInputs)
                   : floats.data() + first * kInputs;
  args.x_dtype = is_bf16 ? DType::kBF16 : DType::kF32;
  args.x_stride = kInputs;
  if (weight.takes_quantized_rows()) {
    const int64_t row_bytes = cpu::quantized_row_bytes(kInputs, weight.group_size, weight.rounding);
    quantized.resize(static_cast<size_t>(count * row_bytes));
    run_kernel(kernels.quantize_rows, cpu::QuantizeRowsArgs{.x = args.x,
                                                            .x_dtype = DType::kF32,
                                                            .x_stride = kInputs,
                                                            .num_columns = kInputs,
                                                            .group_size = weight.group_size,
                                                            .rounding = weight.rounding,
                                                            .y = quantized.data(),
                                                            .num_rows = count});
    args.x = quantized.data();
    args.x_stride = row_bytes;
  }
  args.weight = weight;
  args.num_rows = count;
  args.y = y.data();
  args.y_stride = kOutputs;
  run_kernel(kernels.linear, args, num_threads);
  return y;
}

void expect_near(const std::vector<float>& got, const std::vector<float>& wanted,
                 const std::string& name) {
  double most = 0.0, error = 0.0;
  for (size_t i = 0; i < got.size(); ++i) {
    most = std::max(most, std::fabs(static_cast<double>(wanted[i])));
    error = std::max(error, std::fabs(static_cast<double>(got[i]) - wanted[i]));
  }
  LMI_CHECK(error <= 2e-6 * most, name, " is off by ", error, " of ", most);
}

#if defined(__x86_64__)
// Whatever the build has: this one may have the portable level alone.
TEST(levels_that_run_here_are_built_or_named_as_left_out) {
  const auto has_avx2 = [](const std::vector<cpu::InstructionSet>& levels) {
    return std::count(levels.begin(), levels.end(), cpu::InstructionSet::kAvx2);
  };
  const bool runs_here = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  EXPECT_EQ(has_avx2(cpu::available_instruction_sets()) + has_avx2(cpu::unbuilt_instruction_sets()),
            runs_here ? 1 : 0);
}
#endif

TEST(linears_of_all_levels_are_near_each_other) {
  for (const Case& test : linear_cases()) {
    const LinearWeight weight = make_weight(test);
    const auto wanted = multiply(cpu::kernels(cpu::InstructionSet::kScalar), weight, 0, kRows);
    for (const Table& table : tables()) {
      expect_near(multiply(table.kernels, weight, 0, kRows), wanted,
                  test.name + " on " + table.name);
    }
  }
}

TEST(linears_give_a_row_the_same_bits_among_others) {
  for (const Case& test : linear_cases()) {
    const LinearWeight weight = make_weight(test);
    for (const Table& table : tables()) {
      const auto all = multiply(table.kernels, weight, 0, kRows);
      for (const int64_t count : {1, 2, 3, 4, 5, 6, 7, 16, 17, 33}) {
        const auto some = multiply(table.kernels, weight, kRows - count, count);
        const bool is_same = std::memcmp(some.data(), all.data() + (kRows - count) * kOutputs,
                                         some.size() * sizeof(float)) == 0;
        LMI_CHECK(is_same, test.name, " on ", table.name, " with ", count,
                  " rows has other bits than with ", kRows);
      }
    }
  }
}

// While one thread packs what lies in a file, others multiply with it.
TEST(linears_give_the_same_bits_while_their_weight_is_packed) {
  const auto floats = normal_floats(kOutputs * kInputs, 1);
  std::vector<bf16_t> halves(floats.size());
  std::transform(floats.begin(), floats.end(), halves.begin(), float_to_bf16);
  const int64_t num_bytes = kOutputs * kInputs * static_cast<int64_t>(sizeof(bf16_t));
  char path[] = "/tmp/lmi-test-XXXXXX";
  const int descriptor = mkstemp(path);
  EXPECT(descriptor >= 0 && write(descriptor, halves.data(), num_bytes) == num_bytes);
  close(descriptor);
  const auto file = std::make_shared<const MappedFile>(path);
  unlink(path);
  for (const auto level : cpu::available_instruction_sets()) {
    if (level == cpu::InstructionSet::kAmx) continue;  // has sums of its own for what isn't packed
    const cpu::Kernels& kernels = cpu::kernels(level);
    const cpu::LinearPart part{file->data(0, num_bytes), DType::kBF16, kOutputs};
    LinearWeight weight({part}, kInputs, false, {}, 2, 1, {file});
    const auto wanted = multiply(kernels, weight, 0, kRows);
    std::thread packing([&weight] { weight.finish_packing(1); });
    do {
      EXPECT(multiply(kernels, weight, 0, kRows) == wanted);
    } while (!weight.is_packed());
    EXPECT(multiply(kernels, weight, 0, kRows) == wanted);
    packing.join();
  }
}

TEST(linears_give_the_same_bits_in_chunks_for_any_number_of_threads) {
  for (const Case& test : linear_cases()) {
    const LinearWeight weight = make_weight(test);
    for (const Table& table : tables()) {
      for (const int64_t count : {1, 3, 8, 37}) {
        const auto wanted = multiply(table.kernels, weight, 0, count);
        for (const int32_t num_threads : {2, 3, 8, 16, 64}) {
          const auto got = multiply(table.kernels, weight, 0, count, num_threads);
          LMI_CHECK(std::memcmp(got.data(), wanted.data(), got.size() * sizeof(float)) == 0,
                    test.name, " on ", table.name, " has other bits for ", num_threads, " threads");
        }
      }
    }
  }
}

TEST(linears_have_narrower_chunks_where_threads_are_many) {
  cpu::LinearArgs args;
  args.weight.num_outputs = 768;
  args.weight.num_inputs = 64;
  const auto num_chunks = [&args](int64_t num_rows, int32_t num_threads) {
    args.num_rows = num_rows;
    return cpu::kernels(cpu::InstructionSet::kScalar).linear.num_chunks(args, num_threads);
  };
  EXPECT_EQ(num_chunks(8, 2), 12);   // of four panels
  EXPECT_EQ(num_chunks(8, 16), 12);  // tiles of one would take a third longer, and gain a quarter
  EXPECT_EQ(num_chunks(8, 32), 24);
  EXPECT_EQ(num_chunks(8, 64), 48);
  EXPECT_EQ(num_chunks(960, 16), 120);  // blocks of rows give enough
  args.weight.gated = true;
  EXPECT_EQ(num_chunks(8, 64), 24);  // gate and up stay together
}

}  // namespace
}  // namespace lmi

#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "common/dtype.h"
#include "cpu/pack_quantized.h"
#include "cuda/weight_panel.h"

namespace lmi::cuda {
namespace {

uint16_t half_at(const uint8_t* source) {
  uint16_t half;
  std::memcpy(&half, source, sizeof(half));
  return half;
}

// What the kernel makes of a panel's bytes is what the CPU's unpacking makes of them.
TEST(int4_panels_are_read_as_the_cpu_packs_them) {
  constexpr int kInputs = 160;
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (const int group_size : {32, 64, 128}) {
    std::vector<float> weights(kPanelOutputs * kInputs);
    for (float& weight : weights) weight = normal(random);
    const cpu::LinearFormat format{DType::kI4, group_size};
    std::vector<uint8_t> panel(static_cast<size_t>(cpu::quantized_panel_bytes(format, kInputs)));
    EXPECT_EQ(static_cast<int64_t>(panel.size()), panel_bytes(kInputs, group_size));
    cpu::PanelRows rows;
    for (int lane = 0; lane < kPanelOutputs; ++lane) {
      rows.at[lane].data = reinterpret_cast<const uint8_t*>(weights.data() + lane * kInputs);
      rows.at[lane].dtype = DType::kF32;
    }
    cpu::PanelQuantizer(format, kInputs).pack(rows, panel.data());
    for (int lane = 0; lane < kPanelOutputs; ++lane) {
      for (int input = 0; input < kInputs; input += 2) {
        const uint8_t* group = panel.data() + input / group_size * panel_group_bytes(group_size);
        const float scale = f16_to_float(half_at(group + lane * 2));
        const float zero = f16_to_float(half_at(group + kPanelZerosOffset + lane * 2));
        uint32_t word;
        std::memcpy(&word,
                    group + kPanelHeaderBytes + input % group_size / 8 * kPanelStepBytes + lane * 4,
                    sizeof(word));
        const uint32_t codes = half_codes(word, input % 8 / 4);
        const uint32_t selector = code_pair_selector(input % 4 / 2);
        const auto code = [&](int at) {
          return static_cast<float>(codes >> (8 * (selector >> (8 * at) & 0xf)) & 0xff);
        };
        EXPECT_EQ(selector & 0xf0f0, 0x4040u);
        EXPECT_EQ(scale * (code(0) - zero),
                  cpu::unpack_quantized(format, panel.data(), lane, input));
        EXPECT_EQ(scale * (code(1) - zero),
                  cpu::unpack_quantized(format, panel.data(), lane, input + 1));
      }
    }
  }
}

TEST(int4_panels_of_gated_weights_alternate) {
  EXPECT_EQ(num_panels(70, false), 5);
  EXPECT_EQ(num_panels(70, true), 6);
  EXPECT_EQ(panel_output(0, 3, 70, true), 3);
  EXPECT_EQ(panel_output(1, 3, 70, true), 38);
  EXPECT_EQ(panel_output(4, 2, 70, true), 34);
  EXPECT_EQ(panel_output(4, 3, 70, true), -1);
  EXPECT_EQ(panel_output(5, 2, 70, true), 69);
  EXPECT_EQ(panel_output(4, 5, 70, false), 69);
  EXPECT_EQ(panel_output(4, 6, 70, false), -1);
}

TEST(byte_panels_have_a_header_or_one_for_every_group) {
  EXPECT_EQ(byte_panel_bytes(130, false), 64 + 33 * 64);
  EXPECT_EQ(byte_panel_bytes(130, true), 2 * (64 + 32 * 64));
  EXPECT_EQ(byte_step_offset(0, true), 64);
  EXPECT_EQ(byte_step_offset(31, true), 64 + 31 * 64);
  EXPECT_EQ(byte_step_offset(32, true), 64 + 32 * 64 + 64);
  EXPECT_EQ(byte_step_offset(32, false), 64 + 32 * 64);
}

}  // namespace
}  // namespace lmi::cuda

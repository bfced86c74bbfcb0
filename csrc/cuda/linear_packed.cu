// Matrix products over int4 weights, activations in 16 bits (W4A16): few rows are bound by reading
// the weight once, more by the tensor cores and the unpacking before them. Many rows unpack the
// weight for good: linear_unpacked.cu.
//
// A block takes two panels, 32 outputs, and up to 64 rows; its warps take every eighth stretch of
// 128 inputs, each with copies of its own in flight. Outputs are the left side of the tensor cores'
// products: a thread reads eight inputs of four outputs, 16 bytes of a panel, and with inputs and
// outputs both in an order of the kernel's own they are its part of four left operands, as 16 bytes
// of a row are its part of two right ones. Codes less their zero point are small integers, exact in
// either type; scales come in once per group, in fp32. What bounds the kernel beside memory is the
// number of its instructions, of which unpacking takes most.
#include "cuda/fragment.h"
#include "cuda/launch.cuh"
#include "cuda/linear_unpacked.h"
#include "cuda/panel_sums.cuh"

namespace lmi::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kPanels = 2;
constexpr int kOutputs = kSumOutputs;
constexpr int kStepInputs = 32;  // of which each lane of a group of four has eight
constexpr int kSteps = 4;        // of a stretch
constexpr int kStretchInputs = kSteps * kStepInputs;
constexpr int kMaxRowTiles = 8;
constexpr int kMinGroup = 32;

// A stretch of a panel in shared memory: lines of 64 bytes, which are headers of groups or eight
// inputs. Four lines, of four lanes each, are read at once; lines two apart would meet in the same
// banks.
constexpr int kLineBytes = 64;
constexpr int kChunkBytes = 16;
constexpr int kStages = 3;
constexpr int kStretchBytes =
    kStretchInputs / kMinGroup * static_cast<int>(panel_group_bytes(kMinGroup));
constexpr int kStageBytes = kPanels * kStretchBytes;
constexpr int kWarpBytes = kStages * kStageBytes;

LMI_HOST_DEVICE constexpr int staged_chunk(int line, int chunk) {
  return line * kLineBytes + (chunk ^ (line & 2)) * kChunkBytes;
}

// A number to whose bits a code may be added, 128 or 1024, twice: its upper bytes stay as they are.
template <typename T>
constexpr uint32_t kCodeBase = 0;
template <>
constexpr uint32_t kCodeBase<bf16> = 0x43004300;
template <>
constexpr uint32_t kCodeBase<f16> = 0x64006400;

// kRowTiles: of 8 rows.
template <typename T, int kRowTiles>
class PackedWarp {
 public:
  __device__ explicit PackedWarp(const LmiLinearPacked& args)
      : args_(args),
        group_lines_(args.group_size / 8 + 1),
        stretch_bytes_(static_cast<int>(panel_bytes(kStretchInputs, args.group_size))),
        panel_bytes_(static_cast<int>(panel_bytes(args.num_inputs, args.group_size))),
        stages_(shared_memory() + warp_id() * kWarpBytes) {
    // Lanes 0 .. 15 copy the first panel. A panel past the last copies the last one's bytes; its
    // outputs are not stored.
    const int panel = static_cast<int>(blockIdx.x) * kPanels + lane_id() / kCopyLanes;
    const int64_t index = lower_of(panel, num_panels(args.num_outputs, args.is_gated != 0) - 1);
    source_ = static_cast<const uint8_t*>(args.panels) + index * panel_bytes_ + copied_byte();
    // A row past the last is the last one again.
    const int first_row = static_cast<int>(blockIdx.y) * 8 * kRowTiles + fragment_group(lane_id());
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      const int64_t row = lower_of(first_row + 8 * n, args.num_rows - 1);
      rows_[n] = static_cast<const T*>(args.x) + row * args.num_inputs +
                 stretch_of(0) * kStretchInputs + lane_id() % 4 * 8;
    }
  }

  // What the first copies will take; no kernel writes weights.
  __device__ void prefetch_weights() const {
    const uint8_t* panel = source_ - copied_byte();
    const int at = lane_id() % kCopyLanes * kPrefetchBytes;
#pragma unroll
    for (int turn = 0; turn < kStages - 1; ++turn) {
      const int begin = stretch_of(turn) * stretch_bytes_;
      if (at < lower_of(stretch_bytes_, panel_bytes_ - begin)) prefetch(panel + begin + at);
    }
  }

  __device__ void multiply() {
    const int num_stretches = ceil_div(args_.num_inputs, kStretchInputs);
    for (int turn = 0; turn < kStages - 1; ++turn) start_copies(turn);
    for (int turn = 0; stretch_of(turn) < num_stretches; ++turn) {
      start_copies(turn + kStages - 1);
      wait_for_copies<kStages - 1>();
      warp_barrier();
      const int first_input = stretch_of(turn) * kStretchInputs;
      if (first_input + kStretchInputs <= args_.num_inputs) {
        multiply_stretch<true>(stage(turn), first_input);
      } else {
        multiply_stretch<false>(stage(turn), first_input);
      }
#pragma unroll
      for (const T*& row : rows_) row += kWarps * kStretchInputs;
      warp_barrier();  // before its stage is written again
    }
  }

  // target: [8 rows kRowTiles][kSumStride]. A thread's four outputs are neighbours.
  __device__ void store(float* target) const {
    const int lane = lane_id();
    const int output =
        panel_of(fragment_group(lane)) * kPanelOutputs + panel_lane_of(fragment_group(lane), 0);
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float own[kQuad];
#pragma unroll
        for (int j = 0; j < kQuad; ++j) own[j] = sums_[n][j / 2][j % 2 * 2 + i];
        store_floats(target + sum_offset(n * 8 + fragment_pair(lane) + i, output), own);
      }
    }
  }

 private:
  static constexpr int kCopyLanes = kWarpSize / kPanels;
  static_assert(kCopyLanes * kPrefetchBytes >= kStretchBytes);
  static constexpr int kQuad = 4;  // outputs of a thread, the rows of two products
  using Products = float[kRowTiles][kQuad / 2][4];

  __device__ static int stretch_of(int turn) { return turn * kWarps + warp_id(); }
  __device__ static int copied_byte() { return lane_id() % kCopyLanes * kChunkBytes; }
  __device__ uint8_t* stage(int turn) const { return stages_ + turn % kStages * kStageBytes; }

  __device__ void start_copies(int turn) const {
    const int begin = stretch_of(turn) * stretch_bytes_;
    const int num_bytes = lower_of(stretch_bytes_, panel_bytes_ - begin);
    if (num_bytes > 0) {
      const int lane = lane_id() % kCopyLanes;
      uint8_t* target =
          stage(turn) + lane_id() / kCopyLanes * kStretchBytes + staged_chunk(lane / 4, lane % 4);
#pragma unroll
      for (int at = 0; at < kStretchBytes; at += kCopyLanes * kChunkBytes) {
        copy_async(target + at, source_ + begin + at, at + copied_byte() < num_bytes);
      }
    }
    end_copy_group();
  }

  // kIsWhole: none of its inputs is past the last.
  template <bool kIsWhole>
  __device__ void multiply_stretch(const uint8_t* stage, int first_input) {
    const int quad = fragment_group(lane_id()) % kQuad;
    const uint8_t* panel = stage + panel_of(fragment_group(lane_id())) * kStretchBytes;
    Products products = {};
    uint32_t zeros[kQuad] = {};
    int header = 0;
    int line = 1;  // of the step's first inputs
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int input = first_input + step * kStepInputs;
      if (!kIsWhole && input >= args_.num_inputs) break;
      if (line == header + 1) load_zeros(panel, header, quad, zeros);
      const auto words =
          *reinterpret_cast<const Word4*>(panel + staged_chunk(line + lane_id() % 4, quad));
      multiply_step<kIsWhole>(words, zeros, step * kStepInputs, input, products);
      line += kStepInputs / 8;
      if (line == header + group_lines_ || (!kIsWhole && input + kStepInputs >= args_.num_inputs)) {
        add_scaled(panel, header, quad, products);
        header = line;
        ++line;
      }
    }
  }

  template <bool kIsWhole>
  __device__ void multiply_step(const Word4& words, const uint32_t (&zeros)[kQuad], int at,
                                int input, Products& products) const {
    Word4 rows[kRowTiles];
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) rows[n] = load_x<kIsWhole>(rows_[n] + at, input);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      uint32_t weights[kQuad][2];
#pragma unroll
      for (int j = 0; j < kQuad; ++j) {
        const uint32_t codes = half_codes(words.at[j], part);
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const uint32_t raised = permute_bytes(codes, kCodeBase<T> >> 8, code_pair_selector(pair));
          weights[j][pair] = subtract_pairs<T>(raised, zeros[j]);
        }
      }
#pragma unroll
      for (int j = 0; j < kQuad; j += 2) {
        const uint32_t own[4] = {weights[j][0], weights[j + 1][0], weights[j][1],
                                 weights[j + 1][1]};
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n) {
          multiply_add<T>(products[n][j / 2], own, rows[n].at[2 * part], rows[n].at[2 * part + 1]);
        }
      }
    }
  }

  template <bool kIsWhole>
  __device__ Word4 load_x(const T* source, int input) const {
    if (!kIsWhole && input + lane_id() % 4 * 8 >= args_.num_inputs) return {};
    return *reinterpret_cast<const Word4*>(source);
  }

  // Four halves of a group's header.
  __device__ static void load_header(const uint8_t* panel, int header, int chunk, int quad,
                                     float (&values)[kQuad]) {
    const auto halves = *reinterpret_cast<const Vector<f16, kQuad>*>(
        panel + staged_chunk(header, chunk + quad / 2) + quad % 2 * (kChunkBytes / 2));
#pragma unroll
    for (int j = 0; j < kQuad; ++j) values[j] = to_float(halves.at[j]);
  }

  // Zero points, each twice, over the number that codes are added to.
  __device__ static void load_zeros(const uint8_t* panel, int header, int quad,
                                    uint32_t (&zeros)[kQuad]) {
    const float base = to_float(T{static_cast<uint16_t>(kCodeBase<T>)});
    float values[kQuad];
    load_header(panel, header, kPanelZerosOffset / kChunkBytes, quad, values);
#pragma unroll
    for (int j = 0; j < kQuad; ++j) zeros[j] = pack_pair<T>(base + values[j], base + values[j]);
  }

  // Products are 0 afterwards.
  __device__ void add_scaled(const uint8_t* panel, int header, int quad, Products& products) {
    float scales[kQuad];
    load_header(panel, header, 0, quad, scales);
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int j = 0; j < kQuad; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = j % 2 * 2 + i;
          sums_[n][j / 2][at] += scales[j] * products[n][j / 2][at];
          products[n][j / 2][at] = 0.0f;
        }
      }
    }
  }

  const LmiLinearPacked& args_;
  int group_lines_;  // with its header
  int stretch_bytes_;
  int panel_bytes_;
  uint8_t* stages_;
  const uint8_t* source_;
  const T* rows_[kRowTiles];
  float sums_[kRowTiles][kQuad / 2][4] = {};
};

// Copies of the weight, then sums.
template <int kRowTiles>
constexpr int kSharedBytes = greater_of(
    kWarps * kWarpBytes, kWarps * 8 * kRowTiles * kSumStride * static_cast<int>(sizeof(float)));

template <typename T, int kRowTiles>
__global__ void __launch_bounds__(kThreads) linear_packed_kernel(const LmiLinearPacked args) {
  constexpr int kRows = 8 * kRowTiles;
  float* partials = reinterpret_cast<float*>(shared_memory());
  PackedWarp<T, kRowTiles> warp(args);
  warp.prefetch_weights();
  wait_for_earlier_kernels();
  warp.multiply();
  block_barrier();  // every warp is done with its copies
  warp.store(partials + warp_id() * kRows * kSumStride);
  block_barrier();
  for (int index = static_cast<int>(threadIdx.x); index < kRows * kOutputs; index += kThreads) {
    const int row = static_cast<int>(blockIdx.y) * kRows + index / kOutputs;
    const int lane = index % kOutputs;
    const int panel = static_cast<int>(blockIdx.x) * kPanels + lane / kPanelOutputs;
    const int output =
        panel_output(panel, lane % kPanelOutputs, args.num_outputs, args.is_gated != 0);
    if (row >= args.num_rows || output < 0) continue;
    const float bias = args.bias == nullptr ? 0.0f : args.bias[output];
    args.y[static_cast<int64_t>(row) * args.num_outputs + output] =
        sum_of_warps<kWarps>(partials, kRows, sum_offset(index / kOutputs, lane), bias);
  }
}

}  // namespace
}  // namespace lmi::cuda

using namespace lmi::cuda;

int32_t lmi_cuda_linear_packed(const LmiLinearPacked* args, void* stream) {
  const int32_t group = args->group_size;
  if (group != 32 && group != 64 && group != 128) {
    return fail("linear_packed: groups of " + std::to_string(group) +
                "; 32, 64 and 128 can be had");
  }
  if (args->num_inputs < 8 || args->num_inputs % 8 != 0) {
    return fail("linear_packed: " + std::to_string(args->num_inputs) +
                " inputs; multiples of 8 can be had");
  }
  if (!is_aligned(args->x) || !is_aligned(args->panels)) {
    return fail("linear_packed: x and the panels must start on 16 bytes");
  }
  if (args->dtype != LMI_BF16 && args->dtype != LMI_F16) {
    return fail("linear_packed: element type " + std::to_string(args->dtype) +
                "; 1 (bf16) and 2 (fp16) can be had");
  }
  if (is_unpacked(*args)) return launch_linear_unpacked(*args, stream);
  const auto run = [&](auto element, auto row_tiles) {
    constexpr int kRowTiles = decltype(row_tiles)::value;
    const int panels = num_panels(args->num_outputs, args->is_gated != 0);
    const Grid grid = {ceil_div(panels, kPanels), ceil_div(args->num_rows, 8 * kRowTiles)};
    return launch("linear_packed", linear_packed_kernel<decltype(element), kRowTiles>, grid,
                  kThreads, kSharedBytes<kRowTiles>, stream, *args);
  };
  const auto with_rows = [&](auto element) {
    if (args->num_rows <= 8) return run(element, std::integral_constant<int, 1>{});
    if (args->num_rows <= 16) return run(element, std::integral_constant<int, 2>{});
    if (args->num_rows <= 32) return run(element, std::integral_constant<int, 4>{});
    return run(element, std::integral_constant<int, kMaxRowTiles>{});
  };
  return args->dtype == LMI_BF16 ? with_rows(bf16{}) : with_rows(f16{});
}

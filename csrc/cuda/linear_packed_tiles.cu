// The products of linear_packed.cu for more rows, bound by reading weights and rows from the L2
// cache and by the tensor cores.
//
// A block takes 32 rows of 256 outputs, or 64 rows of 128, and its warps 32 rows of 32 outputs
// each: all of them share the stretches of inputs, rows and panels, that are copied in the
// background. A block goes through the classes of stretches one after another; where outputs are
// too few for that many blocks, a block takes one class, and another kernel adds up what they put
// down. Both add in the same order, that of linear_packed.cu.
#include "cuda/expert_tile.cuh"
#include "cuda/packed_products.cuh"

namespace lmi::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kRowTiles = 4;
constexpr int kWarpRows = 8 * kRowTiles;
constexpr int kMaxRowWarps = 2;
constexpr int kStages = 3;
constexpr int kRowBytes = kStretchInputs * 2;
constexpr int kRowChunks = kRowBytes / kChunkBytes;
constexpr int kQuad = 4;
constexpr int kFewBlocks = 96;  // leave parts of a large device idle

// Rows next to each other would meet in the same banks.
LMI_HOST_DEVICE constexpr int staged_row_chunk(int row, int chunk) {
  return row * kRowBytes + (chunk ^ (row % 2 * 4)) * kChunkBytes;
}

// kRowWarps: how many warps share a panel, each with rows of its own.
template <int kRowWarps>
struct Tile {
  static constexpr int kRows = kRowWarps * kWarpRows;
  static constexpr int kPanels = kWarps / kRowWarps * kWarpPanels;
  static constexpr int kWeightBytes = kPanels * kStretchBytes;
  static constexpr int kStageBytes = kWeightBytes + kRows * kRowBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;
};

// The stretches of classes first .. end - 1, class by class.
class Turns {
 public:
  __device__ Turns(int first_class, int end_class, int num_stretches)
      : class_(first_class), end_(end_class), num_(num_stretches), stretch_(first_class) {}

  __device__ int stretch() const { return stretch_; }
  __device__ bool is_left() const { return stretch_ < num_; }
  __device__ bool ends_class() const { return stretch_ + kClasses >= num_; }
  __device__ void advance() {
    stretch_ += kClasses;
    if (stretch_ < num_) return;
    ++class_;
    stretch_ = class_ < end_ ? class_ : num_;
  }

 private:
  int class_;
  int end_;
  int num_;
  int stretch_;
};

// Of four neighbouring outputs of a panel.
__device__ void load_biases(const LmiLinearPacked& args, int panel, int lane,
                            float (&values)[kQuad]) {
#pragma unroll
  for (int j = 0; j < kQuad; ++j) {
    const int output = panel_output(panel, lane + j, args.num_outputs, args.is_gated != 0);
    values[j] = args.bias == nullptr || output < 0 ? 0.0f : args.bias[output];
  }
}

// The same outputs of a row, at once where all are there and start on 16 bytes.
__device__ void store_outputs(const LmiLinearPacked& args, int row, int panel, int lane,
                              const float (&values)[kQuad]) {
  const bool is_gated = args.is_gated != 0;
  float* y = args.y + int64_t{row} * args.num_outputs;
  const int first = panel_output(panel, lane, args.num_outputs, is_gated);
  const bool is_whole = panel_output(panel, lane + kQuad - 1, args.num_outputs, is_gated) >= 0;
  if (is_whole && reinterpret_cast<uintptr_t>(y + first) % sizeof(Float4) == 0) {
    store_floats(y + first, values);
    return;
  }
#pragma unroll
  for (int j = 0; j < kQuad; ++j) {
    const int output = panel_output(panel, lane + j, args.num_outputs, is_gated);
    if (output >= 0) y[output] = values[j];
  }
}

// Where the sums of a class are that another kernel adds up: [classes, rows, outputs of panels].
LMI_HOST_DEVICE inline int64_t class_sum_offset(const LmiLinearPacked& args, int number, int row,
                                                int panel) {
  const int64_t num_places =
      int64_t{num_panels(args.num_outputs, args.is_gated != 0)} * kPanelOutputs;
  return (int64_t{number} * args.num_rows + row) * num_places + panel * kPanelOutputs;
}

template <typename T, int kRowWarps, bool kIsExperts, int kGroup>
class PackedBlock {
 public:
  using Shape = Tile<kRowWarps>;

  // first_row: of the block.
  __device__ PackedBlock(const LmiLinearPacked& args, int first_row)
      : args_(args),
        num_panels_(num_panels(args.num_outputs, args.is_gated != 0)),
        stretch_bytes_(static_cast<int>(panel_bytes(kStretchInputs, args.group_size))),
        panel_bytes_(static_cast<int>(panel_bytes(args.num_inputs, args.group_size))),
        first_row_(first_row),
        products_(args.group_size) {
    if constexpr (kIsExperts) {
#pragma unroll
      for (int i = 0; i < kRowCopies; ++i) {
        const int row = copied_row(i);
        sources_[i] = row < args.num_rows ? source_row<kIsExperts>(args, row) : 0;
      }
    }
    // A panel past the last is the last one again; its outputs are not stored.
    const int panel = lower_of(first_panel() + copied_panel(), num_panels_ - 1);
    source_ = static_cast<const uint8_t*>(args.panels) + int64_t{panel} * panel_bytes_;
  }

  // What the first copies will take; no kernel writes weights.
  __device__ void prefetch_weights() const {
    Turns turns = own_turns();
    for (int turn = 0; turn < kStages - 1; ++turn, turns.advance()) {
      const int at = turns.stretch() * stretch_bytes_ + copied_chunk() * kPrefetchBytes;
      if (copied_chunk() * kPrefetchBytes < stretch_bytes_ && at < panel_bytes_) {
        prefetch(source_ + at);
      }
    }
  }

  __device__ void multiply() {
    if (!is_split()) {
      float biases[kQuad];
      load_biases(args_, own_panel(), Products::own_output(), biases);
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
        for (int j = 0; j < kQuad; ++j) totals_[n][0][j] = totals_[n][1][j] = biases[j];
      }
    }
    Turns next = own_turns();
    for (int stage = 0; stage < kStages - 1; ++stage, next.advance()) start_copies(stage, next);
    int stage = 0;
    for (Turns turn = own_turns(); turn.is_left(); turn.advance(), next.advance()) {
      wait_for_copies<kStages - 2>();
      block_barrier();  // everybody's copies are there, and the stage before is free
      start_copies((stage + kStages - 1) % kStages, next);
      multiply_stage(stage, turn.stretch() * kStretchInputs);
      if (turn.ends_class()) end_class();
      stage = (stage + 1) % kStages;
    }
  }

  __device__ void store() const {
    const int panel = own_panel();
    if (panel >= num_panels_) return;
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = first_row_ + warp_row() + n * 8 + fragment_pair(lane_id()) + i;
        if (row >= args_.num_rows) continue;
        if (is_split()) {
          float* sums = static_cast<float*>(args_.workspace) +
                        class_sum_offset(args_, static_cast<int>(blockIdx.y), row, panel);
          store_floats(sums + Products::own_output(), totals_[n][i]);
        } else {
          store_outputs(args_, row, panel, Products::own_output(), totals_[n][i]);
        }
      }
    }
  }

 private:
  using Products = PackedProducts<T, kRowTiles, kGroup>;
  static_assert(Products::kQuad == kQuad);
  static constexpr int kCopyThreads = kThreads / Shape::kPanels;           // of a panel
  static constexpr int kRowCopies = Shape::kRows * kRowChunks / kThreads;  // of a thread

  __device__ static int copied_row(int copy) {
    return (copy * kThreads + static_cast<int>(threadIdx.x)) / kRowChunks;
  }

  __device__ static bool is_split() { return gridDim.y > 1; }
  __device__ static int first_panel() { return static_cast<int>(blockIdx.x) * Shape::kPanels; }
  __device__ static int warp_row() { return warp_id() % kRowWarps * kWarpRows; }
  __device__ static int warp_panel() { return warp_id() / kRowWarps * kWarpPanels; }
  __device__ static int own_panel() { return first_panel() + warp_panel() + Products::own_panel(); }
  __device__ static int copied_panel() { return static_cast<int>(threadIdx.x) / kCopyThreads; }
  __device__ static int copied_chunk() { return static_cast<int>(threadIdx.x) % kCopyThreads; }
  __device__ static uint8_t* stage_at(int stage) {
    return shared_memory() + stage * Shape::kStageBytes;
  }

  __device__ Turns own_turns() const {
    const int first = is_split() ? static_cast<int>(blockIdx.y) : 0;
    return {first, is_split() ? first + 1 : kClasses, ceil_div(args_.num_inputs, kStretchInputs)};
  }

  // Of the turn, a group of its own.
  __device__ void start_copies(int stage, const Turns& turn) const {
    if (turn.is_left()) {
      copy_weights(stage_at(stage), turn.stretch());
      copy_rows(stage_at(stage) + Shape::kWeightBytes, turn.stretch() * kStretchInputs);
    }
    end_copy_group();
  }

  __device__ void copy_weights(uint8_t* stage, int stretch) const {
    const int begin = stretch * stretch_bytes_;
    const int num_bytes = lower_of(stretch_bytes_, panel_bytes_ - begin);
    uint8_t* target = stage + copied_panel() * kStretchBytes;
#pragma unroll
    for (int first = 0; first < kStretchBytes / kChunkBytes; first += kCopyThreads) {
      const int chunk = first + copied_chunk();
      const int at = chunk * kChunkBytes;
      if (at >= num_bytes) break;
      copy_async(target + staged_chunk(chunk / 4, chunk % 4), source_ + begin + at, true);
    }
  }

  // Zeros for rows and inputs that aren't there.
  __device__ void copy_rows(uint8_t* target, int first_input) const {
#pragma unroll
    for (int i = 0; i < Shape::kRows * kRowChunks / kThreads; ++i) {
      const int index = i * kThreads + static_cast<int>(threadIdx.x);
      const int row = index / kRowChunks;
      const int input = first_input + index % kRowChunks * 8;
      const bool is_there = first_row_ + row < args_.num_rows && input < args_.num_inputs;
      int64_t from = is_there ? int64_t{first_row_ + row} * args_.num_inputs + input : 0;
      if constexpr (kIsExperts) {
        from = is_there ? int64_t{sources_[i]} * args_.num_inputs + input : 0;
      }
      copy_async(target + staged_row_chunk(row, index % kRowChunks),
                 static_cast<const T*>(args_.x) + from, is_there);
    }
  }

  __device__ void multiply_stage(int stage, int first_input) {
    const uint8_t* weights = stage_at(stage) + warp_panel() * kStretchBytes;
    const uint8_t* rows = stage_at(stage) + Shape::kWeightBytes;
    products_.multiply(weights, first_input, args_.num_inputs, [&](int step, int n) {
      const int row = warp_row() + n * 8 + fragment_group(lane_id());
      return *reinterpret_cast<const Word4*>(rows +
                                             staged_row_chunk(row, step * 4 + lane_id() % 4));
    });
  }

  __device__ void end_class() {
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < kQuad; ++j) totals_[n][i][j] += products_.at(n, i, j);
      }
    }
    products_.clear();
  }

  const LmiLinearPacked& args_;
  int num_panels_;
  int stretch_bytes_;
  int panel_bytes_;
  int first_row_;
  const uint8_t* source_;                     // the panel that this thread copies of
  int sources_[kIsExperts ? kRowCopies : 1];  // the rows of experts that it copies of
  Products products_;
  float totals_[kRowTiles][2][kQuad] = {};  // over classes
};

template <typename T, int kRowWarps, int kGroup>
__global__ void __launch_bounds__(kThreads) packed_tiles_kernel(const LmiLinearPacked args) {
  PackedBlock<T, kRowWarps, false, kGroup> block(
      args, static_cast<int>(blockIdx.z) * Tile<kRowWarps>::kRows);
  block.prefetch_weights();
  wait_for_earlier_kernels();
  block.multiply();
  block.store();
}

template <typename T, int kRowWarps, int kGroup>
__global__ void __launch_bounds__(kThreads) packed_expert_tiles_kernel(const LmiLinearPacked args) {
  wait_for_earlier_kernels();
  LmiLinearPacked own = args;
  if (!take_expert_tile<Tile<kRowWarps>::kRows>(own, static_cast<int>(blockIdx.z))) return;
  PackedBlock<T, kRowWarps, true, kGroup> block(own, 0);
  block.multiply();
  block.store();
}

// Four outputs a thread.
__global__ void __launch_bounds__(kThreads) add_classes_kernel(const LmiLinearPacked args) {
  wait_for_earlier_kernels();
  constexpr int kPanelQuads = kPanelOutputs / kQuad;
  const int quad = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  const int panel = quad / kPanelQuads;
  const int lane = quad % kPanelQuads * kQuad;
  const int row = static_cast<int>(blockIdx.y);
  if (panel >= num_panels(args.num_outputs, args.is_gated != 0)) return;
  const float* sums = static_cast<const float*>(args.workspace) + lane;
  float parts[kClasses][kQuad];
#pragma unroll
  for (int number = 0; number < kClasses; ++number) {
    load_floats(sums + class_sum_offset(args, number, row, panel), parts[number]);
  }
  float totals[kQuad];
  load_biases(args, panel, lane, totals);
#pragma unroll
  for (int number = 0; number < kClasses; ++number) {
#pragma unroll
    for (int j = 0; j < kQuad; ++j) totals[j] += parts[number][j];
  }
  store_outputs(args, row, panel, lane, totals);
}

template <typename T, int kRowWarps, int kGroup>
int32_t launch_tiles(const LmiLinearPacked& args, void* stream) {
  using Shape = Tile<kRowWarps>;
  const int panels = num_panels(args.num_outputs, args.is_gated != 0);
  Grid grid = {ceil_div(panels, Shape::kPanels), 1, ceil_div(args.num_rows, Shape::kRows)};
  const int64_t sum_bytes =
      class_sum_offset(args, kClasses, 0, 0) * static_cast<int64_t>(sizeof(float));
  const bool is_split = grid.x * grid.z < kFewBlocks && args.workspace != nullptr &&
                        args.workspace_bytes >= sum_bytes;
  if (is_split) grid.y = kClasses;
  const int32_t status = launch("linear_packed", packed_tiles_kernel<T, kRowWarps, kGroup>, grid,
                                kThreads, Shape::kSharedBytes, stream, args);
  if (status != kOk || !is_split) return status;
  const int quads = panels * (kPanelOutputs / kQuad);
  return launch("linear_packed", add_classes_kernel, {ceil_div(quads, kThreads), args.num_rows},
                kThreads, 0, stream, args);
}

template <typename T, int kRowWarps, int kGroup>
int32_t launch_expert_tiles(const LmiLinearPacked& args, void* stream) {
  using Shape = Tile<kRowWarps>;
  const int panels = num_panels(args.num_outputs, args.is_gated != 0);
  const Grid grid = {ceil_div(panels, Shape::kPanels), 1,
                     most_expert_tiles(args.num_rows, args.num_experts, Shape::kRows)};
  return launch("linear_packed", packed_expert_tiles_kernel<T, kRowWarps, kGroup>, grid, kThreads,
                Shape::kSharedBytes, stream, args);
}

}  // namespace

int32_t launch_packed_tiles(const LmiLinearPacked& args, void* stream) {
  return with_group(args, [&](auto known) {
    constexpr int kGroup = decltype(known)::value;
    if (args.matrices != nullptr) {
      return args.num_rows <= int64_t{kWarpRows} * args.num_experts
                 ? launch_expert_tiles<bf16, 1, kGroup>(args, stream)
                 : launch_expert_tiles<bf16, kMaxRowWarps, kGroup>(args, stream);
    }
    return args.num_rows <= kWarpRows ? launch_tiles<bf16, 1, kGroup>(args, stream)
                                      : launch_tiles<bf16, kMaxRowWarps, kGroup>(args, stream);
  });
}

}  // namespace lmi::cuda

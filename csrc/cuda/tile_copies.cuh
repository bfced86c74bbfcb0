// A warp's copies of cached keys and values into shared memory, a tile at a time.
#pragma once

#include "cuda/attention_tile.cuh"
#include "cuda/kv_codes.cuh"

namespace lmi::cuda {

// Of a tile, kKeys keys; the next one lies `stride` keys on. Lanes copy 16 bytes each, so that
// kRowsAtOnce neighbouring groups of them copy one row each: a group takes kTurns keys in a row,
// and its lanes find their slots, one a lane. Block tables are read a tile ahead, so that nothing
// waits for them.
template <typename Store, int kDim, int kKeys, int kRowBytes>
class TileCopies {
  static constexpr int kSize = static_cast<int>(sizeof(Store));
  static constexpr int kChunkDims = 16 / kSize;
  static constexpr int kChunks = kDim / kChunkDims;  // of a row
  static constexpr int kRowsAtOnce = kWarpSize / kChunks;
  static constexpr int kTurns = kKeys / kRowsAtOnce;
  static_assert(kTurns <= kChunks && kRowsAtOnce * kChunks == kWarpSize);
  // Whether a lane keeps where its part of a head begins. Of 16 bits it is found for every tile
  // anew: two registers more are too many for prefilling heads of 128.
  static constexpr bool kKeepsLane = kIsCode<Store>;

 public:
  // Keys first_key .. first_key + kKeys - 1 of those before `end`, then the same `stride` on.
  __device__ TileCopies(const LmiAttention& args, int seq, int kv_head, int first_key, int stride,
                        int end)
      : args_(args),
        table_(args.block_tables + static_cast<int64_t>(seq) * args.table_stride),
        keys_(static_cast<const uint8_t*>(args.keys) + offset_in_slot(kv_head)),
        distance_(reinterpret_cast<intptr_t>(args.values) - reinterpret_cast<intptr_t>(args.keys)),
        slot_bytes_(args.num_kv_heads * args.head_dim * kSize),
        kv_head_(kv_head),
        stride_(stride),
        stride_blocks_(stride / args.block_size),
        stride_places_(stride % args.block_size) {
    if constexpr (kKeepsLane) keys_ = summed(keys_ + first_dim() * kSize);
    const int key = first_key + first_row();
    num_left_ = end - key;
    block_ = (key + own_turn()) / args.block_size;
    place_ = (key + own_turn()) % args.block_size;
    read_table();
  }

  // Values lie values_offset bytes after the keys.
  __device__ void start(uint8_t* keys, int values_offset) {
    if constexpr (kIsCode<Store>) {
      // A head of an odd number of 8 codes need not start on 16 bytes.
      if (args_.head_dim % 16 != 0) return start_by<8>(keys, values_offset);
    }
    start_by<16>(keys, values_offset);
  }

  // Scales of kKeys keys, then, `distance` further on, of their values.
  __device__ void start_scales(float* scales, int distance) const {
    const int part = lane_id() % kChunks / kTurns;
    if (part > 1) return;
    const float* source = (part == 0 ? args_.key_scales : args_.value_scales) + kv_head_;
    copy_async<sizeof(float)>(scales + part * distance + first_row() + own_turn(),
                              source + static_cast<int64_t>(slot()) * args_.num_kv_heads,
                              own_turn() < num_left_);
  }

  // To the next tile.
  __device__ void advance() {
    num_left_ -= stride_;
    block_ += stride_blocks_;
    place_ += stride_places_;
    if (place_ >= args_.block_size) {
      place_ -= args_.block_size;
      ++block_;
    }
    read_table();
  }

 private:
  __device__ static int first_row() { return lane_id() / kChunks * kTurns; }
  __device__ static int first_dim() { return lane_id() % kChunks * kChunkDims; }
  // In which turn the key is copied whose slot this lane finds.
  __device__ static int own_turn() { return lane_id() % kTurns; }

  __device__ int64_t offset_in_slot(int kv_head) const {
    return static_cast<int64_t>(kv_head) * args_.head_dim * kSize;
  }

  __device__ void read_table() {
    if (own_turn() < num_left_) entry_ = table_[block_];
  }

  __device__ int slot() const { return entry_ * args_.block_size + place_; }

  template <int kBytes>
  __device__ void start_by(uint8_t* keys, int values_offset) const {
    uint8_t* target = keys + first_row() * kRowBytes + first_dim() * kSize;
    const int own_slot = slot();
    const uint8_t* own_keys = keys_;
    if constexpr (!kKeepsLane) own_keys += unknown(first_dim()) * kSize;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int row_slot = shuffle_among<kChunks>(own_slot, turn);
      const uint8_t* key = own_keys + static_cast<int64_t>(row_slot) * slot_bytes_;
      const auto* value =
          reinterpret_cast<const uint8_t*>(reinterpret_cast<intptr_t>(key) + distance_);
#pragma unroll
      for (int at = 0; at < 16; at += kBytes) {
        const bool is_there = turn < num_left_ && first_dim() + at / kSize < args_.head_dim;
        uint8_t* to = target + turn * kRowBytes + at;
        copy_async<kBytes>(to, key + at, is_there);
        copy_async<kBytes>(to + values_offset, value + at, is_there);
      }
    }
  }

  const LmiAttention& args_;
  const int32_t* table_;
  const uint8_t* keys_;  // of slot 0, this lane's if kKeepsLane
  int64_t distance_;     // from a key to its value
  int slot_bytes_;
  int kv_head_;
  int stride_;
  int stride_blocks_;
  int stride_places_;
  int num_left_;  // from this lane's first row of the tile on
  int block_;
  int place_;
  int entry_ = 0;
};

}  // namespace lmi::cuda

// Owner of the KV memory of all blocks and layers: reserved at once, touched shortly before use.
#pragma once

#include <iterator>
#include <utility>
#include <vector>

#include "common/aligned_memory.h"
#include "common/check.h"
#include "kv/kv_layout.h"
#include "kv/pages_ahead.h"

namespace lmi {

class KvCache {
 public:
  // shape.base is ignored. scales: as KvCacheView::fixed_scales, or none.
  explicit KvCache(const KvCacheView& shape, std::vector<float> scales = {})
      : scales_(std::move(scales)),
        memory_(checked(shape).total_bytes(), true),
        view_(at(memory_, scales_, shape)),
        pages_(view_) {
    LMI_CHECK(scales_.empty() || std::ssize(scales_) == 2 * shape.num_layers, scales_.size(),
              " scales of ", shape.num_layers, " layers");
    LMI_CHECK(scales_.empty() || shape.dtype == DType::kE4M3 || shape.dtype == DType::kE5M2,
              "scales are for e4m3 and e5m2, not for ", dtype_name(shape.dtype));
  }

  const KvCacheView& view() const { return view_; }
  int64_t num_bytes() const { return memory_.num_bytes(); }
  PagesAhead& pages_ahead() { return pages_; }

 private:
  static const KvCacheView& checked(const KvCacheView& shape) {
    LMI_CHECK(shape.dtype == DType::kF32 || shape.dtype == DType::kBF16 ||
                  shape.dtype == DType::kI8 || shape.dtype == DType::kE4M3 ||
                  shape.dtype == DType::kE5M2,
              "the KV cache is fp32, bf16, int8, e4m3 or e5m2, not ", dtype_name(shape.dtype));
    LMI_CHECK(shape.num_layers > 0 && shape.num_blocks > 0 && shape.num_kv_heads > 0,
              "layers, blocks and heads must be positive");
    LMI_CHECK(shape.block_size > 0 && shape.block_size % kKeyGroup == 0, "block size ",
              shape.block_size, " is not a multiple of ", kKeyGroup);
    LMI_CHECK(shape.head_dim > 0 && shape.head_dim % 2 == 0, "head size ", shape.head_dim);
    return shape;
  }

  static KvCacheView at(AlignedMemory& memory, const std::vector<float>& scales, KvCacheView view) {
    view.base = memory.data();
    view.fixed_scales = scales.empty() ? nullptr : scales.data();
    return view;
  }

  const std::vector<float> scales_;
  AlignedMemory memory_;
  const KvCacheView view_;
  PagesAhead pages_;
};

}  // namespace lmi

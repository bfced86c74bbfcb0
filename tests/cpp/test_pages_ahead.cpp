#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "check.h"
#include "kv/kv_cache.h"

namespace lmi {
namespace {

KvCacheView shape(int32_t num_blocks) {
  KvCacheView view;
  view.num_layers = 3;
  view.num_blocks = num_blocks;
  view.block_size = 16;
  view.num_kv_heads = 4;
  view.head_dim = 64;
  return view;
}

// Whether the kernel has a page under the first byte of a block.
bool is_laid(const KvCacheView& view, int32_t layer, int32_t block) {
  const auto address = reinterpret_cast<uintptr_t>(view.key(layer, block, 0));
  const uintptr_t page_bytes = sysconf(_SC_PAGESIZE);
  unsigned char is_resident = 0;
  EXPECT_EQ(mincore(reinterpret_cast<void*>(address / page_bytes * page_bytes), 1, &is_resident),
            0);
  return is_resident & 1;
}

bool comes(const KvCacheView& view, int32_t block) {
  for (int attempt = 0; attempt < 1000; ++attempt) {
    if (is_laid(view, view.num_layers - 1, block)) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return false;
}

TEST(pages_are_laid_ahead_of_the_blocks_in_use) {
  KvCache cache(shape(4096));  // 3 layers of 64 MiB: 24 MiB are ahead, 512 blocks
  const KvCacheView& view = cache.view();
  view.key(1, 0, 0)[5] = 77;
  EXPECT_EQ(is_laid(view, 2, 100), false);
  cache.pages_ahead().follow(0);
  const std::vector<uint8_t> zeros(16);
  if (!comes(view, 400)) return;  // a kernel without MADV_POPULATE_WRITE
  EXPECT_EQ(view.key(1, 0, 0)[5], 77);
  EXPECT_EQ(is_laid(view, 2, 2000), false);
  cache.pages_ahead().follow(2000);
  EXPECT_EQ(comes(view, 2200), true);
  EXPECT_EQ(is_laid(view, 2, 4000), false);
}

TEST(pages_ahead_of_the_last_block_end_with_it) {
  KvCache cache(shape(17));
  cache.pages_ahead().follow(17);
  cache.pages_ahead().follow(17);
}

}  // namespace
}  // namespace lmi

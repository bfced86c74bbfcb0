#include "graph/rank_group.h"

#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "check.h"
#include "common/spin.h"

namespace lmi {
namespace {

constexpr RankSizes kSizes = {.num_ranks = 2, .capacity = {}};

// A reader that spins comes between the two if they are in another order, once in some groups.
TEST(rank_group_has_a_reason_as_soon_as_it_is_lost) {
  const std::string why(500, 'y');
  for (int i = 0; i < 50; ++i) {
    RankGroup group(kSizes, 0, -1);
    std::string seen;
    std::atomic<bool> is_looking = false;
    std::thread reader([&] {
      is_looking = true;
      while (!group.is_lost()) cpu_pause();
      seen = group.reason();
    });
    while (!is_looking) std::this_thread::yield();
    group.lose(why);
    reader.join();
    EXPECT_EQ(seen, why);
  }
}

TEST(rank_group_keeps_the_first_reason) {
  RankGroup group(kSizes, 0, -1);
  EXPECT_EQ(group.reason(), "a rank is lost");
  const RankGroup other(kSizes, 1, group.descriptor());
  group.lose("first");
  group.lose("second");
  EXPECT(other.is_lost());
  EXPECT_EQ(other.reason(), "first");
}

TEST(rank_group_that_is_closed_cannot_be_lost) {
  RankGroup group(kSizes, 0, -1);
  group.close();
  group.lose("too late");
  EXPECT(!group.is_lost());
}

// Later than who waits spins and yields for: it sleeps by then.
TEST(rank_group_wakes_who_waits_for_a_sum) {
  RankGroup group(kSizes, 0, -1);
  RankGroup other(kSizes, 1, group.descriptor());
  std::atomic<int> num_met = 0;
  std::thread waiting([&] {
    for (int i = 0; i < 2; ++i, ++num_met) group.meet(true);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(num_met.load(), 0);
  other.meet(false);
  while (num_met == 0) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(num_met.load(), 1);
  other.lose("gone");
  waiting.join();
  EXPECT_EQ(num_met.load(), 2);
}

}  // namespace
}  // namespace lmi

#include "kv/block_writer.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "kv/block_file.h"
#include "kv/kv_cache.h"

namespace lmi {
namespace {

constexpr HashKey kSealKey{3, 4};

struct BlockDirectory {
  std::string path = std::filesystem::temp_directory_path() / "lmi-blocks-XXXXXX";
  BlockDirectory() { EXPECT(mkdtemp(path.data()) != nullptr, errno); }
  ~BlockDirectory() { std::filesystem::remove_all(path); }
};

KvCacheView small_shape() {
  KvCacheView view;
  view.num_layers = 3;
  view.num_blocks = 8;
  view.block_size = 16;
  view.num_kv_heads = 1;
  view.head_dim = 6;  // 384 bytes a layer: whole pages are the files' alone
  return view;
}

int64_t bytes_of_block(const KvCacheView& view) { return view.num_layers * view.block_bytes(); }

void fill_block(const KvCacheView& view, int32_t block_id, int value) {
  for (int32_t layer = 0; layer < view.num_layers; ++layer) {
    std::memset(view.key(layer, block_id, 0), value + layer, view.block_bytes());
  }
}

std::vector<uint8_t> block_filled_with(const KvCacheView& view, int value) {
  std::vector<uint8_t> content;
  for (int32_t layer = 0; layer < view.num_layers; ++layer) {
    content.insert(content.end(), view.block_bytes(), static_cast<uint8_t>(value + layer));
  }
  return content;
}

PrefixHash made_hash(int32_t block_id) { return {static_cast<uint64_t>(block_id), 7}; }

// Every block cached, the first the least recent, each with its own content.
void cache_every_block(BlockPool& pool, const KvCacheView& view) {
  const std::vector<int32_t> block_ids = *pool.allocate(view.num_blocks);
  for (const int32_t block_id : block_ids) {
    fill_block(view, block_id, 10 * block_id);
    pool.publish(block_id, made_hash(block_id));
    pool.free({&block_id, 1});
  }
}

std::string file_name(int32_t block_id) { return std::to_string(block_id) + ".kv"; }

BlockFileState read_back(const BlockDirectory& directory, const std::string& file,
                         const std::string& name, std::vector<uint8_t>& content) {
  return read_block_file(directory.path + '/' + file, kSealKey, name, content.data(),
                         static_cast<int64_t>(content.size()));
}

TEST(blocks_are_written_as_they_lie_or_given_up_when_they_are_evicted) {
  const BlockDirectory directory;
  const KvCache cache(small_shape());
  const KvCacheView& view = cache.view();
  for (int round = 0; round < 50; ++round) {
    BlockPool pool(view.num_blocks, view.block_size, kSealKey);
    cache_every_block(pool, view);
    BlockWriter writer(pool, directory.path, kSealKey, bytes_of_block(view));
    for (int32_t block_id = 0; block_id < view.num_blocks; ++block_id) {
      writer.write(file_name(block_id), view, block_id);
    }
    const int32_t num_evicted = round % 2 == 0 ? view.num_blocks / 2 : view.num_blocks;
    for (int32_t i = 0; i < num_evicted; ++i) fill_block(view, pool.allocate(1)->front(), 200);
    pool.check_integrity();
    writer.close(10);
    std::map<std::string, int> outcomes;
    for (const auto& [name, error] : writer.take_outcomes()) outcomes[name] = error;
    EXPECT_EQ(outcomes.size(), 8u);
    int32_t num_given_up = 0;
    for (const auto& [name, error] : outcomes) {
      if (error == ECANCELED) {
        ++num_given_up;
        continue;
      }
      EXPECT_EQ(error, 0);
      std::vector<uint8_t> content(bytes_of_block(view));
      EXPECT(read_back(directory, name, name, content) == BlockFileState::kWhole, name);
      EXPECT(content == block_filled_with(view, 10 * std::stoi(name)), name);
    }
    EXPECT(num_given_up <= num_evicted, num_given_up);
  }
}

TEST(block_files_that_were_changed_cut_off_or_renamed_are_not_read) {
  const BlockDirectory directory;
  const KvCacheView view = small_shape();
  BlockPool pool(view.num_blocks, view.block_size, kSealKey);
  BlockWriter writer(pool, directory.path, kSealKey, bytes_of_block(view));
  writer.write("a", block_filled_with(view, 1));
  writer.write("b", block_filled_with(view, 2));
  writer.remove("b");
  writer.give_up("c");
  writer.close(10);
  EXPECT_EQ(writer.take_outcomes().size(), 3u);
  std::vector<uint8_t> content(bytes_of_block(view));
  EXPECT(read_back(directory, "a", "a", content) == BlockFileState::kWhole);
  EXPECT(read_back(directory, "a", "b", content) == BlockFileState::kDamaged);
  EXPECT(read_back(directory, "b", "b", content) == BlockFileState::kUnreadable);
  const std::string path = directory.path + "/a";
  const int descriptor = ::open(path.c_str(), O_RDWR);
  for (const int64_t position : {int64_t{0}, bytes_of_block(view) + 5, kBlockFilePage - 1}) {
    uint8_t before = 0;
    EXPECT_EQ(::pread(descriptor, &before, 1, position), 1);
    const uint8_t after = before ^ 8;
    EXPECT_EQ(::pwrite(descriptor, &after, 1, position), 1);
    EXPECT(read_back(directory, "a", "a", content) == BlockFileState::kDamaged, position);
    EXPECT_EQ(::pwrite(descriptor, &before, 1, position), 1);
  }
  EXPECT_EQ(::ftruncate(descriptor, kBlockFilePage - 512), 0);
  ::close(descriptor);
  EXPECT(read_back(directory, "a", "a", content) == BlockFileState::kDamaged);
}

constexpr int kNoThread = -100;

int priority_of(const std::string& thread_name) {
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    if (name == thread_name) {
      return getpriority(PRIO_PROCESS, std::stoi(task.path().filename().string()));
    }
  }
  return kNoThread;
}

// Who evicts a block that is being copied, or asks for anything, waits for the former.
TEST(a_block_writer_yields_where_it_writes_files_and_nowhere_else) {
  const BlockDirectory directory;
  const KvCacheView view = small_shape();
  BlockPool pool(view.num_blocks, view.block_size, kSealKey);
  BlockWriter writer(pool, directory.path, kSealKey, bytes_of_block(view));
  writer.write("a", block_filled_with(view, 1));
  while (writer.take_outcomes().empty()) std::this_thread::yield();
  EXPECT_EQ(priority_of("lmi-kv-blocks"), getpriority(PRIO_PROCESS, 0));
  EXPECT_EQ(priority_of("lmi-kv-files"), 19);
  writer.close(10);
  EXPECT_EQ(priority_of("lmi-kv-files"), kNoThread);
}

// A named pipe in a file's place, whose opening waits for a reader.
TEST(a_drive_that_hangs_keeps_nobody_from_evicting) {
  const BlockDirectory directory;
  const KvCache cache(small_shape());
  const KvCacheView& view = cache.view();
  BlockPool pool(view.num_blocks, view.block_size, kSealKey);
  cache_every_block(pool, view);
  const std::string pipe = directory.path + '/' + file_name(0);
  EXPECT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  BlockWriter writer(pool, directory.path, kSealKey, bytes_of_block(view));
  for (int32_t id = 0; id < view.num_blocks; ++id) writer.write(file_name(id), view, id);
  for (int32_t i = 0; i < view.num_blocks; ++i) fill_block(view, pool.allocate(1)->front(), 200);
  writer.write(file_name(8), block_filled_with(view, 8));
  for (const auto& [name, error] : writer.take_outcomes()) EXPECT_EQ(error, ECANCELED);
  writer.close(0.001);
  const int reader = ::open(pipe.c_str(), O_RDONLY | O_NONBLOCK);  // lets go of the threads
  while (priority_of("lmi-kv-blocks") != kNoThread) std::this_thread::yield();
  ::close(reader);
}

TEST(a_block_writer_says_what_could_not_be_written) {
  const KvCacheView view = small_shape();
  BlockPool pool(view.num_blocks, view.block_size, kSealKey);
  BlockWriter writer(pool, "/nowhere", kSealKey, bytes_of_block(view));
  writer.write("a", block_filled_with(view, 1));
  writer.close(10);
  writer.write("b", block_filled_with(view, 1));
  const std::vector<BlockWriter::Outcome> outcomes = writer.take_outcomes();
  EXPECT_EQ(outcomes.size(), 2u);
  EXPECT_EQ(outcomes[0].error, ENOENT);
  EXPECT_EQ(outcomes[1].error, ECANCELED);
  EXPECT_ERROR(writer.write("c", std::vector<uint8_t>(5)), "not 5");
}

}  // namespace
}  // namespace lmi

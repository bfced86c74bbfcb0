// Threads that write KV blocks to files behind the steps that filled them.
//
// One copies a block out of where it lies into memory for one block. The other one writes the file
// from there, past the page cache, and yields to everybody, since nobody waits for files. So a
// block that waits for its turn isn't kept from being evicted either: the pool says so before the
// block gets another content, and the block is given up. In the place of the one block that is
// being copied another one is evicted; where there is no other, the copy ends with its layer, for
// which who evicts waits: the thread that copies has the priority of the one that made it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kv/block_pool.h"
#include "kv/kv_layout.h"
#include "kv/prefix_hash.h"

namespace lmi {

class BlockWriter {
 public:
  struct Outcome {
    std::string name;
    int error;  // errno; 0: the file is whole; ECANCELED: the block was given up
  };

  // Files are in `directory`, sealed with `key`. `pool` outlives this, which is told of what it
  // evicts. block_bytes: of all layers, and of all ranks.
  BlockWriter(BlockPool& pool, std::string directory, const HashKey& key, int64_t block_bytes);
  ~BlockWriter();
  BlockWriter(const BlockWriter&) = delete;
  BlockWriter& operator=(const BlockWriter&) = delete;

  // Have a block's file written, whose content stays what it is until the pool evicts it. In the
  // thread that owns the pool. The memory of `view` outlives this.
  void write(std::string name, const KvCacheView& view, int32_t block_id);
  // The same of a content, [block_bytes]; in any thread.
  void write(std::string name, std::vector<uint8_t> content);
  // Have a file removed, after what was asked for before; in any thread.
  void remove(std::string name);
  // A block whose content can't be had; in any thread.
  void give_up(std::string name);
  // What became of files to be written since this was asked before.
  std::vector<Outcome> take_outcomes();
  // Writes what waits, as far as the time allows, and stops; a file that takes longer is left to
  // the threads. Idempotent, and nothing in a process that was forked from the thread's.
  void close(double timeout_s);

 private:
  struct Work;

  BlockPool& pool_;
  const int32_t process_id_;
  std::shared_ptr<Work> work_;  // shared with the threads, which a drive that hangs may keep longer
  std::thread thread_;
};

}  // namespace lmi

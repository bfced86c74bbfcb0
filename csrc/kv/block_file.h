// A KV block in a file of its own: its bytes, padding, and a digest that tells if it is whole.
//
//   content [block_bytes] | padding | digest [16]
//
// A file is a whole number of pages, so that it can be written past the page cache. The digest is
// keyed, and covers the file's name, the content's checksum and the padding: what was cut off,
// changed, or put under another name isn't read.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "kv/prefix_hash.h"

namespace lmi {

constexpr int64_t kBlockFilePage = 4096;

// Of a file with a block of so many bytes.
int64_t block_file_bytes(int64_t block_bytes);

// Puts padding and digest behind the content of a file of this name, which lies at `file`,
// [block_file_bytes].
void seal_block(const HashKey& key, std::string_view name, uint8_t* file, int64_t block_bytes);

// Makes `path` a file of these bytes; `file` lies on a page. is_direct: past the page cache; false
// from then on where the file system refuses that. Returns 0 or errno, and leaves no file then.
int write_block_file(const std::string& path, const uint8_t* file, int64_t file_bytes,
                     bool& is_direct);

enum class BlockFileState { kWhole, kDamaged, kUnreadable };

// Reads a block's content, [block_bytes]. Sets errno where the file is unreadable.
BlockFileState read_block_file(const std::string& path, const HashKey& key, std::string_view name,
                               uint8_t* content, int64_t block_bytes);

}  // namespace lmi

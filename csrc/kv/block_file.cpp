#include "kv/block_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "common/checksum.h"

namespace lmi {
namespace {

using Digest = std::array<char, kPrefixHashBytes>;

// Of a tail without the digest that ends it: padding.
Digest digest_of(const HashKey& key, std::string_view name, uint64_t content_checksum,
                 std::string_view padding) {
  std::vector<uint8_t> message(name.size() + sizeof(content_checksum) + padding.size());
  std::memcpy(message.data(), name.data(), name.size());
  std::memcpy(&message[name.size()], &content_checksum, sizeof(content_checksum));
  std::memcpy(message.data() + message.size() - padding.size(), padding.data(), padding.size());
  return prefix_hash_to_bytes(siphash_128(key, message));
}

// Some file systems say only then that there was no room.
int close_with(int descriptor, int error) {
  const bool is_closed = ::close(descriptor) == 0;
  return error == 0 && !is_closed ? errno : error;
}

int write_once(const std::string& path, const uint8_t* file, int64_t file_bytes, int flags) {
  const int descriptor =
      ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | flags, 0600);
  if (descriptor < 0) return errno;
  const ssize_t num_written = ::write(descriptor, file, file_bytes);
  if (num_written < 0) return close_with(descriptor, errno);
  return close_with(descriptor, num_written == file_bytes ? 0 : ENOSPC);
}

}  // namespace

int64_t block_file_bytes(int64_t block_bytes) {
  const int64_t num_bytes = block_bytes + static_cast<int64_t>(kPrefixHashBytes);
  return (num_bytes + kBlockFilePage - 1) / kBlockFilePage * kBlockFilePage;
}

void seal_block(const HashKey& key, std::string_view name, uint8_t* file, int64_t block_bytes) {
  char* padding = reinterpret_cast<char*>(file) + block_bytes;
  const size_t padding_bytes = block_file_bytes(block_bytes) - block_bytes - kPrefixHashBytes;
  std::memset(padding, 0, padding_bytes);
  const Digest digest = digest_of(key, name, checksum(file, block_bytes), {padding, padding_bytes});
  std::memcpy(padding + padding_bytes, digest.data(), digest.size());
}

int write_block_file(const std::string& path, const uint8_t* file, int64_t file_bytes,
                     bool& is_direct) {
  int error = write_once(path, file, file_bytes, is_direct ? O_DIRECT : 0);
  if (error == EINVAL && is_direct) {
    is_direct = false;
    error = write_once(path, file, file_bytes, 0);
  }
  if (error != 0) ::unlink(path.c_str());
  return error;
}

BlockFileState read_block_file(const std::string& path, const HashKey& key, std::string_view name,
                               uint8_t* content, int64_t block_bytes) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return BlockFileState::kUnreadable;
  const int64_t file_bytes = block_file_bytes(block_bytes);
  std::vector<char> tail(file_bytes - block_bytes + 1);  // one more than there is
  const iovec parts[] = {{content, static_cast<size_t>(block_bytes)}, {tail.data(), tail.size()}};
  const ssize_t num_read = ::readv(descriptor, parts, 2);
  errno = close_with(descriptor, errno);
  if (num_read < 0) return BlockFileState::kUnreadable;
  if (num_read != file_bytes) return BlockFileState::kDamaged;
  const size_t padding_bytes = tail.size() - 1 - kPrefixHashBytes;
  const Digest digest =
      digest_of(key, name, checksum(content, block_bytes), {tail.data(), padding_bytes});
  const bool is_whole = std::memcmp(digest.data(), &tail[padding_bytes], digest.size()) == 0;
  return is_whole ? BlockFileState::kWhole : BlockFileState::kDamaged;
}

}  // namespace lmi

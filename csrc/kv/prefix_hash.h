// Keyed chained hashes of token blocks: equal hashes mean equal prefixes.
//
// A block's hash covers its tokens and the hash of the block before it, so it names the whole
// prefix. The key is secret: nobody can craft a prompt that collides with another tenant's prefix.
// The function is SipHash-2-4 with 128 bits of output (Aumasson and Bernstein, "SipHash: a fast
// short-input PRF", 2012).
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace lmi {

struct PrefixHash {
  uint64_t low = 0;
  uint64_t high = 0;

  bool operator==(const PrefixHash&) const = default;
};

constexpr size_t kPrefixHashBytes = 16;
using HashKey = std::array<uint64_t, 2>;

// The key's or hash's 16 bytes, little-endian; throws Error for another size.
HashKey hash_key_from_bytes(std::string_view bytes);
PrefixHash prefix_hash_from_bytes(std::string_view bytes);
std::array<char, kPrefixHashBytes> prefix_hash_to_bytes(const PrefixHash& hash);

PrefixHash siphash_128(const HashKey& key, std::span<const uint8_t> message);

// The hash that a chain without a parent starts from; extra is what else tells prefixes apart
// (adapter, salt).
PrefixHash chain_seed(const HashKey& key, std::string_view extra);

// Hashes of the full blocks in token_ids; an incomplete last block has none.
std::vector<PrefixHash> hash_blocks(const HashKey& key, const PrefixHash& parent,
                                    std::span<const int32_t> token_ids, int32_t block_size);

}  // namespace lmi

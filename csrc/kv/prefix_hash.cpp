#include "kv/prefix_hash.h"

#include <bit>
#include <cstring>

#include "common/check.h"

namespace lmi {
namespace {

static_assert(std::endian::native == std::endian::little, "words are read as little-endian");

struct SipState {
  uint64_t v0, v1, v2, v3;

  explicit SipState(const HashKey& key)
      : v0(key[0] ^ 0x736f6d6570736575u),
        v1(key[1] ^ 0x646f72616e646f6du ^ 0xee),  // 0xee, 0xee and 0xdd mark the 128-bit variant
        v2(key[0] ^ 0x6c7967656e657261u),
        v3(key[1] ^ 0x7465646279746573u) {}

  void round() {
    v0 += v1;
    v1 = std::rotl(v1, 13) ^ v0;
    v0 = std::rotl(v0, 32);
    v2 += v3;
    v3 = std::rotl(v3, 16) ^ v2;
    v0 += v3;
    v3 = std::rotl(v3, 21) ^ v0;
    v2 += v1;
    v1 = std::rotl(v1, 17) ^ v2;
    v2 = std::rotl(v2, 32);
  }

  void absorb(uint64_t word) {
    v3 ^= word;
    round();
    round();
    v0 ^= word;
  }

  uint64_t squeeze() {
    for (int i = 0; i < 4; ++i) round();
    return v0 ^ v1 ^ v2 ^ v3;
  }
};

uint64_t load_word(const uint8_t* data, size_t num_bytes) {
  uint64_t word = 0;
  if (num_bytes > 0) std::memcpy(&word, data, num_bytes);  // data may be null without bytes
  return word;
}

std::span<const uint8_t> as_bytes(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

}  // namespace

HashKey hash_key_from_bytes(std::string_view bytes) {
  const PrefixHash words = prefix_hash_from_bytes(bytes);
  return {words.low, words.high};
}

PrefixHash prefix_hash_from_bytes(std::string_view bytes) {
  LMI_CHECK(bytes.size() == kPrefixHashBytes, "keys and hashes have ", kPrefixHashBytes,
            " bytes, not ", bytes.size());
  PrefixHash hash;
  std::memcpy(&hash, bytes.data(), kPrefixHashBytes);
  return hash;
}

std::array<char, kPrefixHashBytes> prefix_hash_to_bytes(const PrefixHash& hash) {
  return std::bit_cast<std::array<char, kPrefixHashBytes>>(hash);
}

PrefixHash siphash_128(const HashKey& key, std::span<const uint8_t> message) {
  SipState state(key);
  const size_t tail = message.size() % 8;
  const size_t num_whole = message.size() - tail;
  for (size_t i = 0; i < num_whole; i += 8) state.absorb(load_word(&message[i], 8));
  const uint64_t length = static_cast<uint64_t>(message.size()) << 56;
  state.absorb(length | load_word(message.data() + num_whole, tail));
  state.v2 ^= 0xee;
  PrefixHash hash;
  hash.low = state.squeeze();
  state.v1 ^= 0xdd;
  hash.high = state.squeeze();
  return hash;
}

PrefixHash chain_seed(const HashKey& key, std::string_view extra) {
  // Another key than the blocks': no choice of extra can stand for a block of tokens.
  return siphash_128({key[0] ^ 1, key[1]}, as_bytes(extra));
}

std::vector<PrefixHash> hash_blocks(const HashKey& key, const PrefixHash& parent,
                                    std::span<const int32_t> token_ids, int32_t block_size) {
  const size_t num_blocks = token_ids.size() / block_size;
  const size_t tokens_bytes = block_size * sizeof(int32_t);
  std::vector<PrefixHash> hashes;
  hashes.reserve(num_blocks);
  std::vector<uint8_t> message(kPrefixHashBytes + tokens_bytes);
  PrefixHash previous = parent;
  for (size_t block = 0; block < num_blocks; ++block) {
    std::memcpy(message.data(), &previous, kPrefixHashBytes);
    std::memcpy(message.data() + kPrefixHashBytes, &token_ids[block * block_size], tokens_bytes);
    previous = siphash_128(key, message);
    hashes.push_back(previous);
  }
  return hashes;
}

}  // namespace lmi

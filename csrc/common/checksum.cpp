#include "common/checksum.h"

#include <algorithm>
#include <cstring>

namespace lmi {

namespace {

// Four chains hide the latency of multiplying.
constexpr int64_t kNumLanes = 4;
constexpr int64_t kStepBytes = kNumLanes * 16;
// Odd constants without structure: 64 bits each of the fractions of the square roots of 2, 3, 5, 7.
constexpr uint64_t kSeeds[kNumLanes] = {0x6a09e667f3bcc909, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b,
                                        0xa54ff53a5f1d36f1};

// Both halves of the 128-bit product, folded together: every bit of the factors reaches every bit.
uint64_t fold(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

void add_step(const uint8_t* data, uint64_t (&lanes)[kNumLanes]) {
  for (int64_t lane = 0; lane < kNumLanes; ++lane) {
    uint64_t words[2];
    std::memcpy(words, data + lane * 16, 16);
    // A lane is added after the multiplication, so that a factor of zero doesn't forget it.
    lanes[lane] = fold(words[0] ^ kSeeds[lane], words[1] ^ lanes[lane]) + lanes[lane];
  }
}

}  // namespace

uint64_t piece_checksum(const uint8_t* data, int64_t num_bytes) {
  uint64_t lanes[kNumLanes] = {kSeeds[1], kSeeds[2], kSeeds[3], kSeeds[0]};
  int64_t done = 0;
  for (; done + kStepBytes <= num_bytes; done += kStepBytes) add_step(data + done, lanes);
  if (done < num_bytes) {
    uint8_t rest[kStepBytes] = {};
    std::memcpy(rest, data + done, num_bytes - done);
    add_step(rest, lanes);
  }
  uint64_t sum = static_cast<uint64_t>(num_bytes);
  for (const uint64_t lane : lanes) sum = fold(sum ^ kSeeds[0], lane ^ kSeeds[3]) + lane;
  return sum;
}

uint64_t combine_checksums(const std::vector<uint64_t>& pieces) {
  uint64_t sum = kSeeds[2];
  for (const uint64_t piece : pieces) sum = fold(sum ^ kSeeds[0], piece ^ kSeeds[1]) + piece;
  return sum;
}

uint64_t checksum(const uint8_t* data, int64_t num_bytes) {
  std::vector<uint64_t> pieces;
  for (int64_t first = 0; first < num_bytes; first += kChecksumPieceBytes) {
    pieces.push_back(
        piece_checksum(data + first, std::min(kChecksumPieceBytes, num_bytes - first)));
  }
  return combine_checksums(pieces);
}

}  // namespace lmi

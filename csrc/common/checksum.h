// A fast checksum of bytes, against damage but not against intent.
#pragma once

#include <cstdint>
#include <vector>

namespace lmi {

// Long arrays are summed in pieces of this size, so that threads can share the work.
constexpr int64_t kChecksumPieceBytes = int64_t{1} << 20;

// Of one piece, of at most kChecksumPieceBytes.
uint64_t piece_checksum(const uint8_t* data, int64_t num_bytes);
// Of a whole array, from those of its pieces in order.
uint64_t combine_checksums(const std::vector<uint64_t>& pieces);
uint64_t checksum(const uint8_t* data, int64_t num_bytes);

}  // namespace lmi

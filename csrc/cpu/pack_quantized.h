// A weight's rows into int8 and int4 panels, quantised or as they are coded, and back.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/panel_rows.h"

namespace lmi::cpu {

int64_t quantized_panel_bytes(LinearFormat format, int64_t num_inputs);
// The weight at a lane and input of an int8 or int4 panel.
float unpack_quantized(LinearFormat format, const uint8_t* panel, int64_t lane, int64_t input);

// Packs one panel after the other; one per thread.
class PanelQuantizer {
 public:
  PanelQuantizer(LinearFormat format, int64_t num_inputs);

  void pack(const PanelRows& rows, uint8_t* panel);

 private:
  void pack_int8(const PanelRows& rows, uint8_t* panel);
  void pack_int4(const PanelRows& rows, uint8_t* panel);
  // Of int4, scales and zero points go to the panel's headers, codes to codes_.
  float quantize_int8(const PanelRow& row, uint8_t* codes);
  void quantize_int4(const PanelRow& row, int64_t lane, uint8_t* panel);
  void keep_int4(const PanelRow& row, int64_t lane, uint8_t* panel);
  void keep_codes(const PanelRow& row, uint8_t padding, uint8_t* codes);

  LinearFormat format_;
  int64_t num_inputs_;
  int64_t padded_inputs_;
  WeightQuantizer quantizer_;
  std::vector<float> weights_;  // one row
  std::vector<uint8_t> codes_;  // [16][padded_inputs_]
};

}  // namespace lmi::cpu

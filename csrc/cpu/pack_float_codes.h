// A weight's rows into panels of codes of floats, kept or made, and back.
#pragma once

#include <cstdint>

#include "cpu/packed_linear.h"
#include "cpu/panel_rows.h"

namespace lmi::cpu {

int64_t float_code_panel_bytes(DType dtype, int64_t num_inputs);
// Rows in the codes of dtype with their scales, one or one per block; or, to NF4 and FP4, in
// floats: a block's scale is its largest magnitude then, and codes stand for the nearest value.
void pack_float_codes(const PanelRows& rows, DType dtype, int64_t num_inputs, uint8_t* panel);
// The weight at a lane and input of a panel.
float unpack_float_code(DType dtype, const uint8_t* panel, int64_t lane, int64_t input);

}  // namespace lmi::cpu

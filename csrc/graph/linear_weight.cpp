#include "graph/linear_weight.h"

#include <algorithm>
#include <thread>

#include "common/check.h"

namespace lmi {

LinearWeight::LinearWeight(const std::vector<cpu::LinearPart>& parts, int64_t num_inputs,
                           bool gated, cpu::LinearFormat format, int32_t num_threads) {
  LMI_CHECK(!parts.empty() && num_inputs > 0, "a weight needs parts and inputs");
  LMI_CHECK(!gated || (parts.size() == 2 && parts[0].num_outputs == parts[1].num_outputs),
            "a gated weight has two parts of one size, gate and up");
  int64_t num_outputs = 0;
  for (const cpu::LinearPart& part : parts) num_outputs += part.num_outputs;
  LMI_CHECK(num_outputs > 0, "a weight needs outputs");
  cpu::check_linear_format(format, num_inputs);
  memory_ = PackedMemory(cpu::packed_linear_bytes(format, num_outputs, num_inputs, gated));
  packed_ = {.dtype = format.dtype,
             .num_outputs = num_outputs,
             .num_inputs = num_inputs,
             .gated = gated,
             .data = memory_.data(),
             .group_size = format.group_size};

  const int64_t num_panels = cpu::num_linear_panels(num_outputs, gated);
  // Small matrices aren't worth a thread; gated panels go in pairs.
  const int64_t work = num_outputs * num_inputs / (1 << 18) + 1;
  const int64_t num_workers = std::clamp<int64_t>(work, 1, std::max(1, num_threads));
  const int64_t step = (num_panels / 2 + num_workers) / num_workers * 2;
  const auto pack = [&](int64_t first) {
    cpu::pack_linear(parts, num_inputs, gated, format, memory_.data(), first,
                     std::min(first + step, num_panels));
  };
  std::vector<std::thread> threads;
  for (int64_t first = step; first < num_panels; first += step) threads.emplace_back(pack, first);
  pack(0);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace lmi

// The step buffer and the sampling table.
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <span>

#include "bind/arrays.h"
#include "bind/bind.h"
#include "bind/ids.h"
#include "cpu/sampling_row.h"
#include "cpu/watermark.h"
#include "graph/step_buffer.h"

namespace py = pybind11;

namespace lmi {
namespace {

SamplingRow& checked_row(SamplingTable& table, int32_t row) {
  LMI_CHECK(row >= 0 && row < static_cast<int32_t>(table.rows.size()), "sampling row ", row, " of ",
            table.rows.size());
  return table.rows[row];
}

// Of an array, which requests have for all of their rows, as fast as it can be copied.
using IdArray = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;

using BiasArray = py::array_t<float, py::array::c_style | py::array::forcecast>;

void check_ids(const SamplingTable& table, std::span<const int32_t> ids) {
  for (const int32_t id : ids) {
    LMI_CHECK(id >= 0 && id < table.vocab_size, "token id ", id, " of ", table.vocab_size);
  }
}

std::vector<int32_t> checked_ids(const SamplingTable& table, const IdArray& ids) {
  const std::span<const int32_t> all(ids.data(), static_cast<size_t>(ids.size()));
  check_ids(table, all);
  return {all.begin(), all.end()};
}

std::vector<int32_t> ascending_ids(const SamplingTable& table, const IdArray& ids) {
  std::vector<int32_t> distinct = checked_ids(table, ids);
  std::ranges::sort(distinct);
  distinct.erase(std::ranges::unique(distinct).begin(), distinct.end());
  return distinct;
}

template <typename T, typename Value>
py::array_t<T> gather_array(const std::vector<const SamplingRow*>& rows, Value value) {
  py::array_t<T> result(static_cast<py::ssize_t>(rows.size()));
  std::transform(rows.begin(), rows.end(), result.mutable_data(),
                 [&](const SamplingRow* row) { return static_cast<T>(value(*row)); });
  return result;
}

// (row, token id, value) triples, one array each.
struct TokenEdits {
  std::vector<int32_t> rows;
  std::vector<int32_t> ids;
  std::vector<float> values;

  void add(size_t row, int32_t id, float value) {
    rows.push_back(static_cast<int32_t>(row));
    ids.push_back(id);
    values.push_back(value);
  }
  py::tuple arrays() const {
    const auto array = [&](const auto& items) {
      using T = typename std::decay_t<decltype(items)>::value_type;
      return py::array_t<T>(static_cast<py::ssize_t>(items.size()), items.data());
    };
    return py::make_tuple(array(rows), array(ids), array(values));
  }
};

// Scales of logits, an array for each field.
py::tuple scale_arrays(const TokenEdits& above, const TokenEdits& below) {
  const py::tuple first = above.arrays();
  return py::make_tuple(first[0], first[1], first[2], below.arrays()[2]);
}

// What a sampler in Python needs of these rows, see _native.pyi.
py::dict gather_rows(const SamplingTable& table, const py::object& row_ids,
                     const std::vector<std::vector<int32_t>>& drafts,
                     const std::vector<int32_t>& previous_ids) {
  std::vector<const SamplingRow*> rows;
  for (const int32_t id : ids_from_python(row_ids)) {
    LMI_CHECK(id >= 0 && id < static_cast<int32_t>(table.rows.size()), "sampling row ", id, " of ",
              table.rows.size());
    rows.push_back(&table.rows[id]);
  }
  LMI_CHECK(drafts.empty() || drafts.size() == rows.size(), drafts.size(), " drafts of ",
            rows.size(), " rows");
  LMI_CHECK(previous_ids.empty() || previous_ids.size() == rows.size(), previous_ids.size(),
            " previous tokens of ", rows.size(), " rows");
  std::vector<int32_t> order;
  TokenEdits biases;
  TokenEdits seen;
  TokenEdits bans;
  TokenEdits above;
  TokenEdits below;
  for (size_t i = 0; i < rows.size(); ++i) {
    const std::span<const int32_t> ids =
        drafts.empty() ? std::span<const int32_t>() : std::span<const int32_t>(drafts[i]);
    cpu::SamplingRowView row =
        cpu::view_sampling_row(*rows[i], ids.data(), static_cast<int64_t>(ids.size()),
                               previous_ids.empty() ? 0 : previous_ids[i]);
    if (previous_ids.empty()) row.watermark_delta = 0.0f;
    for (const auto& [id, bias] : cpu::all_biases(row, table.vocab_size, order)) {
      biases.add(i, id, bias);
    }
    for (int64_t k = 0; k < row.num_seen + row.num_drafts; ++k) {
      const SeenToken token = cpu::seen_token(row, k);
      if (token.token_id >= 0) seen.add(i, token.token_id, static_cast<float>(token.num_output));
    }
    for (int64_t k = 0; k < cpu::num_scales(row); ++k) {
      const cpu::TokenScale scale = cpu::token_scale(row, k);
      if (scale.token_id < 0) continue;
      above.add(i, scale.token_id, scale.above);
      below.add(i, scale.token_id, scale.below);
    }
    for (const int32_t id : rows[i]->banned_ids) bans.add(i, id, 0.0f);
    for (int64_t k = 0; k < row.num_min_tokens_banned_ids; ++k) {
      bans.add(i, row.min_tokens_banned_ids[k], 0.0f);
    }
  }
  py::dict result;
#define LMI_GATHER(T, field) \
  result[#field] = gather_array<T>(rows, [](const SamplingRow& row) { return row.field; })
  LMI_GATHER(float, temperature);
  LMI_GATHER(int32_t, top_k);
  LMI_GATHER(float, top_p);
  LMI_GATHER(float, min_p);
  LMI_GATHER(float, typical_p);
  LMI_GATHER(float, epsilon_cutoff);
  LMI_GATHER(float, eta_cutoff);
  LMI_GATHER(float, repetition_penalty);
  LMI_GATHER(float, presence_penalty);
  LMI_GATHER(float, frequency_penalty);
  LMI_GATHER(uint64_t, seed);
  LMI_GATHER(int32_t, choice);
  LMI_GATHER(int32_t, num_logprobs);
#undef LMI_GATHER
  result["biases"] = biases.arrays();
  result["seen"] = seen.arrays();
  result["scales"] = scale_arrays(above, below);
  result["bans"] = bans.arrays();
  return result;
}

// The last items of a Python sequence.
py::object last_of(const py::object& items, size_t most) {
  const auto first = py::int_(-static_cast<py::ssize_t>(most));
  return items[py::slice(first, py::none(), py::none())];
}

void bind_sampling_table(py::module_& m) {
  py::class_<LogitBiases, std::shared_ptr<LogitBiases>>(m, "LogitBiases")
      .def(py::init([](const IdArray& token_ids, const BiasArray& biases,
                       const std::vector<std::pair<std::vector<int32_t>, float>>& of_sequences) {
             LMI_CHECK(token_ids.size() == biases.size(), token_ids.size(), " ids of ",
                       biases.size(), " biases");
             std::vector<TokenBias> of_tokens;
             for (py::ssize_t i = 0; i < biases.size(); ++i) {
               of_tokens.emplace_back(token_ids.data()[i], biases.data()[i]);
             }
             std::vector<SequenceBias> sequences;
             for (const auto& [ids, bias] : of_sequences) sequences.push_back({ids, bias});
             const py::gil_scoped_release release;
             return std::make_shared<LogitBiases>(std::move(of_tokens), std::move(sequences));
           }),
           py::arg("token_ids"), py::arg("biases"),
           py::arg("of_sequences") = std::vector<std::pair<std::vector<int32_t>, float>>())
      .def_property_readonly("num_last", &LogitBiases::num_last);
  py::class_<SamplingTable>(m, "SamplingTable")
      .def(py::init([](int32_t num_rows, int32_t vocab_size) {
             LMI_CHECK(num_rows > 0 && vocab_size > 0, "rows ", num_rows, ", vocab ", vocab_size);
             auto table = std::make_unique<SamplingTable>();
             table->vocab_size = vocab_size;
             table->rows.resize(num_rows);
             return table;
           }),
           py::arg("num_rows"), py::arg("vocab_size"))
      .def(
          "set",
          [](SamplingTable& table, int32_t row_id, float temperature, int32_t top_k, float top_p,
             float min_p, float typical_p, float repetition_penalty, float presence_penalty,
             float frequency_penalty, uint64_t seed, int32_t choice, int32_t num_logprobs,
             const IdArray& banned_ids, int32_t min_tokens, const IdArray& min_tokens_banned_ids,
             double watermark_gamma, float watermark_delta, std::shared_ptr<LogitBiases> biases,
             float epsilon_cutoff, float eta_cutoff, float prompt_reward, const IdArray& prompt_ids,
             int32_t length_start, float length_factor, const IdArray& length_ids) {
            if (biases != nullptr) {
              check_ids(table, std::array{biases->min_id(), biases->max_id()});
            }
            SamplingRow& row = checked_row(table, row_id);
            row = SamplingRow();
            row.temperature = temperature;
            row.top_k = top_k;
            row.top_p = top_p;
            row.min_p = min_p;
            row.typical_p = typical_p;
            row.repetition_penalty = repetition_penalty;
            row.presence_penalty = presence_penalty;
            row.frequency_penalty = frequency_penalty;
            row.seed = seed;
            row.choice = choice;
            row.num_logprobs = num_logprobs;
            row.min_tokens = min_tokens;
            row.watermark_gamma = watermark_gamma;
            row.watermark_delta = watermark_delta;
            row.biases = std::move(biases);
            row.banned_ids = checked_ids(table, banned_ids);
            row.min_tokens_banned_ids = checked_ids(table, min_tokens_banned_ids);
            row.epsilon_cutoff = epsilon_cutoff;
            row.eta_cutoff = eta_cutoff;
            row.prompt_reward = prompt_reward;
            row.prompt_ids = ascending_ids(table, prompt_ids);
            row.length_penalty = {length_start, length_factor, ascending_ids(table, length_ids)};
          },
          py::arg("row"), py::kw_only(), py::arg("temperature"), py::arg("top_k"), py::arg("top_p"),
          py::arg("min_p"), py::arg("typical_p"), py::arg("repetition_penalty"),
          py::arg("presence_penalty"), py::arg("frequency_penalty"), py::arg("seed"),
          py::arg("choice"), py::arg("num_logprobs"), py::arg("banned_ids"), py::arg("min_tokens"),
          py::arg("min_tokens_banned_ids"), py::arg("watermark_gamma") = 0.0,
          py::arg("watermark_delta") = 0.0f, py::arg("biases") = py::none(),
          py::arg("epsilon_cutoff") = 0.0f, py::arg("eta_cutoff") = 0.0f,
          py::arg("prompt_reward") = 1.0f, py::arg("prompt_ids") = py::tuple(),
          py::arg("length_start") = 0, py::arg("length_factor") = 1.0f,
          py::arg("length_ids") = py::tuple())
      .def(
          "observe_prompt",
          [](SamplingTable& table, int32_t row_id, const py::object& token_ids) {
            SamplingRow& row = checked_row(table, row_id);
            const size_t most = row.biases == nullptr ? 0 : row.biases->num_last();
            const bool is_counted = row.repetition_penalty != 1.0f;
            if (!is_counted && most == 0) return;
            const py::object last = is_counted ? token_ids : last_of(token_ids, most);
            const std::vector<int32_t> ids = ids_from_python(last);
            check_ids(table, ids);
            row.observe_prompt(ids);
          },
          py::arg("row"), py::arg("token_ids"))
      .def(
          "observe",
          [](SamplingTable& table, int32_t row_id, int32_t token_id) {
            LMI_CHECK(token_id >= 0 && token_id < table.vocab_size, "token id ", token_id);
            checked_row(table, row_id).observe({&token_id, 1});
          },
          py::arg("row"), py::arg("token_id"))
      .def("gather", &gather_rows, py::arg("rows"),
           py::arg("drafts") = std::vector<std::vector<int32_t>>(),
           py::arg("previous_ids") = std::vector<int32_t>())
      .def(
          "observe_many",
          [](SamplingTable& table, int32_t row_id, const py::object& token_ids) {
            SamplingRow& row = checked_row(table, row_id);
            const std::vector<int32_t> ids = ids_from_python(token_ids);
            check_ids(table, ids);
            row.observe(ids);
          },
          py::arg("row"), py::arg("token_ids"));
}

LogitRows parse_logit_rows(const std::string& name) {
  if (name == "none") return LogitRows::kNone;
  if (name == "first") return LogitRows::kFirst;
  if (name == "last") return LogitRows::kLast;
  if (name == "all") return LogitRows::kAll;
  LMI_CHECK(name == "drafts", "logits '", name, "'; known are none, first, last, all, drafts");
  return LogitRows::kDrafts;
}

// An array of the buffer by its name in step.h, cut to the present counts.
py::array view_array(const py::object& self, const std::string& name) {
  const StepView& view = self.cast<const StepBuffer&>().view();
  const std::pair<const char*, const int32_t*> token_arrays[] = {{"token_ids", view.token_ids},
                                                                 {"positions", view.positions},
                                                                 {"token_types", view.token_types},
                                                                 {"slots", view.slots}};
  const std::pair<const char*, const int32_t*> seq_arrays[] = {{"first_rows", view.first_rows},
                                                               {"num_rows", view.num_rows},
                                                               {"kv_lengths", view.kv_lengths},
                                                               {"table_rows", view.table_rows}};
  const std::pair<const char*, const int32_t*> logit_arrays[] = {
      {"logit_token_rows", view.logit_token_rows},
      {"sampling_rows", view.sampling_rows},
      {"sample_positions", view.sample_positions},
      {"target_ids", view.target_ids},
      {"num_drafts", view.num_drafts},
      {"sampled_ids", view.sampled_ids},
      {"num_top", view.num_top}};
  const std::pair<const char*, const int32_t*> copy_arrays[] = {{"copy_src", view.copy_src},
                                                                {"copy_dst", view.copy_dst}};
  const std::pair<const char*, const int32_t*> adapter_arrays[] = {
      {"adapter_first_rows", view.adapter_first_rows},
      {"adapter_num_rows", view.adapter_num_rows},
      {"adapter_slots", view.adapter_slots}};
  const auto find = [&](const auto& arrays, int32_t count) -> py::object {
    for (const auto& [array_name, data] : arrays) {
      if (name == array_name) return array_view<int32_t>({count}, data, self);
    }
    return py::none();
  };
  for (const py::object& found :
       {find(token_arrays, view.num_tokens), find(seq_arrays, view.num_seqs),
        find(logit_arrays, view.num_logit_rows), find(copy_arrays, view.num_copies),
        find(adapter_arrays, view.num_adapter_runs)}) {
    if (!found.is_none()) return found;
  }
  LMI_CHECK(name == "sampled_logprobs", "a step has no array '", name, "'");
  return array_view<float>({view.num_logit_rows}, view.sampled_logprobs, self);
}

// The masked logit rows and their masks [rows, words], once all of them are filled.
py::tuple wait_for_masks(const StepBuffer& step) {
  const StepView& view = step.view();
  std::vector<int32_t> rows;
  std::vector<const uint32_t*> masks;
  {
    const py::gil_scoped_release release;
    for (int32_t row = 0; row < view.num_logit_rows; ++row) {
      const uint32_t* mask = cpu::wait_for_mask(view, row);
      if (mask == nullptr) continue;
      rows.push_back(row);
      masks.push_back(mask);
    }
  }
  const py::ssize_t num_words = (view.sampling->vocab_size + 31) / 32;
  py::array_t<uint32_t> words({static_cast<py::ssize_t>(rows.size()), num_words});
  for (size_t i = 0; i < masks.size(); ++i) {
    std::copy_n(masks[i], num_words, words.mutable_data(static_cast<py::ssize_t>(i), 0));
  }
  return py::make_tuple(py::array_t<int32_t>(static_cast<py::ssize_t>(rows.size()), rows.data()),
                        words);
}

py::list top_of(const StepBuffer& step, int32_t logit_row) {
  const StepView& view = step.view();
  LMI_CHECK(logit_row >= 0 && logit_row < view.num_logit_rows, "logit row ", logit_row);
  const int64_t base = static_cast<int64_t>(logit_row) * view.capacity.max_logprobs;
  py::list result;
  for (int32_t i = 0; i < view.num_top[logit_row]; ++i) {
    result.append(py::make_tuple(view.top_ids[base + i], view.top_logprobs[base + i]));
  }
  return result;
}

template <typename T>
py::list to_list(const T* data, int32_t count) {
  py::list result(count);
  for (int32_t i = 0; i < count; ++i) result[i] = data[i];
  return result;
}

}  // namespace

void bind_step(py::module_& m) {
  bind_sampling_table(m);
  m.def(
      "favoured_tokens",
      [](int32_t previous_id, double gamma, int32_t vocab_size) {
        LMI_CHECK(vocab_size > 0 && gamma >= 0.0 && gamma <= 1.0, "gamma ", gamma, " of ",
                  vocab_size);
        std::vector<int32_t> order(static_cast<size_t>(vocab_size));
        const int32_t count = cpu::favour_tokens(previous_id, gamma, vocab_size, order.data());
        return py::array_t<int32_t>(count, order.data());
      },
      py::arg("previous_id"), py::arg("gamma"), py::arg("vocab_size"));
  py::class_<StepBuffer>(m, "Step")
      .def(py::init([](int32_t max_tokens, int32_t max_seqs, int32_t max_logit_rows,
                       int32_t max_logprobs, int32_t max_copies, int32_t block_size,
                       const BlockTables& block_tables, const SamplingTable& sampling) {
             const StepCapacity capacity{.max_tokens = max_tokens,
                                         .max_seqs = max_seqs,
                                         .max_logit_rows = max_logit_rows,
                                         .max_logprobs = max_logprobs,
                                         .max_copies = max_copies,
                                         .max_blocks_per_seq = 0,
                                         .block_size = block_size};
             return std::make_unique<StepBuffer>(capacity, block_tables, sampling);
           }),
           py::kw_only(), py::arg("max_tokens"), py::arg("max_seqs"), py::arg("max_logit_rows"),
           py::arg("max_logprobs"), py::arg("max_copies"), py::arg("block_size"),
           py::arg("block_tables"), py::arg("sampling"), py::keep_alive<1, 8>(),
           py::keep_alive<1, 9>())
      .def_property_readonly("num_tokens", [](const StepBuffer& s) { return s.view().num_tokens; })
      .def_property_readonly("num_seqs", [](const StepBuffer& s) { return s.view().num_seqs; })
      .def_property_readonly("num_logit_rows",
                             [](const StepBuffer& s) { return s.view().num_logit_rows; })
      .def("clear", &StepBuffer::clear)
      .def(
          "add",
          [](StepBuffer& step, const py::object& token_ids, int32_t start, int32_t table_row,
             int32_t sampling_row, const std::string& logits, int32_t adapter, int32_t num_first,
             int32_t num_drafts) {
            const std::vector<int32_t> ids = ids_from_python(token_ids);
            for (const int32_t id : ids) {
              LMI_CHECK(id >= 0 && id < step.view().sampling->vocab_size, "token id ", id, " of ",
                        step.view().sampling->vocab_size);
            }
            return step.add(ids.data(), static_cast<int32_t>(ids.size()), start, table_row,
                            sampling_row, parse_logit_rows(logits), adapter, num_first, num_drafts);
          },
          py::arg("token_ids"), py::arg("start"), py::arg("table_row"), py::arg("sampling_row"),
          py::arg("logits"), py::arg("adapter") = -1, py::arg("num_first") = -1,
          py::arg("num_drafts") = 0)
      .def("add_following", &StepBuffer::add_following, py::arg("starts"), py::arg("rows"),
           py::arg("adapters"))
      .def("set_target", &StepBuffer::set_target, py::arg("logit_row"), py::arg("token_id"))
      .def("add_copy", &StepBuffer::add_copy, py::arg("src_block"), py::arg("dst_block"))
      .def("follow", &StepBuffer::follow, py::arg("previous"), py::arg("logit_rows"))
      .def("take_token", &StepBuffer::take_token, py::arg("token_row"), py::arg("source"),
           py::arg("logit_row"))
      .def("take_tokens", &StepBuffer::take_tokens)
      .def(
          "add_mask",
          [](const py::object& self, int32_t logit_row) {
            const std::span<uint32_t> words = self.cast<StepBuffer&>().add_mask(logit_row);
            return py::array_t<uint32_t>(static_cast<py::ssize_t>(words.size()), words.data(),
                                         self);
          },
          py::arg("logit_row"))
      .def("set_mask_ready", &StepBuffer::set_mask_ready, py::arg("logit_row"))
      .def("set_masks_ready", &StepBuffer::set_masks_ready)
      .def("wait_for_masks", &wait_for_masks)
      .def("sampled",
           [](const StepBuffer& s) {
             return to_list(s.view().sampled_ids, s.view().num_logit_rows);
           })
      .def("logprobs",
           [](const StepBuffer& s) {
             return to_list(s.view().sampled_logprobs, s.view().num_logit_rows);
           })
      .def(
          "logprob",
          [](const StepBuffer& s, int32_t row) {
            LMI_CHECK(row >= 0 && row < s.view().num_logit_rows, "logit row ", row);
            return s.view().sampled_logprobs[row];
          },
          py::arg("logit_row"))
      .def("top", &top_of, py::arg("logit_row"))
      .def_readwrite("error", &StepBuffer::error)
      .def_readwrite("is_final", &StepBuffer::is_final)
      .def_property_readonly("submitted_ns",
                             [](const StepBuffer& s) { return s.times.submitted_ns; })
      .def_property_readonly("started_ns", [](const StepBuffer& s) { return s.times.started_ns; })
      .def_property_readonly("finished_ns", [](const StepBuffer& s) { return s.times.finished_ns; })
      .def_property_readonly(
          "native_ns", [](const StepBuffer& s) { return s.times.finished_ns - s.times.started_ns; })
      .def(
          "set_times",
          [](StepBuffer& s, int64_t submitted_ns, int64_t started_ns, int64_t finished_ns) {
            s.times = {submitted_ns, started_ns, finished_ns};
          },
          py::kw_only(), py::arg("submitted_ns"), py::arg("started_ns"), py::arg("finished_ns"))
      .def("view", &view_array, py::arg("name"))
      .def("set_result", &StepBuffer::set_result, py::arg("logit_row"), py::arg("token_id"),
           py::arg("logprob"), py::arg("top") = std::vector<std::pair<int32_t, float>>());
}

}  // namespace lmi

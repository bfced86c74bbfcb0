// The sampling table.
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <memory>
#include <span>
#include <utility>

#include "bind/arrays.h"
#include "bind/bind.h"
#include "bind/ids.h"
#include "cpu/sampling_row.h"
#include "cpu/watermark.h"
#include "graph/sampling_table.h"

namespace py = pybind11;

namespace lmi {
namespace {

using BiasArray = py::array_t<float, py::array::c_style | py::array::forcecast>;

SamplingRow& checked_row(SamplingTable& table, int32_t row) {
  LMI_CHECK(row >= 0 && row < static_cast<int32_t>(table.rows.size()), "sampling row ", row, " of ",
            table.rows.size());
  return table.rows[row];
}

void check_ids(const SamplingTable& table, std::span<const int32_t> ids) {
  for (const int32_t id : ids) {
    LMI_CHECK(id >= 0 && id < table.vocab_size, "token id ", id, " of ", table.vocab_size);
  }
}

std::vector<int32_t> checked_ids(const SamplingTable& table, const py::object& ids) {
  std::vector<int32_t> result = ids_from_array(ids);
  check_ids(table, result);
  return result;
}

std::vector<int32_t> ascending_ids(const SamplingTable& table, const py::object& ids) {
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
  py::tuple arrays() && {
    return py::make_tuple(array_of(std::move(rows)), array_of(std::move(ids)),
                          array_of(std::move(values)));
  }
};

// What rows change of their logits.
struct RowEdits {
  TokenEdits biases;
  TokenEdits seen;
  TokenEdits bans;
  TokenEdits scales;  // with the factors of logits above 0
  std::vector<float> below;

  void add(size_t row, const cpu::SamplingRowView& view, int32_t vocab_size) {
    for (const auto& [id, bias] : cpu::all_biases(view, vocab_size, order_)) {
      biases.add(row, id, bias);
    }
    for (int64_t k = 0; k < view.num_seen + view.num_drafts; ++k) {
      const SeenToken token = cpu::seen_token(view, k);
      if (token.token_id >= 0) seen.add(row, token.token_id, static_cast<float>(token.num_output));
    }
    for (int64_t k = 0; k < cpu::num_scales(view); ++k) {
      const cpu::TokenScale scale = cpu::token_scale(view, k);
      if (scale.token_id < 0) continue;
      scales.add(row, scale.token_id, scale.above);
      below.push_back(scale.below);
    }
    for (int64_t k = 0; k < view.num_banned_ids; ++k) bans.add(row, view.banned_ids[k], 0.0f);
    for (int64_t k = 0; k < view.num_min_tokens_banned_ids; ++k) {
      bans.add(row, view.min_tokens_banned_ids[k], 0.0f);
    }
  }

 private:
  std::vector<int32_t> order_;
};

// What a sampler in Python needs of these rows, see _native.pyi. Prompts can have millions of
// tokens that rows scale, so that others run meanwhile: nobody changes rows of submitted steps.
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
  RowEdits edits;
  {
    const py::gil_scoped_release release;
    for (size_t i = 0; i < rows.size(); ++i) {
      const std::span<const int32_t> ids =
          drafts.empty() ? std::span<const int32_t>() : std::span<const int32_t>(drafts[i]);
      cpu::SamplingRowView row =
          cpu::view_sampling_row(*rows[i], ids.data(), static_cast<int64_t>(ids.size()),
                                 previous_ids.empty() ? 0 : previous_ids[i]);
      if (previous_ids.empty()) row.watermark_delta = 0.0f;
      edits.add(i, row, table.vocab_size);
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
  result["biases"] = std::move(edits.biases).arrays();
  result["seen"] = std::move(edits.seen).arrays();
  const py::tuple scales = std::move(edits.scales).arrays();
  result["scales"] =
      py::make_tuple(scales[0], scales[1], scales[2], array_of(std::move(edits.below)));
  result["bans"] = std::move(edits.bans).arrays();
  return result;
}

// The last items of a Python sequence.
py::object last_of(const py::object& items, size_t most) {
  const auto first = py::int_(-static_cast<py::ssize_t>(most));
  return items[py::slice(first, py::none(), py::none())];
}

}  // namespace

void bind_sampling(py::module_& m) {
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
  py::class_<LogitBiases, std::shared_ptr<LogitBiases>>(m, "LogitBiases")
      .def(py::init([](const py::object& token_ids, const BiasArray& biases,
                       const std::vector<std::pair<std::vector<int32_t>, float>>& of_sequences) {
             const std::vector<int32_t> ids = ids_from_array(token_ids);
             LMI_CHECK(static_cast<py::ssize_t>(ids.size()) == biases.size(), ids.size(),
                       " ids of ", biases.size(), " biases");
             std::vector<TokenBias> of_tokens;
             for (size_t i = 0; i < ids.size(); ++i)
               of_tokens.emplace_back(ids[i], biases.data()[i]);
             std::vector<SequenceBias> sequences;
             for (const auto& [sequence, bias] : of_sequences)
               sequences.push_back({sequence, bias});
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
             const py::object& banned_ids, int32_t min_tokens,
             const py::object& min_tokens_banned_ids, double watermark_gamma, float watermark_delta,
             std::shared_ptr<LogitBiases> biases, float epsilon_cutoff, float eta_cutoff,
             float prompt_reward, const py::object& prompt_ids, int32_t length_start,
             float length_factor, const py::object& length_ids) {
            if (biases != nullptr) {
              check_ids(table, std::array{biases->min_id(), biases->max_id()});
            }
            SamplingRow row;
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
            checked_row(table, row_id) = std::move(row);
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

}  // namespace lmi

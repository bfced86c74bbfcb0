// The step buffer.
#include <pybind11/stl.h>

#include <algorithm>
#include <span>

#include "bind/arrays.h"
#include "bind/bind.h"
#include "bind/ids.h"
#include "cpu/sampling_row.h"
#include "graph/step_buffer.h"

namespace py = pybind11;

namespace lmi {
namespace {

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

// The place of a row's target, from 1; 0: it has none.
int32_t target_rank(const StepBuffer& step, int32_t logit_row) {
  const StepView& view = step.view();
  LMI_CHECK(logit_row >= 0 && logit_row < view.num_logit_rows, "logit row ", logit_row);
  return view.target_ranks[logit_row];
}

template <typename T>
py::list to_list(const T* data, int32_t count) {
  py::list result(count);
  for (int32_t i = 0; i < count; ++i) result[i] = data[i];
  return result;
}

}  // namespace

void bind_step(py::module_& m) {
  py::class_<StepBuffer>(m, "Step")
      .def(py::init([](int32_t max_tokens, int32_t max_seqs, int32_t max_logit_rows,
                       int32_t max_logprobs, int32_t max_copies, int32_t block_size,
                       const BlockTables& block_tables, SamplingTable& sampling) {
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
      .def("count_token", &StepBuffer::count_token, py::arg("logit_row"))
      .def_property_readonly("counted_rows", &StepBuffer::counted_rows)
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
      .def("target_rank", &target_rank, py::arg("logit_row"))
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
           py::arg("logprob"), py::arg("top") = std::vector<std::pair<int32_t, float>>(),
           py::arg("target_rank") = 0);
}

}  // namespace lmi

// What sequences may go on with.
#include <pybind11/stl.h>

#include "bind/bind.h"
#include "bind/ids.h"
#include "draft/drafter.h"
#include "draft/step_costs.h"

namespace py = pybind11;

namespace lmi {

void bind_draft(py::module_& m) {
  py::class_<TokenIndex, std::shared_ptr<TokenIndex>>(m, "TokenIndex")
      .def(py::init<int64_t, int32_t>(), py::kw_only(), py::arg("max_tokens"),
           py::arg("num_key_tokens"))
      .def(
          "add_text",
          [](TokenIndex& index, const py::object& token_ids) {
            index.append(ids_from_python(token_ids));
            index.end_text();
          },
          py::arg("token_ids"))
      .def("__len__", [](const TokenIndex& index) { return index.end() - index.begin(); });
  py::class_<GuessRates, std::shared_ptr<GuessRates>>(m, "GuessRates")
      .def(py::init<float>(), py::kw_only(), py::arg("memory"));
  py::class_<Drafter>(m, "Drafter")
      .def(py::init([](int64_t max_tokens, int32_t min_match, int32_t max_match,
                       std::shared_ptr<TokenIndex> history, std::shared_ptr<GuessRates> rates) {
             return std::make_unique<Drafter>(max_tokens, min_match, max_match, std::move(history),
                                              std::move(rates));
           }),
           py::kw_only(), py::arg("max_tokens"), py::arg("min_match"), py::arg("max_match"),
           py::arg("history") = nullptr, py::arg("rates") = nullptr)
      .def(
          "start",
          [](Drafter& drafter, const py::object& ids) { drafter.start(ids_from_python(ids)); },
          py::arg("token_ids"))
      .def(
          "extend",
          [](Drafter& drafter, const py::object& ids) { drafter.extend(ids_from_python(ids)); },
          py::arg("token_ids"))
      .def(
          "follow",
          [](Drafter& drafter, const py::sequence& ids) {
            for (auto i = static_cast<size_t>(drafter.num_tokens()); i < ids.size(); ++i) {
              const auto id = ids[i].cast<int32_t>();
              drafter.extend({&id, 1});
            }
            return drafter.has_draft();
          },
          py::arg("text"))
      .def(
          "draft",
          [](const Drafter& drafter, int32_t max_tokens, const py::object& behind) {
            const Draft draft = drafter.draft(max_tokens, ids_from_python(behind));
            return py::make_tuple(ids_to_python(draft.token_ids), draft.chances);
          },
          py::arg("max_tokens"), py::arg("behind") = py::tuple())
      .def("next_chances", &Drafter::next_chances, py::arg("max_tokens"));
  py::class_<StepCosts>(m, "StepCosts")
      .def(py::init<>())
      .def("note", &StepCosts::note, py::arg("num_rows"), py::arg("seconds"))
      .def("note_gap", &StepCosts::note_gap, py::arg("seconds"), py::kw_only(), py::arg("ahead"))
      .def_property_readonly("is_known", &StepCosts::is_known)
      .def("seconds", &StepCosts::seconds, py::arg("num_rows"), py::kw_only(), py::arg("ahead"))
      .def(
          "depths",
          [](const StepCosts& costs, int32_t num_rows, double num_tokens,
             const std::vector<std::vector<float>>& chances, int32_t most,
             bool ahead) { return costs.depths(num_rows, num_tokens, chances, most, ahead); },
          py::arg("num_rows"), py::arg("num_tokens"), py::arg("chances"), py::arg("most"),
          py::kw_only(), py::arg("ahead"))
      .def(
          "common_depth",
          [](const StepCosts& costs, const StepCosts& drafting, const std::vector<float>& chances,
             int32_t num_rows, double num_tokens, int32_t deepest, double extra_s, bool ahead) {
            return costs.common_depth(drafting, chances, num_rows, num_tokens, deepest, extra_s,
                                      ahead);
          },
          py::arg("drafting"), py::arg("chances"), py::arg("num_rows"), py::arg("num_tokens"),
          py::arg("deepest"), py::arg("extra_s"), py::kw_only(), py::arg("ahead"));
}

}  // namespace lmi

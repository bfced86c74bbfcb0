// What sequences may go on with.
#include <pybind11/stl.h>

#include "bind/bind.h"
#include "bind/ids.h"
#include "draft/drafter.h"

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
          [](Drafter& drafter, const py::list& ids) {
            for (auto i = static_cast<size_t>(drafter.num_tokens()); i < ids.size(); ++i) {
              const auto id = ids[i].cast<int32_t>();
              drafter.extend({&id, 1});
            }
            return drafter.has_draft();
          },
          py::arg("text"))
      .def(
          "draft",
          [](const Drafter& drafter, int32_t max_tokens) {
            const Draft draft = drafter.draft(max_tokens);
            return py::make_tuple(ids_to_python(draft.token_ids), draft.chances);
          },
          py::arg("max_tokens"))
      .def_property_readonly("next_chance", &Drafter::next_chance);
}

}  // namespace lmi

// Of step graphs, what heads that draft need: rows that are kept for later steps, and logits of
// some columns.
#include "bind/arrays.h"
#include "bind/bind.h"
#include "bind/py_graph.h"

namespace py = pybind11;

namespace lmi {
namespace {

Handle kept_rows(PyGraph& self, const py::array& table) {
  check_matrix(table, "the table of kept rows");
  self.keep(table);
  return {&self, self.graph.kept_rows(table_args(table, ""))};
}

void keep_rows(PyGraph& self, const Handle& x, py::array& table) {
  check_matrix(table, "the table of kept rows");
  const Value& value = x.value();
  LMI_CHECK(table.shape(1) == value.columns && array_dtype(table) == value.dtype,
            "the table has rows of ", table.shape(1), " ", dtype_name(array_dtype(table)), ", ",
            value.name, " of ", value.columns, " ", dtype_name(value.dtype));
  self.keep(table);
  self.graph.keep_rows(id_of(self, x), static_cast<uint8_t*>(table.mutable_data()));
}

Handle spread_columns(PyGraph& self, const Handle& x,
                      const py::array_t<int32_t, py::array::c_style>& columns,
                      int64_t num_columns) {
  LMI_CHECK(columns.size() == x.value().columns, columns.size(), " columns for ", x.value().name);
  self.keep(columns);
  return {&self, self.graph.spread_columns(id_of(self, x), columns.data(), num_columns)};
}

}  // namespace

void bind_kept_rows(py::class_<PyGraph>& graph) {
  graph.def("kept_rows", &kept_rows, py::arg("table"), py::keep_alive<0, 1>())
      .def("keep_rows", &keep_rows, py::arg("x"), py::arg("table"))
      .def("spread_columns", &spread_columns, py::arg("x"), py::arg("columns"),
           py::arg("num_columns"), py::keep_alive<0, 1>());
}

}  // namespace lmi

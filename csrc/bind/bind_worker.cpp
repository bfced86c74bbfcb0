// What runs step graphs, and places their values.
#include <pybind11/stl.h>

#include <memory>
#include <tuple>
#include <vector>

#include "bind/bind.h"
#include "bind/owned_where_made.h"
#include "bind/py_graph.h"
#include "common/check.h"
#include "graph/arena.h"
#include "graph/worker.h"

namespace py = pybind11;

namespace lmi {
namespace {

// Lifetimes as bytes, first node, last node.
py::tuple place(const std::vector<std::tuple<int64_t, int32_t, int32_t>>& lifetimes) {
  std::vector<ArenaValue> values;
  for (const auto& [num_bytes, first, last] : lifetimes) {
    values.push_back({.num_bytes = num_bytes, .first_node = first, .last_node = last});
  }
  const int64_t num_bytes = assign_offsets(values);
  py::list offsets;
  for (const ArenaValue& value : values) offsets.append(value.offset);
  return py::make_tuple(offsets, num_bytes);
}

}  // namespace

void bind_worker(py::module_& m) {
  m.def("assign_offsets", &place, py::arg("lifetimes"));
  py::class_<Worker, OwnedWhereMade<Worker>>(m, "Worker")
      .def(py::init<int32_t, const Worker*>(), py::arg("num_threads"),
           py::arg("beside") = py::none())
      .def_property_readonly("num_threads", &Worker::num_threads)
      .def(
          "submit",
          [](Worker& worker, PyGraph& graph, StepBuffer& step, int completion_fd) {
            worker.submit(graph.graph, step, completion_fd);
          },
          py::arg("graph"), py::arg("step"), py::arg("completion_fd"))
      .def(
          "run",
          [](Worker& worker, PyGraph& graph, StepBuffer& step) {
            {
              const py::gil_scoped_release release;
              worker.submit(graph.graph, step, -1);
              worker.drain();
            }
            LMI_CHECK(step.error.empty(), step.error);
          },
          py::arg("graph"), py::arg("step"))
      .def("drain", &Worker::drain, py::call_guard<py::gil_scoped_release>())
      .def("close", &Worker::close, py::call_guard<py::gil_scoped_release>());
}

}  // namespace lmi

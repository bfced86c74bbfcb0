// The step graph and its values as Python holds them.
#pragma once

#include <pybind11/numpy.h>

#include <memory>
#include <utility>
#include <vector>

#include "common/check.h"
#include "common/mapped_file.h"
#include "graph/graph.h"
#include "graph/linear_weight.h"

namespace lmi {

namespace py = pybind11;

// A step graph as Python sees it: handles know their graph, and the graph keeps alive every Python
// object whose memory its nodes read.
class PyGraph {
 public:
  explicit PyGraph(const GraphConfig& config) : graph(config) {}

  void keep(py::object object) {
    watch(object);
    kept_.push_back(std::move(object));
  }

  Graph graph;

 private:
  // An array's last base is what its memory belongs to.
  void watch(py::object object) {
    while (py::isinstance<py::array>(object)) object = object.attr("base");
    if (py::isinstance<MappedFile>(object)) {
      graph.watch(object.cast<std::shared_ptr<MappedFile>>());
    } else if (py::isinstance<LinearWeight>(object)) {
      for (const auto& file : object.cast<const LinearWeight&>().files()) graph.watch(file);
    }
  }

  std::vector<py::object> kept_;
};

struct Handle {
  const PyGraph* owner;
  ValueId id;
  const Value& value() const { return owner->graph.value(id); }
};

inline ValueId id_of(const PyGraph& graph, const Handle& handle) {
  LMI_CHECK(handle.owner == &graph, "handle ", handle.value().name, " belongs to another graph");
  return handle.id;
}

// A linear's weights, one or a list of them.
inline std::vector<py::object> weights_of(PyGraph& self, const py::object& weight) {
  const bool is_list = py::isinstance<py::list>(weight);
  auto owners = is_list ? weight.cast<std::vector<py::object>>() : std::vector{weight};
  for (const py::object& owner : owners) self.keep(owner);
  return owners;
}

// What is recorded for heads that draft: rows that later steps read, and columns of a vocabulary.
void bind_kept_rows(py::class_<PyGraph>& graph);

// What the ranks of a group record beside other ops, and the group.
void bind_ranks(py::module_& m, py::class_<PyGraph>& graph);

}  // namespace lmi

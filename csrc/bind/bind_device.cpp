// The worker of a CUDA device.
#include <pybind11/stl.h>

#include "bind/bind.h"
#include "bind/owned_where_made.h"
#include "common/check.h"
#include "graph/device_rank_worker.h"
#include "graph/device_worker.h"

namespace py = pybind11;

namespace lmi {

void bind_device(py::module_& m) {
  py::class_<DeviceWorker, OwnedWhereMade<DeviceWorker>>(m, "DeviceWorker")
      .def(py::init([](const std::string& library, uintptr_t step_list, RankGroup* group) {
             LMI_CHECK(step_list != 0, "there is no step list");
             return OwnedWhereMade<DeviceWorker>(new DeviceWorker(
                 open_step_functions(library), reinterpret_cast<LmiStepList*>(step_list), group));
           }),
           py::arg("library"), py::arg("step_list"), py::arg("group") = nullptr,
           py::keep_alive<1, 4>())
      .def("submit", &DeviceWorker::submit, py::arg("step"), py::arg("completion_fd"))
      .def(
          "run",
          [](DeviceWorker& worker, StepBuffer& step) {
            {
              const py::gil_scoped_release release;
              worker.submit(step, -1);
              worker.drain();
            }
            LMI_CHECK(step.error.empty(), step.error);
          },
          py::arg("step"))
      .def_property_readonly("capture_error", &DeviceWorker::capture_error)
      .def("drain", &DeviceWorker::drain, py::call_guard<py::gil_scoped_release>())
      .def("close", &DeviceWorker::close, py::call_guard<py::gil_scoped_release>());
  m.def(
      "serve_device_rank",
      [](RankGroup& group, const std::string& library, uintptr_t step_list) {
        const py::gil_scoped_release release;
        serve_device_rank(group, library, reinterpret_cast<LmiStepList*>(step_list));
      },
      py::arg("group"), py::arg("library"), py::arg("step_list"));
}

}  // namespace lmi

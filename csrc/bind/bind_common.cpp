// Errors, facts about the machine, mapped files.
#include <pybind11/numpy.h>

#include <memory>

#include "bind/bind.h"
#include "common/check.h"
#include "common/cpu_info.h"
#include "common/mapped_file.h"
#include "cpu/kernels.h"
#include "cpu/unbuilt_levels.h"

namespace py = pybind11;

namespace lmi {
namespace {

py::dict cpu_info_to_python() {
  const CpuInfo info = CpuInfo::detect();
  py::list flags;
  for (const std::string& flag : info.flags) flags.append(flag);
  py::dict caches;
  caches["l1d"] = info.l1d_bytes;
  caches["l2"] = info.l2_bytes;
  caches["l3"] = info.l3_bytes;
  py::dict result;
  result["model"] = info.model;
  result["flags"] = flags;
  result["num_logical_cores"] = info.num_logical_cores;
  result["num_physical_cores"] = info.num_physical_cores;
  result["cache_bytes"] = caches;
  result["memory_bytes"] = info.memory_bytes;
  result["memory_limit_bytes"] = info.memory_limit_bytes;
  return result;
}

py::array mapped_array(const py::object& self, int64_t offset, int64_t num_bytes) {
  const uint8_t* data = self.cast<const MappedFile&>().data(offset, num_bytes);
  py::array_t<uint8_t> array(num_bytes, data, self);  // self as base keeps the mapping alive
  array.attr("setflags")(py::arg("write") = false);
  return array;
}

void bind_mapped_file(py::module_& m) {
  py::class_<MappedFile, std::shared_ptr<MappedFile>>(m, "MappedFile")
      .def(py::init<const std::string&, bool>(), py::arg("path"), py::arg("huge_pages") = false)
      .def_property_readonly("size", &MappedFile::size)
      .def_property_readonly("is_lost", &MappedFile::is_lost)
      .def("array", &mapped_array, py::arg("offset"), py::arg("num_bytes"))
      .def("drop", &MappedFile::drop, py::arg("offset"), py::arg("num_bytes"));
}

py::list names_of(const std::vector<cpu::InstructionSet>& levels) {
  py::list names;
  for (const auto level : levels) names.append(cpu::instruction_set_name(level));
  return names;
}

}  // namespace

void bind_common(py::module_& m) {
  py::register_exception<Error>(m, "NativeError", PyExc_RuntimeError);
  m.def("instruction_sets", [] { return names_of(cpu::available_instruction_sets()); });
  m.def("unbuilt_instruction_sets", [] { return names_of(cpu::unbuilt_instruction_sets()); });
  m.def("default_instruction_set",
        [] { return cpu::instruction_set_name(cpu::default_instruction_set()); });
  m.def("num_physical_cores", [] { return CpuInfo::detect().num_physical_cores; });
  m.def("cpu_info", &cpu_info_to_python);
  bind_mapped_file(m);
}

}  // namespace lmi

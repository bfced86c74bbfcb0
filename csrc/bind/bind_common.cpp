// Errors and facts about the machine.
#include "bind/bind.h"
#include "common/check.h"
#include "common/cpu_info.h"

namespace py = pybind11;

namespace lmi {

void bind_common(py::module_& m) {
  py::register_exception<Error>(m, "NativeError", PyExc_RuntimeError);
  m.def("num_physical_cores", [] { return CpuInfo::detect().num_physical_cores; });
  m.def("cpu_info", [] {
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
  });
}

}  // namespace lmi

// One bind function per folder of csrc/, called by module.cpp.
#pragma once

#include <pybind11/pybind11.h>

namespace lmi {

void bind_common(pybind11::module_& m);
void bind_cpu(pybind11::module_& m);
void bind_cpu_bench(pybind11::module_& kernels);
void bind_cpu_paged(pybind11::module_& m);
void bind_kv(pybind11::module_& m);
void bind_sampling(pybind11::module_& m);
void bind_step(pybind11::module_& m);
void bind_weight(pybind11::module_& m);
void bind_graph(pybind11::module_& m);
void bind_worker(pybind11::module_& m);
void bind_lora(pybind11::module_& m);
void bind_draft(pybind11::module_& m);
void bind_device(pybind11::module_& m);

}  // namespace lmi

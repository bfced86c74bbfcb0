// The Python extension lmi_core._native; its surface is described in lmi_core/_native.pyi.
#include "bind/bind.h"

PYBIND11_MODULE(_native, m) {
  lmi::bind_common(m);
  lmi::bind_cpu(m);
  lmi::bind_cpu_paged(m);
  lmi::bind_kv(m);
  lmi::bind_sampling(m);
  lmi::bind_step(m);
  lmi::bind_weight(m);
  lmi::bind_lora(m);
  lmi::bind_graph(m);
  lmi::bind_worker(m);
  lmi::bind_device(m);
  lmi::bind_draft(m);
}

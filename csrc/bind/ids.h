// Lists of ids between Python and C++, without pybind11's per-element casters.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "common/check.h"

namespace lmi {

// Any sequence of ints; raises TypeError for other things, Error for values beyond 32 bits.
inline std::vector<int32_t> ids_from_python(pybind11::handle ids) {
  const auto items = pybind11::reinterpret_steal<pybind11::object>(
      PySequence_Fast(ids.ptr(), "expected a sequence of ints"));
  if (!items) throw pybind11::error_already_set();
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(items.ptr());
  std::vector<int32_t> result(size);
  for (Py_ssize_t i = 0; i < size; ++i) {
    const int64_t value = PyLong_AsLongLong(PySequence_Fast_GET_ITEM(items.ptr(), i));
    if (value == -1 && PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
    LMI_CHECK(value >= std::numeric_limits<int32_t>::min() &&
                  value <= std::numeric_limits<int32_t>::max(),
              "the id ", value, " doesn't fit 32 bits");
    result[i] = static_cast<int32_t>(value);
  }
  return result;
}

// An array of integers, which is copied at once, or any sequence of ints; raises as
// ids_from_python, and Error for arrays of anything else.
inline std::vector<int32_t> ids_from_array(const pybind11::object& ids) {
  namespace py = pybind11;
  if (!py::isinstance<py::array>(ids)) return ids_from_python(ids);
  const auto array = py::reinterpret_borrow<py::array>(ids);
  const char kind = array.dtype().kind();
  LMI_CHECK((kind == 'i' || kind == 'u') && array.ndim() == 1, "ids are an array of integers, not ",
            std::string(py::str(array.dtype())), " of ", array.ndim(), " dimensions");
  if (py::array_t<int32_t, py::array::c_style>::check_(ids)) {
    const auto* data = static_cast<const int32_t*>(array.data());
    return {data, data + array.size()};
  }
  return ids_from_python(array.attr("tolist")());
}

inline pybind11::list ids_to_python(std::span<const int32_t> ids) {
  pybind11::list result(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    PyList_SET_ITEM(result.ptr(), static_cast<Py_ssize_t>(i), PyLong_FromLong(ids[i]));
  }
  return result;
}

}  // namespace lmi

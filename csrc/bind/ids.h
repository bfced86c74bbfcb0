// Lists of ids between Python and C++, without pybind11's per-element casters.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/check.h"

namespace lmi {

// Of an array of C ints, Python's or NumPy's; false: it is something else.
inline bool copy_ints(pybind11::handle ids, std::vector<int32_t>& result) {
  Py_buffer view;
  if (PyObject_CheckBuffer(ids.ptr()) == 0) return false;
  if (PyObject_GetBuffer(ids.ptr(), &view, PyBUF_FORMAT | PyBUF_ND) != 0) {
    PyErr_Clear();
    return false;
  }
  static_assert(sizeof(int) == sizeof(int32_t));
  const bool is_ints = view.ndim == 1 && std::string_view(view.format) == "i";
  if (is_ints) {
    const auto* data = static_cast<const int32_t*>(view.buf);
    result.assign(data, data + view.shape[0]);
  }
  PyBuffer_Release(&view);
  return is_ints;
}

// Any sequence of ints; raises TypeError for other things, Error for values beyond 32 bits.
inline std::vector<int32_t> ids_from_python(pybind11::handle ids) {
  if (std::vector<int32_t> copied; copy_ints(ids, copied)) return copied;
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
  if (std::vector<int32_t> copied; copy_ints(ids, copied)) return copied;
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

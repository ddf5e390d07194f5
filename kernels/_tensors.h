// What C++ asks a tensor: its TensorImpl, whether it is plain, and how its elements lie.
#pragma once
#include <Python.h>

#include <ATen/core/TensorBase.h>
#include <cstdint>
#include <cstring>
#include <exception>
#include <vector>

namespace {

// Runs code that may throw as torch does. An exception becomes an error of Python.
template <class Ask>
PyObject* answer(Ask ask) {
  try {
    return ask();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

PyTypeObject* tensor_type = nullptr;
PyTypeObject* parameter_type = nullptr;
Py_ssize_t offset = 0;  // of the pointer to the TensorImpl, in a tensor's object

// prepare(a plain tensor, the address of its TensorImpl, type of parameters): True if the pointer
// to the TensorImpl was found exactly once in the tensor's object.
PyObject* prepare(PyObject*, PyObject* args) {
  PyObject *tensor = nullptr, *parameter = nullptr;
  unsigned long long address = 0;
  if (!PyArg_ParseTuple(args, "OKO", &tensor, &address, &parameter)) return nullptr;
  int found = 0;
  for (Py_ssize_t at = sizeof(PyObject); at + 8 <= Py_TYPE(tensor)->tp_basicsize; at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, reinterpret_cast<char*>(tensor) + at, sizeof word);
    if (word == address) {
      offset = at;
      found++;
    }
  }
  tensor_type = Py_TYPE(tensor);
  parameter_type = reinterpret_cast<PyTypeObject*>(parameter);
  return PyBool_FromLong(found == 1);
}

at::TensorImpl* impl_of(PyObject* tensor) {
  return *reinterpret_cast<at::TensorImpl**>(reinterpret_cast<char*>(tensor) + offset);
}

// Exact types: a subclass may answer differently than the tensor that it holds, so Python asks it.
bool is_plain(PyObject* tensor) {
  return Py_TYPE(tensor) == tensor_type || Py_TYPE(tensor) == parameter_type;
}

int64_t address_of(at::TensorImpl* impl) {
  // mutable_data, because kernels write: memory that is copied on write is copied here
  return reinterpret_cast<int64_t>(impl->mutable_data());
}

// Device, dtype, number of dimensions and contiguity, in one number.
inline int64_t kind_of(const at::TensorImpl* impl, size_t dim, bool contiguous) {
  return static_cast<int64_t>(impl->dtype().toScalarType()) << 32 |
         static_cast<int64_t>(impl->device().index() + 1) << 16 | static_cast<int64_t>(dim) << 1 |
         static_cast<int64_t>(contiguous);
}

// Appends everything about a tensor's layout. Returns false if the tensor is not dense.
bool describe(const at::TensorImpl* impl, std::vector<int64_t>& words) {
  if (!impl->has_storage()) return false;
  const auto sizes = impl->sizes();
  const bool contiguous = impl->is_contiguous();
  words.push_back(static_cast<int64_t>(impl->key_set().raw_repr()));  // device, negation bit
  words.push_back(kind_of(impl, sizes.size(), contiguous));
  for (const int64_t size : sizes) words.push_back(size);
  // Contiguous strides follow from the sizes, and are left out because most tensors have them.
  if (!contiguous) {
    for (const int64_t stride : impl->strides()) words.push_back(stride);
  }
  return true;
}

// Tells whether `describe` would append the words at `at`, and moves `at` past them if so.
inline bool is_like(const at::TensorImpl* impl, int64_t*& at) {
  int64_t* words = at;
  // The keys first, because nothing below runs Python code if they are those of a plain tensor.
  if (*words++ != static_cast<int64_t>(impl->key_set().raw_repr())) return false;
  const auto sizes = impl->sizes();
  const bool contiguous = impl->is_contiguous();
  if (*words++ != kind_of(impl, sizes.size(), contiguous)) return false;
  for (const int64_t size : sizes) {
    if (*words++ != size) return false;
  }
  if (!contiguous) {
    for (const int64_t stride : impl->strides()) {
      if (*words++ != stride) return false;
    }
  }
  at = words;
  return true;
}

}  // namespace

// Answers to the questions of _facts.py about many tensors, in one call each. Every function takes
// a list and returns None if it holds anything but plain tensors and parameters: then Python
// answers.
#define PY_SSIZE_T_CLEAN
#include "_steady.h"

#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <string>

#include "_block.h"

// declared here, because torch/csrc/autograd/python_variable.h takes twenty seconds to compile
PyObject* THPVariable_Wrap(const at::TensorBase& tensor);

namespace {

// Calls take(tensor, i) for each tensor of a list. Returns false at anything else.
template <class Take>
bool each(PyObject* list, Take take) {
  const Py_ssize_t count = PyList_GET_SIZE(list);
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject* item = PyList_GET_ITEM(list, i);
    if (!is_plain(item)) return false;
    take(item, i);
  }
  return true;
}

template <class Ask>
PyObject* answer_for(PyObject* list, Ask ask) {
  if (!PyList_CheckExact(list)) Py_RETURN_NONE;
  return answer(ask);
}

// Returns bytes with a 64-bit number for each tensor.
template <class Number>
PyObject* numbers(PyObject* list, Number number) {
  return answer_for(list, [&]() -> PyObject* {
    std::string found(PyList_GET_SIZE(list) * sizeof(uint64_t), '\0');
    auto* out = reinterpret_cast<uint64_t*>(found.data());
    if (!each(list, [&](PyObject* tensor, Py_ssize_t i) { out[i] = number(tensor); }))
      Py_RETURN_NONE;
    return PyBytes_FromStringAndSize(found.data(), found.size());
  });
}

PyObject* addresses(PyObject*, PyObject* list) {
  return numbers(list, [](PyObject* tensor) {
    return static_cast<uint64_t>(address_of(impl_of(tensor)));
  });
}

PyObject* versions(PyObject*, PyObject* list) {
  return numbers(list, [](PyObject* tensor) {
    return static_cast<uint64_t>(impl_of(tensor)->version_counter().current_version());
  });
}

// note_versions(list, buffer of 64-bit numbers, start, stop): writes the versions of these tensors
// to the same places of the buffer. Returns None, and writes nothing, if any is not plain.
PyObject* note_versions(PyObject*, PyObject* args) {
  PyObject* list = nullptr;
  Py_buffer numbers;
  Py_ssize_t start = 0, stop = 0;
  if (!PyArg_ParseTuple(args, "O!w*nn", &PyList_Type, &list, &numbers, &start, &stop))
    return nullptr;
  auto* out = static_cast<uint64_t*>(numbers.buf);
  bool plain = 0 <= start && stop <= PyList_GET_SIZE(list) && stop * 8 <= numbers.len;
  for (Py_ssize_t i = start; plain && i < stop; i++) plain = is_plain(PyList_GET_ITEM(list, i));
  for (Py_ssize_t i = start; plain && i < stop; i++)
    out[i] = impl_of(PyList_GET_ITEM(list, i))->version_counter().current_version();
  PyBuffer_Release(&numbers);
  return Py_NewRef(plain ? Py_True : Py_None);
}

// Whether this thread records gradients, without autocast, transforms, dispatch modes or tracing.
bool is_plain_thread() {
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  return c10::GradMode::is_enabled() && keys.included_ == c10::default_included_set &&
         keys.excluded_ == c10::default_excluded_set;
}

// leaf_versions(tuple): the versions of tensors that are part of no graph, and whether any is on a
// GPU. None if there is anything else, or the thread is not plain.
PyObject* leaf_versions(PyObject*, PyObject* values) {
  if (!PyTuple_CheckExact(values) || !is_plain_thread()) Py_RETURN_NONE;
  return answer([&]() -> PyObject* {
    const Py_ssize_t count = PyTuple_GET_SIZE(values);
    bool on_gpu = false;
    for (Py_ssize_t i = 0; i < count; i++) {
      PyObject* value = PyTuple_GET_ITEM(values, i);
      if (!is_plain(value) || impl_of(value)->is_inference()) Py_RETURN_NONE;
      const auto& tensor =
          *reinterpret_cast<at::TensorBase*>(reinterpret_cast<char*>(value) + offset);
      // a view may be part of a graph since its base was written to
      if (tensor.requires_grad() && (!tensor.is_leaf() || tensor.is_view())) Py_RETURN_NONE;
      on_gpu = on_gpu || tensor.is_cuda();
    }
    PyObject* versions = PyList_New(count);
    if (versions == nullptr) return nullptr;
    for (Py_ssize_t i = 0; i < count; i++) {
      const auto& counter = impl_of(PyTuple_GET_ITEM(values, i))->version_counter();
      PyList_SET_ITEM(versions, i, PyLong_FromLong(counter.current_version()));
    }
    return Py_BuildValue("NO", versions, on_gpu ? Py_True : Py_False);
  });
}

// facts([lists]): the layout and the addresses of the elements, 64 bits each, as in _facts.py.
PyObject* facts(PyObject*, PyObject* lists) {
  return answer_for(lists, [&]() -> PyObject* {
    static std::vector<int64_t> kind, pointers;  // reused by the next call; the GIL protects them
    kind.clear();
    pointers.clear();
    PyObject* first = PyList_GET_SIZE(lists) ? PyList_GET_ITEM(lists, 0) : nullptr;
    for (Py_ssize_t k = 0; k < PyList_GET_SIZE(lists); k++) {
      PyObject* list = PyList_GET_ITEM(lists, k);
      if (!PyList_CheckExact(list) || PyList_GET_SIZE(list) != PyList_GET_SIZE(first))
        Py_RETURN_NONE;
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
        PyObject* tensor = PyList_GET_ITEM(list, i);
        if (!is_plain(tensor)) Py_RETURN_NONE;
        at::TensorImpl* impl = impl_of(tensor);
        pointers.push_back(address_of(impl));
        // A tensor of the first list has been described there.
        if (k > 0 && tensor == PyList_GET_ITEM(first, i))
          kind.push_back(-1);
        else if (!describe(impl, kind))
          Py_RETURN_NONE;
      }
    }
    return Py_BuildValue(
        "y#y#", kind.data(), static_cast<Py_ssize_t>(kind.size() * 8), pointers.data(),
        static_cast<Py_ssize_t>(pointers.size() * 8));
  });
}

// Returns True if all tensors are dense.
PyObject* dense(PyObject*, PyObject* list) {
  return answer_for(list, [&]() -> PyObject* {
    bool strided = true;
    const bool plain = each(list, [&](PyObject* tensor, Py_ssize_t) {
      strided = strided && impl_of(tensor)->layout() == at::kStrided;
    });
    if (!plain || !strided) Py_RETURN_NONE;
    Py_RETURN_TRUE;
  });
}

PyObject* grads(PyObject*, PyObject* list) {
  return answer_for(list, [&]() -> PyObject* {
    // An unset slot of a list that PyList_New returned is null, so the list can be dropped
    // half-way.
    PyObject* found = PyList_New(PyList_GET_SIZE(list));
    if (found == nullptr) return nullptr;
    const bool plain = each(list, [&](PyObject* tensor, Py_ssize_t i) {
      const at::Tensor& grad = impl_of(tensor)->grad();
      PyList_SET_ITEM(found, i, THPVariable_Wrap(reinterpret_cast<const at::TensorBase&>(grad)));
    });
    if (plain) return found;
    Py_DECREF(found);
    Py_RETURN_NONE;
  });
}

PyObject* count_write(PyObject*, PyObject* list) {
  return answer_for(list, [&]() -> PyObject* {
    // Checked before the first write, because Python would count the writes again.
    if (!each(list, [](PyObject*, Py_ssize_t) {})) Py_RETURN_NONE;
    each(list, [](PyObject* tensor, Py_ssize_t) { impl_of(tensor)->bump_version(); });
    Py_RETURN_TRUE;
  });
}

PyMethodDef methods[] = {
    {"addresses", addresses, METH_O, ""},
    {"versions", versions, METH_O, ""},
    {"note_versions", note_versions, METH_VARARGS, ""},
    {"leaf_versions", leaf_versions, METH_O, ""},
    {"facts", facts, METH_O, ""},
    {"dense", dense, METH_O, ""},
    {"grads", grads, METH_O, ""},
    {"count_write", count_write, METH_O, ""},
    {"prepare", prepare, METH_VARARGS, ""},
    {"steady_record", steady_record, METH_VARARGS, ""},
    {"steady_same", steady_same, METH_O, ""},
    {"steady_same_gradients", steady_same_gradients, METH_O, ""},
    {"steady_sent_gradients", steady_sent_gradients, METH_O, ""},
    {"steady_sent_hyperparameters", steady_sent_hyperparameters, METH_O, ""},
    {"steady_untouched", steady_untouched, METH_O, ""},
    {"steady_wrote", steady_wrote, METH_O, ""},
    {"run_under", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(run_under)), METH_FASTCALL,
     ""},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_tritonamp", "", -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit__tritonamp() { return PyModule_Create(&module); }

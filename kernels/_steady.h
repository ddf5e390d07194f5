// The steady value of _steady.py: what one step touched, and the questions of the next step.
#pragma once
#include "_optimizer.h"

#include <exception>
#include <memory>

namespace {

// The gradients of one step, by row. A gradient that has moved keeps a plan valid: its new address
// is written to the slots of its row, numbers in main memory from which kernels take it.
class Gradients {
 public:
  void record(PyObject* holders, PyObject* slots, const Kept& kept) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(holders); i++) {
      Row row{PyTuple_GET_ITEM(holders, i)};
      kept.identity(row.holder);
      if (!is_plain(row.holder)) throw NotPlain{};
      hints_.add(row.holder, impl_of(row.holder));
      const at::Tensor& grad = impl_of(row.holder)->grad();
      if (at::TensorImpl* impl = impl_of_grad(grad)) {
        if (!is_plain_grad(impl) || !describe(impl, words_)) throw NotPlain{};
        row.exists = true;
        row.address = address_of(impl);
        record_slots(PyTuple_GET_ITEM(slots, i), row);
      }
      rows_.push_back(row);
    }
  }

  // Returns the number of gradients that have moved, whose slots then hold their new addresses; or
  // -1 if a gradient is unlike. Then no slot has changed.
  long moved() {
    int64_t* words = words_.data();
    const Hints::Parts* hints = hints_.first();
    long moved = 0;
    for (Row& row : rows_) {
      Hints::fetch(hints);
      if (!is_plain(row.holder)) return -1;
      at::TensorImpl* impl = impl_of_grad(impl_of(row.holder)->grad());
      if ((impl != nullptr) != row.exists) return -1;
      if (impl == nullptr) continue;
      if (!is_plain_grad(impl) || !is_like(impl, words)) return -1;
      row.found = address_of(impl);
      // kernels load vectors where they were compiled for aligned addresses
      if ((row.found ^ row.address) & 15) return -1;
      moved += row.found != row.address;
    }
    if (moved) write_slots();
    return moved;
  }

  bool exists(size_t row) const { return rows_[row].exists; }

 private:
  struct Row {
    PyObject* holder;
    bool exists = false;
    int64_t address = 0;  // as the slots have it
    int64_t found = 0;    // by the question that is being answered
    std::vector<int64_t*> slots = {};
  };

  static at::TensorImpl* impl_of_grad(const at::Tensor& grad) {
    const auto& base = reinterpret_cast<const at::TensorBase&>(grad);
    return base.defined() ? base.unsafeGetTensorImpl() : nullptr;
  }

  // A gradient that Python has not seen yet has no object.
  static bool is_plain_grad(at::TensorImpl* impl) {
    PyObject* object = impl->pyobj_slot()->load_pyobj();
    return object == nullptr || is_plain(object);
  }

  static void record_slots(PyObject* addresses, Row& row) {
    if (!PyTuple_Check(addresses)) {
      PyErr_SetString(PyExc_TypeError, "slots: expected a tuple of addresses for each row");
      throw Raised{};
    }
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(addresses); k++) {
      void* slot = PyLong_AsVoidPtr(PyTuple_GET_ITEM(addresses, k));
      if (PyErr_Occurred()) throw Raised{};
      row.slots.push_back(static_cast<int64_t*>(slot));
    }
  }

  void write_slots() {
    for (Row& row : rows_) {
      if (row.found == row.address) continue;
      row.address = row.found;
      for (int64_t* slot : row.slots) *slot = row.address;
    }
  }

  std::vector<Row> rows_;
  Words words_;
  Hints hints_;
};

// The other tensors of a step. Versions of parameters and masters say whether other code has
// written to them since the step.
class Tensors {
 public:
  void record(PyObject* tensor, const Kept& kept) {
    words_.push_back(kept.identity(tensor));
    record_tensor(tensor, words_, hints_);
    count_++;
  }

  // is_written: whether the step writes to the tensor.
  void record_versioned(PyObject* tensor, bool is_param, bool is_written, const Kept& kept) {
    record(tensor, kept);
    versions_.push_back({tensor, version_of(tensor), is_param, is_written});
  }

  bool same() {
    int64_t* words = words_.data();
    const Hints::Parts* hints = hints_.first();
    for (size_t i = 0; i < count_; i++) {
      PyObject* tensor = reinterpret_cast<PyObject*>(*words++);
      if (!same_tensor(tensor, words, hints)) return false;
    }
    for (const Version& known : versions_) {
      if (version_of(known.tensor) != known.version) return false;
    }
    return true;
  }

  bool params_untouched() const {
    for (const Version& known : versions_) {
      if (known.is_param && version_of(known.tensor) != known.version) return false;
    }
    return true;
  }

  void wrote() {
    for (Version& known : versions_) {
      if (!known.is_written) continue;
      impl_of(known.tensor)->bump_version();
      known.version = version_of(known.tensor);
    }
  }

 private:
  struct Version {
    PyObject* tensor;
    uint32_t version;
    bool is_param, is_written;
  };

  static uint32_t version_of(PyObject* tensor) {
    return impl_of(tensor)->version_counter().current_version();
  }

  size_t count_ = 0;
  Words words_;
  Hints hints_;
  std::vector<Version> versions_;
};

struct Steady {
  Groups groups;
  State state;
  Gradients gradients;
  Tensors tensors;
  bool changed = false;  // hyperparameters, since `same` has last answered

  // attributes: of the optimizer. The others are tuples. Rows are parameters, in the order of the
  // groups.
  void record(PyObject* attributes, PyObject* keys, PyObject* holders, PyObject* params,
              PyObject* fixed, PyObject* slots, const Kept& kept) {
    kept.identity(attributes);
    groups.record(attributes, keys, kept);
    const auto rows = static_cast<Py_ssize_t>(groups.masters.size());
    if (PyTuple_GET_SIZE(holders) != rows || PyTuple_GET_SIZE(params) != rows ||
        PyTuple_GET_SIZE(slots) != rows) {
      PyErr_SetString(PyExc_ValueError, "expected a holder, a parameter and slots for each row");
      throw Raised{};
    }
    gradients.record(holders, slots, kept);
    std::unordered_set<PyObject*> taking_part;
    for (Py_ssize_t i = 0; i < rows; i++) {
      PyObject *master = groups.masters[i], *param = PyTuple_GET_ITEM(params, i);
      const bool takes_part = gradients.exists(i);
      if (takes_part) taking_part.insert(master);
      tensors.record_versioned(param, true, takes_part, kept);
      if (master != param) tensors.record_versioned(master, false, takes_part, kept);
    }
    state.record(attributes, taking_part, kept);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(fixed); i++)
      tensors.record(PyTuple_GET_ITEM(fixed, i), kept);
  }

  // -1: something is unlike. Bit 0: hyperparameters have changed. Bit 1: gradients have moved.
  long same() {
    // gradients last, because their slots change only if everything is alike
    if (!groups.same(changed) || !state.same() || !tensors.same()) return -1;
    const long moved = gradients.moved();
    if (moved < 0) return -1;
    const long answer = (changed ? 1 : 0) | (moved ? 2 : 0);
    changed = false;
    return answer;
  }
};

// What Python calls.

const char* const kCapsule = "tritonamp.steady";

// Runs code that may throw as torch does. An exception becomes an error of Python.
template <class Ask>
PyObject* answer_steady(PyObject* capsule, Ask ask) {
  auto* steady = static_cast<Steady*>(PyCapsule_GetPointer(capsule, kCapsule));
  if (steady == nullptr) return nullptr;
  try {
    return ask(*steady);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

// Returns the value in a capsule, and the list of objects that live as long; None: not plain.
PyObject* steady_record(PyObject*, PyObject* args) {
  PyObject *attributes, *keys, *holders, *params, *fixed, *slots;
  if (!PyArg_ParseTuple(args, "O!O!O!O!O!O!", &PyDict_Type, &attributes, &PyTuple_Type, &keys,
                        &PyTuple_Type, &holders, &PyTuple_Type, &params, &PyTuple_Type, &fixed,
                        &PyTuple_Type, &slots))
    return nullptr;
  PyObject* list = PyList_New(0);
  if (list == nullptr) return nullptr;
  auto steady = std::make_unique<Steady>();
  try {
    steady->record(attributes, keys, holders, params, fixed, slots, Kept{list});
    PyObject* capsule = PyCapsule_New(steady.get(), kCapsule, [](PyObject* it) {
      delete static_cast<Steady*>(PyCapsule_GetPointer(it, kCapsule));
    });
    if (capsule == nullptr) throw Raised{};
    steady.release();
    return Py_BuildValue("NN", capsule, list);
  } catch (const NotPlain&) {
    Py_DECREF(list);
    Py_RETURN_NONE;
  } catch (const Raised&) {
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  Py_DECREF(list);
  return nullptr;
}

PyObject* steady_same(PyObject*, PyObject* capsule) {
  return answer_steady(capsule, [](Steady& s) { return PyLong_FromLong(s.same()); });
}

PyObject* steady_same_gradients(PyObject*, PyObject* capsule) {
  return answer_steady(capsule, [](Steady& s) { return PyLong_FromLong(s.gradients.moved()); });
}

PyObject* steady_untouched(PyObject*, PyObject* capsule) {
  return answer_steady(
      capsule, [](Steady& s) { return PyBool_FromLong(s.tensors.params_untouched()); });
}

PyObject* steady_wrote(PyObject*, PyObject* capsule) {
  return answer_steady(capsule, [](Steady& s) {
    s.tensors.wrote();
    return Py_NewRef(Py_None);
  });
}

}  // namespace

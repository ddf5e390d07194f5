// The steady value of _steady.py: what one step touched, and the questions of the next step.
#pragma once
#include "_optimizer.h"
#include "_step_tensors.h"

#include <memory>

namespace {

struct Steady {
  Groups groups;
  State state;
  Gradients gradients;
  Tensors tensors;
  bool changed = false;  // hyperparameters, since the caller has last sent them

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
    return moved < 0 ? -1 : (changed ? 1 : 0) | (moved ? 2 : 0);
  }
};

// What Python calls.

const char* const kCapsule = "tritonamp.steady";

template <class Ask>
PyObject* ask_steady(PyObject* capsule, Ask ask) {
  auto* steady = static_cast<Steady*>(PyCapsule_GetPointer(capsule, kCapsule));
  if (steady == nullptr) return nullptr;
  return answer([&]() -> PyObject* { return ask(*steady); });
}

// Returns a capsule with the value, or a null pointer with Python's error.
PyObject* in_capsule(std::unique_ptr<Steady> steady) {
  PyObject* capsule = PyCapsule_New(steady.get(), kCapsule, [](PyObject* it) {
    delete static_cast<Steady*>(PyCapsule_GetPointer(it, kCapsule));
  });
  if (capsule != nullptr) steady.release();  // the capsule owns it now
  return capsule;
}

// Returns the value in a capsule, and the list of objects that must live as long; None: not plain.
PyObject* steady_record(PyObject*, PyObject* args) {
  PyObject *attributes, *keys, *holders, *params, *fixed, *slots;
  if (!PyArg_ParseTuple(args, "O!O!O!O!O!O!", &PyDict_Type, &attributes, &PyTuple_Type, &keys,
                        &PyTuple_Type, &holders, &PyTuple_Type, &params, &PyTuple_Type, &fixed,
                        &PyTuple_Type, &slots))
    return nullptr;
  PyObject* list = PyList_New(0);
  if (list == nullptr) return nullptr;
  PyObject* found = answer([&]() -> PyObject* {
    try {
      auto steady = std::make_unique<Steady>();
      steady->record(attributes, keys, holders, params, fixed, slots, Kept{list});
      PyObject* capsule = in_capsule(std::move(steady));
      return capsule == nullptr ? nullptr : Py_BuildValue("NO", capsule, list);
    } catch (const NotPlain&) {
      Py_RETURN_NONE;
    } catch (const Raised&) {
      return nullptr;
    }
  });
  Py_DECREF(list);  // the result holds it now
  return found;
}

PyObject* steady_same(PyObject*, PyObject* capsule) {
  return ask_steady(capsule, [](Steady& s) { return PyLong_FromLong(s.same()); });
}

PyObject* steady_same_gradients(PyObject*, PyObject* capsule) {
  return ask_steady(capsule, [](Steady& s) { return PyLong_FromLong(s.gradients.moved()); });
}

PyObject* steady_sent_gradients(PyObject*, PyObject* capsule) {
  return ask_steady(capsule, [](Steady& s) {
    s.gradients.sent();
    return Py_NewRef(Py_None);
  });
}

PyObject* steady_sent_hyperparameters(PyObject*, PyObject* capsule) {
  return ask_steady(capsule, [](Steady& s) {
    s.changed = false;
    return Py_NewRef(Py_None);
  });
}

PyObject* steady_untouched(PyObject*, PyObject* capsule) {
  return ask_steady(capsule, [](Steady& s) { return PyBool_FromLong(s.tensors.untouched()); });
}

PyObject* steady_wrote(PyObject*, PyObject* capsule) {
  return ask_steady(capsule, [](Steady& s) {
    s.tensors.wrote();
    return Py_NewRef(Py_None);
  });
}

}  // namespace

// What a step reads of an optimizer: its groups and its state.
#pragma once
#include "_recorded.h"

#include <unordered_set>

namespace {

// An attribute of an optimizer, which load_state_dict replaces by another object.
class Attribute {
 public:
  PyObject* record(PyObject* attributes, const char* name, const Kept& kept) {
    attributes_ = attributes;
    name_ = PyUnicode_InternFromString(name);
    if (name_ == nullptr) throw Raised{};
    kept.identity(name_);
    Py_DECREF(name_);  // the list holds it now
    PyObject* value = now();
    if (value == nullptr) throw NotPlain{};
    return value;
  }

  // Returns a borrowed reference; null: the optimizer has no such attribute.
  PyObject* now() const { return PyDict_GetItem(attributes_, name_); }

 private:
  PyObject *attributes_ = nullptr, *name_ = nullptr;
};

// The groups of an optimizer: their dictionaries entry by entry, and their parameters. Keys are
// walked in order, which is a third of the time that looking them up takes.
class Groups {
 public:
  void record(PyObject* attributes, PyObject* keys, const Kept& kept) {
    PyObject* groups = attribute_.record(attributes, "param_groups", kept);
    if (!PyList_CheckExact(groups)) throw NotPlain{};
    words_.insert(words_.end(), {kept.identity(groups), PyList_GET_SIZE(groups)});
    for (Py_ssize_t g = 0; g < PyList_GET_SIZE(groups); g++)
      record_group(PyList_GET_ITEM(groups, g), keys, kept);
  }

  bool same(bool& changed) {
    PyObject* groups = attribute_.now();
    int64_t* words = words_.data();
    if (*words++ != word_of(groups) || *words++ != PyList_GET_SIZE(groups)) return false;
    for (Py_ssize_t g = 0; g < PyList_GET_SIZE(groups); g++) {
      if (!same_group(PyList_GET_ITEM(groups, g), words, changed)) return false;
    }
    changed |= changes_in_place_;
    return true;
  }

  std::vector<PyObject*> masters;  // parameters of all groups

 private:
  enum Entry : int64_t { kOther, kHyperparameter, kParameters };

  void record_group(PyObject* group, PyObject* keys, const Kept& kept) {
    if (!PyDict_CheckExact(group)) throw NotPlain{};
    words_.insert(words_.end(), {kept.identity(group), PyDict_GET_SIZE(group)});
    PyObject *key, *value;
    for (Py_ssize_t at = 0; PyDict_Next(group, &at, &key, &value);) {
      words_.push_back(kept.identity(key));
      const int is_read = PySequence_Contains(keys, key);
      if (is_read < 0) throw Raised{};
      if (is_read) {
        words_.push_back(kHyperparameter);
        if (!record_value(value, words_, kept)) changes_in_place_ = true;
      } else if (PyUnicode_Check(key) && PyUnicode_CompareWithASCIIString(key, "params") == 0) {
        words_.push_back(kParameters);
        record_parameters(value, kept);
      } else {
        words_.push_back(kOther);
      }
    }
  }

  void record_parameters(PyObject* params, const Kept& kept) {
    if (!PyList_CheckExact(params)) throw NotPlain{};
    words_.insert(words_.end(), {kept.identity(params), PyList_GET_SIZE(params)});
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(params); i++) {
      masters.push_back(PyList_GET_ITEM(params, i));
      words_.push_back(kept.identity(masters.back()));
    }
  }

  static bool same_group(PyObject* group, int64_t*& words, bool& changed) {
    if (*words++ != word_of(group) || *words++ != PyDict_GET_SIZE(group)) return false;
    PyObject *key, *value;
    for (Py_ssize_t at = 0; PyDict_Next(group, &at, &key, &value);) {
      if (*words++ != word_of(key)) return false;
      const int64_t entry = *words++;
      if (entry == kHyperparameter && !same_value(value, words, &changed)) return false;
      if (entry == kParameters && !same_parameters(value, words)) return false;
    }
    return true;
  }

  static bool same_parameters(PyObject* params, int64_t*& words) {
    if (*words++ != word_of(params) || *words++ != PyList_GET_SIZE(params)) return false;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(params); i++) {
      if (*words++ != word_of(PyList_GET_ITEM(params, i))) return false;
    }
    return true;
  }

  Attribute attribute_;
  Words words_;
  bool changes_in_place_ = false;  // a hyperparameter that is a tensor or a list
};

// The state of an optimizer: the sequence of its entries, and what the step took from them. It is
// walked, not looked up, because the hash of a tensor is Python code. All its dictionaries are
// compared by their entries alone. They are not kept alive, because they hold its tensors.
class State {
 public:
  // taking_part: the masters whose own state is recorded.
  void record(PyObject* attributes, const std::unordered_set<PyObject*>& taking_part,
              const Kept& kept) {
    PyObject* state = attribute_.record(attributes, "state", kept);
    if (!PyDict_Check(state)) throw NotPlain{};
    words_.push_back(PyDict_GET_SIZE(state));
    PyObject *master, *values;
    for (Py_ssize_t at = 0; PyDict_Next(state, &at, &master, &values);) {
      words_.push_back(kept.identity(master));
      if (!taking_part.count(master)) {
        words_.push_back(-1);
        continue;
      }
      if (!PyDict_CheckExact(values)) throw NotPlain{};
      words_.push_back(PyDict_GET_SIZE(values));
      record_values(values, kept);
    }
  }

  bool same() {
    PyObject* state = attribute_.now();
    int64_t* words = words_.data();
    const Hints::Parts* hints = hints_.first();
    if (state == nullptr || !PyDict_Check(state)) return false;
    if (*words++ != PyDict_GET_SIZE(state)) return false;
    PyObject *master, *values;
    for (Py_ssize_t at = 0; PyDict_Next(state, &at, &master, &values);) {
      if (*words++ != word_of(master)) return false;
      const int64_t size = *words++;
      if (size < 0) continue;
      if (!PyDict_CheckExact(values) || size != PyDict_GET_SIZE(values)) return false;
      if (!same_values(values, words, hints)) return false;
    }
    return true;
  }

 private:
  void record_values(PyObject* values, const Kept& kept) {
    PyObject *key, *value;
    for (Py_ssize_t at = 0; PyDict_Next(values, &at, &key, &value);) {
      words_.push_back(kept.identity(key));
      if (is_plain(value)) {
        words_.push_back(kTensor);
        record_tensor(value, words_, hints_);
      } else if (!record_value(value, words_, kept)) {
        throw NotPlain{};
      }
    }
  }

  static bool same_values(PyObject* values, int64_t*& words, const Hints::Parts*& hints) {
    PyObject *key, *value;
    for (Py_ssize_t at = 0; PyDict_Next(values, &at, &key, &value);) {
      if (*words++ != word_of(key)) return false;
      const bool is_tensor = *words == kTensor;
      if (is_tensor ? !same_tensor(value, ++words, hints) : !same_value(value, words, nullptr))
        return false;
    }
    return true;
  }

  static constexpr int64_t kTensor = 0;  // where other values have the address of their type

  Attribute attribute_;
  Words words_;
  Hints hints_;
};

}  // namespace

// What a step reads of an optimizer: its groups and its state, recorded as rows of numbers that
// the next step walks. Walking runs no Python code and allocates nothing.
#pragma once
#include "_tensors.h"

#include <unordered_set>

namespace {

using Words = std::vector<int64_t>;

struct NotPlain {};  // thrown where something cannot be compared: there is no steady value
struct Raised {};    // thrown where Python's error is set

int64_t word_of(const void* pointer) { return reinterpret_cast<int64_t>(pointer); }

// Objects that are compared by identity, and therefore have to stay alive.
struct Kept {
  PyObject* list;

  int64_t identity(PyObject* object) const {
    if (PyList_Append(list, object) < 0) throw Raised{};
    return word_of(object);
  }
};

// Values of groups and of state. Floats, ints, and tuples are recorded as numbers: an equal one in
// another object is the same. Others are recorded by identity.

// Returns false if the value holds an object that could change in place.
bool record_value(PyObject* value, Words& words, const Kept& kept) {
  words.push_back(kept.identity(reinterpret_cast<PyObject*>(Py_TYPE(value))));
  if (PyFloat_Check(value)) {
    const double number = PyFloat_AS_DOUBLE(value);
    words.emplace_back();
    std::memcpy(&words.back(), &number, sizeof number);
    return true;
  }
  if (PyLong_CheckExact(value)) {
    int overflow = 0;
    words.push_back(PyLong_AsLongLongAndOverflow(value, &overflow));
    if (overflow) throw NotPlain{};
    return true;
  }
  if (PyTuple_CheckExact(value)) {
    bool fixed = true;
    words.push_back(PyTuple_GET_SIZE(value));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); i++)
      fixed &= record_value(PyTuple_GET_ITEM(value, i), words, kept);
    return fixed;
  }
  words.push_back(kept.identity(value));
  return value == Py_None || PyBool_Check(value) || PyUnicode_CheckExact(value);
}

// A float that became another one is the same if `another_float` is given, which becomes true. The
// new float is then the recorded one.
bool same_value(PyObject* value, int64_t*& words, bool* another_float) {
  if (*words++ != word_of(Py_TYPE(value))) return false;
  if (PyFloat_Check(value)) {
    const double number = PyFloat_AS_DOUBLE(value);
    int64_t& recorded = *words++;
    if (std::memcmp(&recorded, &number, sizeof number) == 0) return true;
    if (another_float == nullptr) return false;
    std::memcpy(&recorded, &number, sizeof number);
    return *another_float = true;
  }
  if (PyLong_CheckExact(value)) {
    int overflow = 0;
    return *words++ == PyLong_AsLongLongAndOverflow(value, &overflow) && !overflow;
  }
  if (PyTuple_CheckExact(value)) {
    if (*words++ != PyTuple_GET_SIZE(value)) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); i++) {
      if (!same_value(PyTuple_GET_ITEM(value, i), words, another_float)) return false;
    }
    return true;
  }
  return *words++ == word_of(value);
}

// Tensors with the address of their elements.

void record_tensor(PyObject* tensor, Words& words) {
  if (!is_plain(tensor) || !describe(impl_of(tensor), words)) throw NotPlain{};
  words.push_back(address_of(impl_of(tensor)));
}

bool same_tensor(PyObject* tensor, int64_t*& words) {
  return is_plain(tensor) && is_like(impl_of(tensor), words) &&
         *words++ == address_of(impl_of(tensor));
}

// An attribute of an optimizer, which load_state_dict replaces by another object.
class Attribute {
 public:
  PyObject* record(PyObject* attributes, const char* name, const Kept& kept) {
    attributes_ = attributes;
    name_ = PyUnicode_InternFromString(name);
    if (name_ == nullptr) throw Raised{};
    kept.identity(name_);
    Py_DECREF(name_);  // the list holds it now
    value_ = PyDict_GetItem(attributes_, name_);
    if (value_ == nullptr) throw NotPlain{};
    kept.identity(value_);
    return value_;
  }

  // Returns the object, or a null pointer if the attribute is another one now.
  PyObject* same() const {
    return PyDict_GetItem(attributes_, name_) == value_ ? value_ : nullptr;
  }

 private:
  PyObject *attributes_ = nullptr, *name_ = nullptr, *value_ = nullptr;
};

// The groups of an optimizer: their dictionaries entry by entry, and their parameters. Keys are
// walked in order, which is a third of the time that looking them up takes.
class Groups {
 public:
  void record(PyObject* attributes, PyObject* keys, const Kept& kept) {
    PyObject* groups = attribute_.record(attributes, "param_groups", kept);
    if (!PyList_CheckExact(groups)) throw NotPlain{};
    words_.push_back(PyList_GET_SIZE(groups));
    for (Py_ssize_t g = 0; g < PyList_GET_SIZE(groups); g++)
      record_group(PyList_GET_ITEM(groups, g), keys, kept);
  }

  bool same(bool& changed) {
    PyObject* groups = attribute_.same();
    int64_t* words = words_.data();
    if (groups == nullptr || *words++ != PyList_GET_SIZE(groups)) return false;
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
// walked, not looked up, because the hash of a tensor is Python code.
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
      words_.insert(words_.end(), {kept.identity(master), kept.identity(values)});
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
    PyObject* state = attribute_.same();
    int64_t* words = words_.data();
    if (state == nullptr || *words++ != PyDict_GET_SIZE(state)) return false;
    PyObject *master, *values;
    for (Py_ssize_t at = 0; PyDict_Next(state, &at, &master, &values);) {
      if (*words++ != word_of(master) || *words++ != word_of(values)) return false;
      const int64_t size = *words++;
      if (size < 0) continue;
      if (size != PyDict_GET_SIZE(values) || !same_values(values, words)) return false;
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
        record_tensor(value, words_);
      } else if (!record_value(value, words_, kept)) {
        throw NotPlain{};
      }
    }
  }

  static bool same_values(PyObject* values, int64_t*& words) {
    PyObject *key, *value;
    for (Py_ssize_t at = 0; PyDict_Next(values, &at, &key, &value);) {
      if (*words++ != word_of(key)) return false;
      const bool is_tensor = *words == kTensor;
      if (is_tensor ? !same_tensor(value, ++words) : !same_value(value, words, nullptr))
        return false;
    }
    return true;
  }

  static constexpr int64_t kTensor = 0;  // where other values have the address of their type

  Attribute attribute_;
  Words words_;
};

}  // namespace

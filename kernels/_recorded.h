// How objects and tensors are recorded as rows of 64-bit words, and compared with them later.
// Comparing runs no Python code and allocates nothing.
#pragma once
#include "_tensors.h"

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

// Floats, ints, and tuples of them are recorded as numbers: an equal one in another object is the
// same. Other objects are recorded by identity.

int64_t bits_of(PyObject* number) {
  const double value = PyFloat_AS_DOUBLE(number);
  int64_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Returns false if the value holds an object that could change in place.
bool record_value(PyObject* value, Words& words, const Kept& kept) {
  words.push_back(kept.identity(reinterpret_cast<PyObject*>(Py_TYPE(value))));
  if (PyFloat_Check(value)) {
    words.push_back(bits_of(value));
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

bool same_tuple(PyObject* tuple, int64_t*& words, bool* another_float);

// Moves `words` past a value that is the same. A float that became another one is the same if
// `another_float` is given, which becomes true. The new float is then the recorded one.
inline bool same_value(PyObject* value, int64_t*& words, bool* another_float) {
  if (*words++ != word_of(Py_TYPE(value))) return false;
  if (PyFloat_Check(value)) {
    int64_t& recorded = *words++;
    const int64_t bits = bits_of(value);
    if (bits == recorded) return true;
    if (another_float == nullptr) return false;
    recorded = bits;
    return *another_float = true;
  }
  if (PyLong_CheckExact(value)) {
    int overflow = 0;
    return *words++ == PyLong_AsLongLongAndOverflow(value, &overflow) && !overflow;
  }
  if (PyTuple_CheckExact(value)) return same_tuple(value, words, another_float);
  return *words++ == word_of(value);
}

bool same_tuple(PyObject* tuple, int64_t*& words, bool* another_float) {
  const Py_ssize_t size = PyTuple_GET_SIZE(tuple);
  if (*words++ != size) return false;
  for (Py_ssize_t i = 0; i < size; i++) {
    if (!same_value(PyTuple_GET_ITEM(tuple, i), words, another_float)) return false;
  }
  return true;
}

// Where the parts of tensors were, in the order in which a walk takes them. Forward and backward
// have emptied the caches, so a walk fetches the parts of later tensors in advance, which halves
// its time. A fetch of an address that is out of date does no harm.
class Hints {
 public:
  void add(PyObject* object, const at::TensorImpl* impl) {
    const void* storage = impl->unsafe_storage().unsafeGetStorageImpl();
    parts_.insert(parts_.end() - kAhead, {object, impl, storage});
  }

  struct Parts {
    const void *object = nullptr, *impl = nullptr, *storage = nullptr;
  };

  // One step of a walk, which began at `first`.
  static void fetch(const Parts*& at) {
    const Parts& later = at++[kAhead];
    __builtin_prefetch(later.object);
    for (size_t i = 0; i < sizeof(at::TensorImpl); i += 64)
      __builtin_prefetch(static_cast<const char*>(later.impl) + i);
    __builtin_prefetch(later.storage);
  }

  const Parts* first() const { return parts_.data(); }

 private:
  static constexpr int kAhead = 8;  // tensors

  std::vector<Parts> parts_ = std::vector<Parts>(kAhead);  // empty ones follow the last tensor
};

// Tensors with the address of their elements.

void record_tensor(PyObject* tensor, Words& words, Hints& hints) {
  if (!is_plain(tensor) || !describe(impl_of(tensor), words)) throw NotPlain{};
  words.push_back(address_of(impl_of(tensor)));
  hints.add(tensor, impl_of(tensor));
}

inline bool same_tensor(PyObject* tensor, int64_t*& words, const Hints::Parts*& hints) {
  Hints::fetch(hints);
  return is_plain(tensor) && is_like(impl_of(tensor), words) &&
         *words++ == address_of(impl_of(tensor));
}

}  // namespace

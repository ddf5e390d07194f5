// What a step touches besides its optimizer: gradients, and tensors that stay where they are.
#pragma once
#include "_recorded.h"

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

  // Returns how often gradients have moved since `sent`; their slots hold the new addresses. Or
  // returns -1 if a gradient is unlike. Then no slot has changed.
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
    return unsent_ += moved;
  }

  void sent() { unsent_ = 0; }

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
  long unsent_ = 0;  // moves of gradients whose addresses are in the slots alone
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

  // Tells whether the versions of the model's parameters are the recorded ones.
  bool untouched() const {
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

}  // namespace

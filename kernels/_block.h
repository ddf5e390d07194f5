// The block of an enabled forward: one call of a function under a policy and torch's autocast.
// casts/context.py has the same in Python, in twenty times the time.
#pragma once

#include <Python.h>
#include <c10/core/AutogradState.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>

#include "_tensors.h"

// declared here, because ATen/autocast_mode.h takes ten seconds to compile
namespace at::autocast {
bool is_autocast_enabled(at::DeviceType device);
void set_autocast_enabled(at::DeviceType device, bool enabled);
at::ScalarType get_autocast_dtype(at::DeviceType device);
void set_autocast_dtype(at::DeviceType device, at::ScalarType dtype);
bool is_autocast_cache_enabled();
void set_autocast_cache_enabled(bool enabled);
void clear_cache();
int increment_nesting();
int decrement_nesting();
}  // namespace at::autocast

namespace {

namespace autocast = at::autocast;

// The state of a thread. The destructor restores it, whatever the function has raised or left open.
class ThreadState {
 public:
  ThreadState(PyObject* stack, at::DeviceType device)
      : stack(stack),
        device(device),
        dtype(autocast::get_autocast_dtype(device)),
        enabled(autocast::is_autocast_enabled(device)),
        cache(autocast::is_autocast_cache_enabled()),
        threads(autograd().get_multithreading_enabled()),
        depth(PyList_GET_SIZE(stack)),
        nesting(autocast::increment_nesting() - 1) {}  // last, because the others may throw

  ThreadState(const ThreadState&) = delete;

  ~ThreadState() {
    PyObject *type, *value, *traceback;  // calls of Python expect that no error is set
    PyErr_Fetch(&type, &value, &traceback);
    PyList_SetSlice(stack, depth, PY_SSIZE_T_MAX, nullptr);
    if (depth == 0) autograd().set_multithreading_enabled(threads);
    autocast::set_autocast_enabled(device, enabled);
    autocast::set_autocast_dtype(device, dtype);
    autocast::set_autocast_cache_enabled(cache);
    int now;
    while ((now = autocast::decrement_nesting()) > nesting) {  // blocks inside were not left
    }
    if (now < nesting) autocast::increment_nesting();
    if (nesting == 0) autocast::clear_cache();
    PyErr_Restore(type, value, traceback);
  }

  // Makes the thread follow a policy. Returns false, with an error of Python, if it cannot.
  bool follow(PyObject* policy, at::ScalarType new_dtype, bool new_cache) {
    if (PyList_Append(stack, policy) != 0) return false;
    // autograd would run the backward of a GPU in a thread of its own, which has no policy
    if (device != at::kCPU) autograd().set_multithreading_enabled(false);
    autocast::set_autocast_enabled(device, true);
    autocast::set_autocast_dtype(device, new_dtype);
    autocast::set_autocast_cache_enabled(new_cache);
    return true;
  }

 private:
  static c10::AutogradState& autograd() { return c10::AutogradState::get_tls_state(); }

  PyObject* const stack;  // the thread's list of policies, owned by casts/active.py
  const at::DeviceType device;
  const at::ScalarType dtype;
  const bool enabled, cache, threads;
  const Py_ssize_t depth;
  const int nesting;
};

// run_under(stack, (item for the stack, device, dtype, whether autocast caches), function, args,
// kwargs): the result of function(*args, **kwargs).
PyObject* run_under(PyObject*, PyObject* const* given, Py_ssize_t count) {
  PyObject *item, *device, *dtype, *cache;
  if (count != 5 || !PyList_CheckExact(given[0]) || !PyTuple_CheckExact(given[3]) ||
      !PyDict_CheckExact(given[4])) {
    PyErr_SetString(PyExc_TypeError, "run_under: expected a list, two tuples and a dict");
    return nullptr;
  }
  if (!PyArg_ParseTuple(given[1], "OO!O!O", &item, &THPDeviceType, &device, &THPDtypeType, &dtype,
                        &cache))
    return nullptr;
  return answer([&]() -> PyObject* {
    ThreadState state(given[0], reinterpret_cast<THPDevice*>(device)->device.type());
    const auto type = reinterpret_cast<THPDtype*>(dtype)->scalar_type;
    if (!state.follow(item, type, cache == Py_True)) return nullptr;
    return PyObject_Call(given[2], given[3], PyDict_GET_SIZE(given[4]) ? given[4] : nullptr);
  });
}

}  // namespace

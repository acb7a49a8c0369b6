// The interpreter's lock and its errors: lets other Python threads run while this one waits in C++.
#pragma once

#include <Python.h>

namespace simulated {

// Gives up the interpreter's lock if the calling thread holds it. Declared before any lock of ours is taken, so that it is
// taken back after the lock is given up: no thread may want the interpreter's lock while it holds one of ours.
class WithoutGil {
 public:
  WithoutGil() : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (state_) PyEval_RestoreThread(state_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

inline void forget_python_error() {
  auto state = PyGILState_Ensure();
  PyErr_Clear();
  PyGILState_Release(state);
}

}  // namespace simulated

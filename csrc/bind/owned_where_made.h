// Ownership of objects with threads, which a child of fork() doesn't have.
#pragma once

#include <unistd.h>

#include <memory>

namespace lmi {

// The child has a copy of the object, for whose threads closing would wait.
template <typename T>
struct DeleteWhereMade {
  pid_t process_id = getpid();
  void operator()(T* object) const {
    if (getpid() == process_id) delete object;
  }
};

template <typename T>
using OwnedWhereMade = std::unique_ptr<T, DeleteWhereMade<T>>;

}  // namespace lmi

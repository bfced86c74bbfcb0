// Threads that take no signals.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace lmi {

// While it lives, threads that this thread starts have all signals blocked: signals are for the
// threads of the embedding program. Those that a thread causes itself come to it, though: blocked,
// they would end the process without asking any handler.
class SignalBlock {
 public:
  SignalBlock() {
    sigset_t all;
    sigfillset(&all);
    for (const int own : {SIGBUS, SIGSEGV, SIGFPE, SIGILL}) sigdelset(&all, own);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalBlock() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalBlock(const SignalBlock&) = delete;
  SignalBlock& operator=(const SignalBlock&) = delete;

 private:
  sigset_t before_;
};

}  // namespace lmi

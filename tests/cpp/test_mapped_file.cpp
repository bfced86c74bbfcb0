#include "common/mapped_file.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <thread>

#include "check.h"
#include "common/signal_block.h"

namespace lmi {
namespace {

class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& text) {
    const int file = mkstemp(path_);
    EXPECT(file >= 0 && write(file, text.data(), text.size()) == static_cast<ssize_t>(text.size()));
    close(file);
  }
  ~TemporaryFile() { unlink(path_); }
  std::string path() const { return path_; }

 private:
  char path_[32] = "/tmp/lmi-test-XXXXXX";
};

TEST(mapped_file_shows_the_file) {
  const TemporaryFile file("some text");
  const MappedFile mapped(file.path());
  EXPECT_EQ(mapped.size(), 9);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(mapped.data(5, 4)), 4), std::string("text"));
  mapped.drop(0, 9);  // dropped pages are read again
  EXPECT_EQ(mapped.data(0, 9)[0], 's');
}

TEST(mapped_file_checks_ranges) {
  const TemporaryFile file("some text");
  const MappedFile mapped(file.path());
  EXPECT_EQ(mapped.data(9, 0), mapped.data(0, 0) + 9);
  EXPECT_ERROR(mapped.data(5, 5), "5 bytes at 5 are not in " + file.path() + " of 9 bytes");
  EXPECT_ERROR(mapped.data(-1, 2), "2 bytes at -1");
  EXPECT_ERROR(mapped.data(0, INT64_MAX), "are not in");
  EXPECT_ERROR(mapped.data(INT64_MAX, 1), "are not in");
}

TEST(mapped_file_says_why_it_cannot_map) {
  EXPECT_ERROR(MappedFile("/nonexistent/file"), "can't open /nonexistent/file: No such file");
  EXPECT_ERROR(MappedFile("/tmp"), "/tmp is not a regular file");
  const TemporaryFile file("");
  const std::string pipe = file.path() + ".pipe";
  EXPECT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_ERROR(MappedFile(pipe, false), pipe + " is not a regular file");
  unlink(pipe.c_str());
  const TemporaryFile empty("");
  EXPECT_EQ(MappedFile(empty.path()).size(), 0);
}

TEST(mapped_file_reads_zeros_where_it_was_truncated) {
  const std::string text(3 * 4096, 'x');
  const TemporaryFile file(text);
  const TemporaryFile other(text);
  const MappedFile mapped(file.path());
  const MappedFile whole(other.path());
  EXPECT_EQ(truncate(file.path().c_str(), 4096), 0);
  EXPECT(!mapped.is_lost());
  EXPECT_EQ(mapped.data(0, 1)[0], 'x');
  EXPECT(!mapped.is_lost());
  // In a thread as the worker's, which takes no signals of others.
  int sum = 0;
  {
    const SignalBlock no_signals;
    std::thread([&] {
      for (int i = 4096; i < 3 * 4096; ++i) sum += mapped.data(i, 1)[0];
    }).join();
  }
  EXPECT_EQ(sum, 0);
  EXPECT(mapped.is_lost());
  EXPECT(!whole.is_lost());
  EXPECT_EQ(whole.data(2 * 4096, 1)[0], 'x');
}

TEST(mapped_file_leaves_other_bus_errors_to_others) {
  const TemporaryFile file(std::string(4096, 'x'));
  const MappedFile mapped(file.path());  // the handler is there
  const int descriptor = open(file.path().c_str(), O_RDONLY);
  void* own = mmap(nullptr, 8192, PROT_READ, MAP_PRIVATE, descriptor, 0);
  close(descriptor);
  const pid_t child = fork();
  if (child == 0) {
    struct rlimit none{};
    setrlimit(RLIMIT_CORE, &none);
    _exit(static_cast<volatile uint8_t*>(own)[4096]);
  }
  int status = 0;
  waitpid(child, &status, 0);
  munmap(own, 8192);
  // A sanitizer's own handler exits with an error; zeros that were read would exit without one.
  EXPECT(WIFSIGNALED(status) ? WTERMSIG(status) == SIGBUS : WEXITSTATUS(status) != 0);
}

}  // namespace
}  // namespace lmi

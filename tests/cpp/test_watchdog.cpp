#include "watchdog.h"

#include <sys/wait.h>

#include <array>
#include <string>

#include "check.h"

TEST(watchdog_names_the_test_that_hangs) {
  std::array<int, 2> ends{};
  EXPECT_EQ(pipe(ends.data()), 0);
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDOUT_FILENO);
    const lmi::test::Watchdog watchdog("some_test", 1);
    while (true) pause();
  }
  close(ends[1]);
  std::array<char, 64> said{};
  const ssize_t count = read(ends[0], said.data(), said.size());
  std::string text(said.data(), count > 0 ? static_cast<size_t>(count) : 0);
  for (ssize_t more = 1; more > 0;) {
    more = read(ends[0], said.data(), said.size());
    if (more > 0) text.append(said.data(), static_cast<size_t>(more));
  }
  close(ends[0]);
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 3, status);
  EXPECT_EQ(text, std::string("HUNG some_test\n"));
}

TEST(watchdog_leaves_a_test_that_ends) {
  {
    const lmi::test::Watchdog watchdog("this", 1);
  }
  EXPECT_EQ(alarm(0), 0U);
}

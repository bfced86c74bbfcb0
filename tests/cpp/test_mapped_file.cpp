#include "common/mapped_file.h"

#include <stdlib.h>
#include <unistd.h>

#include <string>

#include "check.h"

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
  const TemporaryFile empty("");
  EXPECT_EQ(MappedFile(empty.path()).size(), 0);
}

}  // namespace
}  // namespace lmi

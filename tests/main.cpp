// main() of every test program. A skipped test shows in ctest: exit code 77, or a failure where the data were promised.
#include <gtest/gtest.h>

#include <cstdio>
#include <string_view>

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (RUN_ALL_TESTS() != 0) {
    return 1;
  }
  const testing::UnitTest& unit = *testing::UnitTest::GetInstance();
  bool skipped = false;
  bool data_missing = false;
  for (int s = 0; s < unit.total_test_suite_count(); ++s) {
    const testing::TestSuite& suite = *unit.GetTestSuite(s);
    for (int t = 0; t < suite.total_test_count(); ++t) {
      const testing::TestInfo& test = *suite.GetTestInfo(t);
      for (int p = 0; p < test.result()->total_part_count(); ++p) {
        const testing::TestPartResult& part = test.result()->GetTestPartResult(p);
        if (part.skipped()) {
          std::printf("skipped %s.%s: %s\n", suite.name(), test.name(), part.message());
          skipped = true;
          data_missing |= std::string_view(part.message()).find("TURBOQUANT_DATA_DIR") != std::string_view::npos;
        }
      }
    }
  }
#ifdef TURBOQUANT_REQUIRE_DATA
  if (data_missing) {
    std::puts("TURBOQUANT_REQUIRE_DATA is on: a test that misses its data fails");
    return 1;
  }
#endif
  static_cast<void>(data_missing);
  return skipped ? 77 : 0;
}

// Status: default, fields, comparison with a code, names.
#include <turboquant/core/status.hpp>

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <type_traits>

namespace tq = turboquant;

TEST(Status, DefaultIsOkAndNamesNothing) {
  const tq::Status status;
  EXPECT_TRUE(status == tq::Status::ok);
  EXPECT_FALSE(status == tq::Status::bad_shape);
  EXPECT_STREQ(status.field, "");
  EXPECT_EQ(status.expected, 0);
  EXPECT_EQ(status.found, 0);
}

TEST(Status, CarriesFieldAndNumbersAndComparesByCodeAlone) {
  constexpr tq::Status kStatus(tq::Status::bad_shape, "keys.dim", 128, -3);
  EXPECT_TRUE(kStatus == tq::Status::bad_shape);
  EXPECT_TRUE(tq::Status::bad_shape == kStatus);
  EXPECT_TRUE(kStatus != tq::Status::ok);
  EXPECT_STREQ(kStatus.field, "keys.dim");
  EXPECT_EQ(kStatus.expected, 128);
  EXPECT_EQ(kStatus.found, -3);
}

TEST(Status, IsCheapToReturn) {
  EXPECT_TRUE(std::is_trivially_copyable_v<tq::Status>);
  EXPECT_TRUE(std::is_trivially_destructible_v<tq::Status>);
}

TEST(Status, EveryCodeHasANameOfItsOwn) {
  EXPECT_STREQ(tq::to_string(tq::Status::ok), "ok");
  EXPECT_STREQ(tq::to_string(tq::Status::behind_window), "behind_window");
  EXPECT_STREQ(tq::to_string(tq::Status::io_error), "io_error");
  std::set<std::string> names;
  for (int code = tq::Status::ok; code <= tq::Status::io_error; ++code) {
    const std::string name = tq::to_string(tq::Status::Code(code));
    EXPECT_NE(name, "unknown code") << code;
    EXPECT_TRUE(names.insert(name).second) << name;
  }
  EXPECT_EQ(names.size(), 10u);
  EXPECT_STREQ(tq::to_string(tq::Status::Code(tq::Status::io_error + 1)), "unknown code");
}

TEST(Status, NposIsTheLargestSize) { EXPECT_EQ(tq::npos + 1, 0u); }

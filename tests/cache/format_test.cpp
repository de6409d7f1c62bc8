// Format ids are frozen: files carry them.
#include <turboquant/cache/format.hpp>

#include <gtest/gtest.h>

namespace {

using namespace turboquant;

TEST(Format, IdsAreFrozen) {
  EXPECT_EQ(PolarQuant<1>::id, 0x0101);
  EXPECT_EQ(PolarQuant<8>::id, 0x0108);
  EXPECT_EQ(ScalarQuant<4>::id, 0x0204);
  EXPECT_EQ(TrellisQuant<2>::id, 0x0302);
  EXPECT_EQ(TrellisQuant<3>::id, 0x0303);
  EXPECT_EQ(TrellisQuant<4>::id, 0x0304);
  EXPECT_EQ(TQ2::id, 0x03020302u);
  EXPECT_EQ(TQ3::id, 0x03030303u);
  EXPECT_EQ(TQ4::id, 0x01040104u);
  EXPECT_EQ(TQ8::id, 0x01080108u);
  EXPECT_EQ((Format<PolarQuant<4>, ScalarQuant<3>>::id), 0x01040203u);
}

}  // namespace

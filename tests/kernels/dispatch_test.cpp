// The choice of kernels against what the system says of the CPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <set>
#include <sstream>
#include <string>

#include "formats/formats.hpp"

namespace {

using namespace turboquant;

#if !defined(TURBOQUANT_EMULATED)

/// The feature names of the first CPU in /proc/cpuinfo; empty where there is none.
std::set<std::string> cpu_features() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (!line.starts_with("flags") && !line.starts_with("Features")) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    return {std::istream_iterator<std::string>(words), {}};
  }
  return {};
}

// (An emulated program would read of another CPU.)
TEST(Dispatch, TakesTheBestKernelsOfThisCpu) {
  const std::set<std::string> features = cpu_features();
  if (features.empty()) GTEST_SKIP() << "this system does not describe its CPU in /proc/cpuinfo";
  const auto has = [&](std::initializer_list<const char*> names) {
    return std::all_of(names.begin(), names.end(), [&](const char* name) { return features.contains(name); });
  };
  Isa expected = Isa::portable;
  const auto take = [&](Isa isa, std::initializer_list<const char*> needs) {
    if (is_built(isa) && has(needs)) expected = isa;  // TURBOQUANT_ISA leaves out all but one
  };
  take(Isa::avx2, {"avx2"});
  take(Isa::avx512, {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512vbmi"});
  take(Isa::neon, {"asimddp"});
  EXPECT_STREQ(to_string(best_isa()), to_string(expected));
}

#endif

TEST(Dispatch, TheBestIsBuiltAndSupportedAndThePortableOneAlways) {
  EXPECT_TRUE(is_built(best_isa()));
  EXPECT_TRUE(is_supported(best_isa()));
  EXPECT_TRUE(is_built(Isa::portable));
  EXPECT_TRUE(is_supported(Isa::portable));
  for (const Isa isa : {Isa::portable, Isa::avx2, Isa::avx512, Isa::neon}) {
    EXPECT_LE(is_supported(isa), is_built(isa)) << to_string(isa);
  }
}

TEST(Dispatch, AnIsaThatIsMissingGetsPortableKernels) {
  for (const Isa isa : {Isa::avx2, Isa::avx512, Isa::neon}) {
    if (is_supported(isa)) continue;
    EXPECT_EQ(tests::find_operations(TQ4::id, isa), tests::find_operations(TQ4::id, Isa::portable)) << to_string(isa);
  }
}

}  // namespace

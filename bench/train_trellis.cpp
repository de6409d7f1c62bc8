// Trains the 24 constants of TrellisQuant<B> and compares them with those that codec/trellis_quant.hpp holds.
//
//   train_trellis [--bits B] [--seeds N]     trains, prints the constants; fails if they differ from the frozen ones
//   train_trellis --check                    only measures the frozen constants
//
// Every seed draws a random table. Then two steps alternate: the best path through a fixed sample of random directions, and
// the least-squares fit of the 24 constants to what the windows of that path stand for. The best tables go on to larger samples,
// the last one is rounded to int8 and polished, one constant up or down at a time. Everything but the sample and the 24 x 24
// solve is integer arithmetic, and both are rounded to integers: the result does not depend on compiler or flags.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numbers>
#include <utility>
#include <vector>

#include <turboquant/core/random.hpp>
#include <turboquant/kernels/portable.hpp>

#if __has_include(<turboquant/codec/trellis_quant.hpp>)
#include <turboquant/codec/trellis_quant.hpp>
#define FROZEN 1
#endif

namespace {

using turboquant::kernels::Portable;
using turboquant::kernels::TrellisCodes;

constexpr std::size_t kDim = 128;       // length of a sequence: the bits spent on leaving state 0 are part of the training
double kSpread = 38;          // levels per standard deviation
constexpr int kUnit = Portable::kTrellisUnit;
constexpr int kRange = Portable::kTrellisRange;

double uniform(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  return (static_cast<double>(turboquant::random_bits(seed, stream, index) >> 11) + 0.5) * 0x1p-53;
}
double gaussian(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  const double radius = std::sqrt(-2 * std::log(uniform(seed, stream, 2 * index)));
  return radius * std::cos(2 * std::numbers::pi * uniform(seed, stream, 2 * index + 1));
}

// Random directions of kDim coordinates in units of 1 / (kUnit kSpread) of their root mean square.
struct Sample {
  std::vector<std::int16_t> x;
  std::vector<std::int16_t> target;  // the same within kRange: what a path is searched for

  Sample(std::uint64_t stream, std::size_t rows) : x(rows * kDim), target(rows * kDim) {
    double row[kDim];
    for (std::size_t t = 0; t < rows; ++t) {
      double energy = 0;
      for (std::size_t i = 0; i < kDim; ++i) {
        row[i] = std::nearbyint(gaussian(1, stream, t * kDim + i) * 0x1p20);  // exact sums, whatever the last bit of log
        energy += row[i] * row[i];
      }
      const double unit = std::sqrt(energy / static_cast<double>(kDim)) / (kUnit * kSpread);
      for (std::size_t i = 0; i < kDim; ++i) {
        const double at = std::clamp(std::nearbyint(row[i] / unit), -32767.0, 32767.0);
        x[t * kDim + i] = static_cast<std::int16_t>(at);
        target[t * kDim + i] = static_cast<std::int16_t>(std::clamp<int>(static_cast<int>(at), -kRange, kRange));
      }
    }
  }
  std::size_t rows() const { return x.size() / kDim; }
};

constexpr std::size_t kConstants = 24;
using Constants = std::array<int, kConstants>;  // A[16], B[8] in 1/128 of a level

void expand(const Constants& c, std::int16_t* levels) {
  for (unsigned w = 0; w < 256; ++w) {
    const int level = std::clamp(c[w & 15u] + c[16 + (w >> 4 & 7u)], -kRange, kRange);
    levels[w] = static_cast<std::int16_t>(w >= 128 ? -level : level);
  }
}

// What was decoded as each window.
struct Windows {
  std::array<std::int64_t, 256> count{}, sum{};
};

// Mean of |x - s c|^2 / |x|^2 with the least-squares scale s of each row.
template <unsigned B>
double distortion(const Sample& sample, const Constants& constants, Windows* windows = nullptr) {
  std::int16_t levels[256];
  expand(constants, levels);
  std::vector<std::uint8_t> back(kDim * TrellisCodes<B>::states);
  std::uint8_t path[kDim];
  double total = 0;
  for (std::size_t t = 0; t < sample.rows(); ++t) {
    const std::int16_t* x = sample.x.data() + t * kDim;
    Portable::find_trellis_path<B>(sample.target.data() + t * kDim, kDim, levels, back.data(), path);
    std::int64_t dot = 0, norm = 0, energy = 0;
    unsigned window = 0;
    for (std::size_t i = 0; i < kDim; ++i) {
      window = (window << B | path[i]) & 255u;
      const std::int64_t level = levels[window], value = x[i];
      dot += value * level, norm += level * level, energy += value * value;
      if (windows != nullptr) ++windows->count[window], windows->sum[window] += value;
    }
    total += 1 - static_cast<double>(dot) * static_cast<double>(dot) / (static_cast<double>(norm) * static_cast<double>(energy));
  }
  return total / static_cast<double>(sample.rows());
}

// The constants for which sum over windows of count (mean - level)^2 is least. One number could move from A to B without
// effect; a unit weight on the present constants settles that.
void refit(const Windows& windows, Constants& constants) {
  std::array<std::array<double, kConstants + 1>, kConstants> m{};
  for (std::size_t i = 0; i < kConstants; ++i) m[i][i] = 1, m[i][kConstants] = constants[i];
  for (unsigned w = 0; w < 256; ++w) {
    const std::size_t a = w & 15u, b = 16 + (w >> 4 & 7u);
    const auto count = static_cast<double>(windows.count[w]), sum = static_cast<double>(w >= 128 ? -windows.sum[w] : windows.sum[w]);
    m[a][a] += count, m[b][b] += count, m[a][b] += count, m[b][a] += count;
    m[a][kConstants] += sum, m[b][kConstants] += sum;
  }
  for (std::size_t i = 0; i < kConstants; ++i) {  // positive definite: no pivoting
    for (std::size_t r = 0; r < kConstants; ++r) {
      if (r == i) continue;
      const double factor = m[r][i] / m[i][i];
      for (std::size_t k = i; k <= kConstants; ++k) m[r][k] -= factor * m[i][k];
    }
  }
  for (std::size_t i = 0; i < kConstants; ++i) {
    constants[i] = static_cast<int>(std::clamp(std::nearbyint(m[i][kConstants] / m[i][i]), -1.0 * kRange, 1.0 * kRange));
  }
}

struct Candidate {
  std::uint64_t seed;
  Constants constants;
  double distortion;
};

template <unsigned B>
void improve(std::vector<Candidate>& candidates, const Sample& sample, int rounds, std::size_t keep) {
  for (Candidate& candidate : candidates) {
    for (int round = 0; round < rounds; ++round) {
      Windows windows;
      candidate.distortion = distortion<B>(sample, candidate.constants, &windows);
      refit(windows, candidate.constants);
    }
  }
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.distortion < b.distortion; });
  std::printf("  %zu tables, %zu rows, %d rounds: best %.5f (seed %llu), median %.5f\n", candidates.size(), sample.rows(),
              rounds, candidates[0].distortion, static_cast<unsigned long long>(candidates[0].seed),
              candidates[candidates.size() / 2].distortion);
  candidates.resize(std::min(keep, candidates.size()));
  std::fflush(stdout);
}

bool fits(const Constants& c) {
  for (std::size_t a = 0; a < 16; ++a) {
    for (std::size_t b = 16; b < kConstants; ++b) {
      if (std::abs(c[a] + c[b]) > kRange) return false;
    }
  }
  return true;
}

// To whole levels, the mean of B at zero; then every constant a level up or down as long as that helps.
template <unsigned B>
double round_constants(Constants& constants, const Sample& sample) {
  int mean = 0;
  for (std::size_t b = 16; b < kConstants; ++b) mean += constants[b] / 8;
  for (std::size_t i = 0; i < kConstants; ++i) {
    const int centred = constants[i] + (i < 16 ? mean : -mean);
    constants[i] = static_cast<int>(std::lround(static_cast<double>(centred) / kUnit)) * kUnit;
  }
  double best = distortion<B>(sample, constants);
  std::printf("  rounded %.5f", best);
  for (bool changed = true; changed;) {
    changed = false;
    for (std::size_t i = 0; i < kConstants; ++i) {
      for (const int step : {kUnit, -kUnit}) {
        Constants moved = constants;
        moved[i] += step;
        if (!fits(moved)) continue;
        const double d = distortion<B>(sample, moved);
        if (d < best) best = d, constants = moved, changed = true;
      }
    }
  }
  std::printf(", polished %.5f\n", best);
  return best;
}

template <unsigned B>
Constants train(std::size_t seeds) {
  std::printf("%u bits\n", B);
  const Sample first(1, 128), second(2, 512), third(3, 2048), test(4, 4096);
  std::vector<Candidate> candidates;
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    Candidate candidate{seed, {}, 1};
    for (std::size_t i = 0; i < kConstants; ++i) {
      const double deviation = (i < 16 ? 0.8 : 0.6) * kSpread * kUnit;
      candidate.constants[i] = static_cast<int>(std::clamp(deviation * gaussian(2, seed, i), -1.0 * kRange, 1.0 * kRange));
    }
    candidates.push_back(candidate);
  }
  improve<B>(candidates, first, 12, seeds / 8 + 4);
  improve<B>(candidates, second, 25, 6);
  improve<B>(candidates, third, 40, 6);
  for (const Candidate& candidate : candidates) {
    std::printf("  seed %llu: %.5f\n", static_cast<unsigned long long>(candidate.seed), distortion<B>(test, candidate.constants));
  }
  for(double sp:{30.,32.,34.,36.,38.,40.,42.}){ double old=kSpread; Constants c=candidates[0].constants; for(int&v:c)v=(int)std::lround(v*sp/old); kSpread=sp; const Sample s(5,512),te(4,4096); std::printf("spread %.0f\n",sp);round_constants<B>(c,s);std::printf(" test %.5f\n",distortion<B>(te,c));kSpread=old;for(int v:c)std::printf("%d, ",v/kUnit);puts("");}
  return candidates[0].constants;
}

}  // namespace

int main(int argc, char** argv) {
  const std::size_t seeds=argc>2?(std::size_t)atoi(argv[2]):100; const int b=atoi(argv[1]);
  if(b==2)train<2>(seeds); if(b==3)train<3>(seeds); if(b==4)train<4>(seeds);
}

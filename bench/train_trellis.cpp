// Trains the 24 constants of TrellisQuant<B> and compares them with the frozen ones in codec/trellis_quant.hpp.
//
//   train_trellis                       trains, B = 2, 3 and 4: about two minutes. Fails if the result differs
//   train_trellis --bits B --seeds N    one width, other seeds
//   train_trellis --check               only measures the frozen constants: a second. Fails if they are worse than
//   documented
//
// Every seed draws a random table. Then two steps alternate: the best paths through a fixed sample of random
// directions, and the least-squares fit of the constants to what their windows stand for. The best tables go on to
// larger samples; the winner is rounded to int8, and single constants go up or down as long as that helps. Numbers are
// integers, but for the sample and the 24 x 24 solve, which are rounded to integers at once: the result does not depend
// on compiler or flags.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numbers>
#include <string_view>
#include <vector>

#include <turboquant/codec/trellis_quant.hpp>
#include <turboquant/core/random.hpp>
#include <turboquant/kernels/portable.hpp>

namespace {

using turboquant::kernels::Portable;
using turboquant::kernels::TrellisCodes;

constexpr std::size_t kDim = 128;
constexpr double kSpread = turboquant::kTrellisSpread;
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
        row[i] =
            std::nearbyint(gaussian(1, stream, t * kDim + i) * 0x1p20);  // exact sums, whatever the last bit of log
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
    Portable::find_closed_trellis_path<B>(sample.target.data() + t * kDim, kDim, levels, back.data(), path);
    std::int64_t dot = 0, norm = 0, energy = 0;
    unsigned window = 0;
    for (std::size_t i = kDim - TrellisCodes<B>::reach; i < kDim; ++i) window = (window << B | path[i]) & 255u;
    for (std::size_t i = 0; i < kDim; ++i) {
      window = (window << B | path[i]) & 255u;
      const std::int64_t level = levels[window], value = x[i];
      dot += value * level, norm += level * level, energy += value * value;
      if (windows != nullptr) ++windows->count[window], windows->sum[window] += value;
    }
    total += 1 - static_cast<double>(dot) * static_cast<double>(dot) /
                     (static_cast<double>(norm) * static_cast<double>(energy));
  }
  return total / static_cast<double>(sample.rows());
}

// The constants for which sum over windows of count (mean - level)^2 is least. One number could move from A to B
// without effect; a unit weight on the present constants settles that.
void refit(const Windows& windows, Constants& constants) {
  std::array<std::array<double, kConstants + 1>, kConstants> m{};
  for (std::size_t i = 0; i < kConstants; ++i) m[i][i] = 1, m[i][kConstants] = constants[i];
  for (unsigned w = 0; w < 256; ++w) {
    const std::size_t a = w & 15u, b = 16 + (w >> 4 & 7u);
    const auto count = static_cast<double>(windows.count[w]),
               sum = static_cast<double>(w >= 128 ? -windows.sum[w] : windows.sum[w]);
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
    constants[i] =
        static_cast<int>(std::clamp(std::nearbyint(m[i][kConstants] / m[i][i]), -1.0 * kRange, 1.0 * kRange));
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
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    std::printf("%s %4llu: %.5f%s", i % 8 == 0 ? "   " : "", static_cast<unsigned long long>(candidates[i].seed),
                candidates[i].distortion, i % 8 == 7 || i + 1 == candidates.size() ? "\n" : "  ");
  }
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.distortion < b.distortion; });
  std::printf("  %zu tables, %zu rows, %d rounds: best %.5f (seed %llu), median %.5f\n", candidates.size(),
              sample.rows(), rounds, candidates[0].distortion, static_cast<unsigned long long>(candidates[0].seed),
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
void round_constants(Constants& constants, const Sample& sample) {
  int mean = 0;
  for (std::size_t b = 16; b < kConstants; ++b) mean += constants[b] / 8;
  for (std::size_t i = 0; i < kConstants; ++i) {
    const int centred = constants[i] + (i < 16 ? mean : -mean);
    constants[i] = static_cast<int>(std::lround(static_cast<double>(centred) / kUnit)) * kUnit;
  }
  double best = distortion<B>(sample, constants);
  std::printf("  rounded: %.5f", best);
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
  std::printf(", polished: %.5f\n", best);
}

template <unsigned B>
Constants frozen() {
  Constants constants{};
  for (std::size_t i = 0; i < kConstants; ++i) constants[i] = turboquant::kTrellisConstants<B>[i] * kUnit;
  return constants;
}

const Sample& unseen() {
  static const Sample sample(4, 4096);
  return sample;
}

template <unsigned B>
bool train(std::size_t seeds) {
  std::printf("%u bits\n", B);
  const Sample first(1, 128), second(2, 512), third(3, 2048);
  std::vector<Candidate> candidates;
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    Candidate candidate{seed, {}, 1};
    for (std::size_t i = 0; i < kConstants; ++i) {
      const double deviation = (i < 16 ? 0.8 : 0.6) * kSpread * kUnit;
      candidate.constants[i] =
          static_cast<int>(std::clamp(deviation * gaussian(2, seed, i), -1.0 * kRange, 1.0 * kRange));
    }
    candidates.push_back(candidate);
  }
  improve<B>(candidates, first, 12, seeds / 8 + 4);
  improve<B>(candidates, second, 25, 6);
  improve<B>(candidates, third, 40, 1);
  Constants best = candidates[0].constants;
  round_constants<B>(best, third);
  std::printf("  on directions not seen: %.5f\n ", distortion<B>(unseen(), best));
  for (const int constant : best) std::printf(" %d,", constant / kUnit);
  const bool same = best == frozen<B>();
  std::printf("\n  %s\n", same ? "these are the frozen constants" : "DIFFERENT from the frozen constants");
  return same;
}

// One scale, no search; margin 1 % for the sample.
template <unsigned B>
bool check(double documented) {
  const double d = distortion<B>(unseen(), frozen<B>());
  std::printf("%u bits: %.5f, documented %.5f\n", B, d, documented);
  return d <= 1.01 * documented;
}

}  // namespace

int main(int argc, char** argv) {
  std::size_t seeds = 400;
  long bits = 0;
  bool check_only = false, good = true;
  for (int i = 1; i < argc; ++i) {
    const std::string_view option = argv[i];
    if (option == "--check") {
      check_only = true;
    } else if (option == "--bits" && i + 1 < argc) {
      bits = std::strtol(argv[++i], nullptr, 10);
    } else if (option == "--seeds" && i + 1 < argc) {
      seeds = std::strtoul(argv[++i], nullptr, 10);
    } else {
      std::fprintf(stderr, "usage: train_trellis [--check] [--bits 2|3|4] [--seeds N]\n");
      return 2;
    }
  }
  if (check_only) {
    good = check<2>(0.0786) && good;
    good = check<3>(0.0210) && good;
    good = check<4>(0.00580) && good;
    return good ? 0 : 1;
  }
  if (bits == 0 || bits == 2) good = train<2>(seeds) && good;
  if (bits == 0 || bits == 3) good = train<3>(seeds) && good;
  if (bits == 0 || bits == 4) good = train<4>(seeds) && good;
  return good ? 0 : 1;
}

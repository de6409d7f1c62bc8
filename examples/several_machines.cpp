// One context split over machines: each rank codes its part and attends to it; one reduction merges the partial
// results. Run it with mpirun. The last rank's keys are the newest, so every query sees all of the other ranks' tokens.
#include <turboquant/turboquant.hpp>

#include <mpi.h>

#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

namespace {

constexpr std::size_t kTokens = 6144, kHeads = 8, kKvHeads = 2, kDim = 128, kPage = 64;
constexpr std::size_t kOut = kHeads * kDim, kMessage = kOut + kHeads;  // an output and its log-sum-exp

// The reduction's operator: [out, lse] pairs, merged as turboquant merges them.
void merge(void* in, void* in_out, int* count, MPI_Datatype*) {
  for (int i = 0; i < *count; ++i) {
    const float* other = static_cast<const float*>(in) + static_cast<std::size_t>(i) * kMessage;
    float* mine = static_cast<float*>(in_out) + static_cast<std::size_t>(i) * kMessage;
    turboquant::merge_partials({mine, 1, kHeads, kDim}, mine + kOut, {other, 1, kHeads, kDim}, other + kOut);
  }
}

std::vector<float> random_rows(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> rows(count);
  for (float& x : rows) x = normal(random);
  return rows;
}

// Attention of one query to the tokens [begin, end) as codes: out, then lse. False if the cache refused a call.
bool attend_part(std::size_t begin, std::size_t end, std::vector<float>& message) {
  // Every rank makes the whole context here; in an engine it has only its own part.
  const std::vector<float> keys = random_rows(kTokens * kKvHeads * kDim, 1);
  const std::vector<float> values = random_rows(kTokens * kKvHeads * kDim, 2), query = random_rows(kOut, 3);
  turboquant::CacheConfig config{.layers = {{.kv_heads = kKvHeads, .head_dim = kDim}}};
  config.page_tokens = kPage;
  config.recent_tokens = 0;  // so that pages, and with them the codes, are those of a single rank
  turboquant::KVCache<turboquant::TQ4> cache(config);
  turboquant::BatchItem part;
  if (cache.create_sequence(part.sequence) != turboquant::Status::ok) return false;
  const std::size_t first = begin * kKvHeads * kDim;
  part.keys = {keys.data() + first, end - begin, kKvHeads, kDim};
  part.values = {values.data() + first, end - begin, kKvHeads, kDim};
  part.queries = {query.data(), 1, kHeads, kDim};
  part.out = {message.data(), 1, kHeads, kDim};
  part.lse = message.data() + kOut;  // makes the result a partial one
  return turboquant::attend(cache, 0, {&part, 1}) == turboquant::Status::ok;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0, ranks = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  const auto boundary = [&](int of_rank) {  // parts of whole pages
    return kTokens / kPage * static_cast<std::size_t>(of_rank) / static_cast<std::size_t>(ranks) * kPage;
  };
  std::vector<float> part(kMessage), whole(kMessage), alone(kMessage);
  bool is_right = attend_part(boundary(rank), boundary(rank + 1), part);

  MPI_Datatype message;
  MPI_Op merging;
  MPI_Type_contiguous(static_cast<int>(kMessage), MPI_FLOAT, &message);
  MPI_Type_commit(&message);
  MPI_Op_create(merge, 1, &merging);
  MPI_Allreduce(part.data(), whole.data(), 1, message, merging, MPI_COMM_WORLD);
  MPI_Op_free(&merging);
  MPI_Type_free(&message);

  is_right = is_right && attend_part(0, kTokens, alone);
  double error = 0, energy = 0;
  for (std::size_t i = 0; i < kOut; ++i) {
    error += std::pow(static_cast<double>(whole[i]) - static_cast<double>(alone[i]), 2);
    energy += std::pow(static_cast<double>(alone[i]), 2);
  }
  const double relative = std::sqrt(error / energy);
  is_right = is_right && relative < 1e-4;  // weights are coded relative to a step's maximum, sums have another order
  if (rank == 0) {
    std::printf("%zu tokens on %d rank%s: the output differs from one rank's by %.1e\n", kTokens, ranks,
                ranks == 1 ? "" : "s", relative);
  }
  MPI_Finalize();
  return is_right ? 0 : 1;
}

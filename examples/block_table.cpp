// An engine that keeps its own block table: pages are coded into its blocks, shared by number, and read in place.
#include <cstdio>
#include <random>
#include <turboquant/turboquant.hpp>
#include <vector>

namespace {
constexpr std::size_t kDim = 128, kPage = 64, kPrompt = 256, kSteps = 100;

struct alignas(64) Line {
  std::byte bytes[64];
};

struct Request {
  std::vector<std::size_t> table;   // block numbers
  std::vector<float> keys, values;  // raw rows behind them
};
}  // namespace

int main() {
  const turboquant::PageCodec<turboquant::TQ4> codec({.kv_heads = 1, .head_dim = kDim}, kPage);
  const std::size_t lines = codec.page_bytes() / sizeof(Line);
  std::vector<Line> blocks, workspace(codec.workspace_bytes() / sizeof(Line) + 1);
  std::mt19937 random;
  std::normal_distribution<float> normal;
  const auto append = [&](Request& request) {  // one token; a full page of raw rows becomes a block
    for (std::size_t i = 0; i < kDim; ++i)
      request.keys.push_back(normal(random)), request.values.push_back(normal(random));
    if (request.keys.size() < kPage * kDim) return turboquant::Status{};
    request.table.push_back(blocks.size() / lines);
    blocks.resize(blocks.size() + lines);
    const auto status =
        codec.encode_page({request.keys.data(), kPage, 1, kDim}, {request.values.data(), kPage, 1, kDim},
                          blocks[blocks.size() - lines].bytes, workspace.data()->bytes);
    request.keys.clear(), request.values.clear();
    return status;
  };

  Request first;
  for (std::size_t t = 0; t < kPrompt; ++t)
    if (append(first) != turboquant::Status::ok) return 1;
  Request second = first;  // shares the blocks of the prompt
  std::vector<float> query(kDim, 0.1f), out(kDim);
  for (std::size_t step = 0; step < kSteps; ++step) {
    for (Request* request : {&first, &second}) {
      if (append(*request) != turboquant::Status::ok) return 1;
      std::vector<turboquant::PageSpan> pages;
      for (const std::size_t number : request->table) pages.push_back({blocks[number * lines].bytes, 0, kPage});
      const std::size_t behind = request->keys.size() / kDim;
      const turboquant::PageItem item{.pages = pages,
                                      .keys = {request->keys.data(), behind, 1, kDim},
                                      .values = {request->values.data(), behind, 1, kDim},
                                      .queries = {query.data(), 1, 1, kDim},
                                      .out = {out.data(), 1, 1, kDim}};
      if (turboquant::attend_pages(codec, {&item, 1}) != turboquant::Status::ok) return 1;
    }
  }
  std::printf("%zu tokens in %zu blocks of %zu bytes\n", 2 * (kPrompt + kSteps), blocks.size() / lines,
              codec.page_bytes());
}

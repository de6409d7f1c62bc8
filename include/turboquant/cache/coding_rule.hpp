// When tokens become codes: the numbers of a cache that decide it, and the pace at which pages are coded ahead.
#pragma once

#include <algorithm>
#include <cstddef>

namespace turboquant::detail {

inline constexpr std::size_t saturating_subtract(std::size_t a, std::size_t b) { return a > b ? a - b : 0; }

// Design: what a query sees does not depend on the calls. All numbers are tokens; `base` is where a sequence counts its
// pages from.
struct CodingRule {
  std::size_t page_tokens, recent_tokens, rollback_tokens;

  // Tokens readable as codes when n are present.
  std::size_t coded(std::size_t base, std::size_t n) const {
    return base + page_tokens * (saturating_subtract(saturating_subtract(n, base), recent_tokens) / page_tokens);
  }
  // First token whose raw row must be kept so that a sequence shortened by rollback_tokens leaves no trace.
  std::size_t raw_begin(std::size_t base, std::size_t n) const {
    return coded(base, saturating_subtract(n, rollback_tokens));
  }

  // A finished page is not read as codes before recent_tokens more have come, so its coding is spread over so many
  // tokens, or over a page's worth, whichever is less: then at most one page is in work.
  std::size_t coding_tokens() const { return (std::min)(recent_tokens, page_tokens); }
  // Pages behind `base` whose coding has begun with n tokens: with the first token behind a page, or, if it must be
  // read at once, with its last.
  std::size_t pages_begun(std::size_t base, std::size_t n) const {
    const std::size_t behind = recent_tokens == 0 ? 0 : 1;
    return saturating_subtract(n, base + behind) / page_tokens;
  }
  // How much of the work on a page that ends at `page_end` must be done with n tokens.
  std::size_t work_due(std::size_t page_end, std::size_t n, std::size_t page_work) const {
    const std::size_t tokens = coding_tokens(), past = (std::min)(saturating_subtract(n, page_end), tokens);
    return tokens == 0 ? page_work : (page_work * past + tokens - 1) / tokens;
  }
};

}  // namespace turboquant::detail

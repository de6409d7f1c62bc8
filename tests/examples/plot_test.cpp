// The SVG of a report: well-formed, complete, and labels that do not cover each other.
#include <eval/plot.hpp>

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <regex>
#include <string>
#include <vector>

namespace {

using namespace turboquant_eval;

// Empty, or what is wrong with this piece of XML: tags that do not match, bare '<' and '&', attributes without quotes.
std::string why_malformed(const std::string& text) {
  const std::regex markup(R"(<(/?)([a-zA-Z]+)((?:\s+[a-zA-Z:-]+="[^"<]*")*)\s*(/?)>)"),
      entity(R"(^&(amp|lt|gt|quot|#\d+);)");
  std::vector<std::string> open;
  for (std::size_t at = 0; at < text.size();) {
    if (text[at] == '<') {
      std::smatch match;
      const std::string rest = text.substr(at, 4096);
      if (!std::regex_search(rest, match, markup, std::regex_constants::match_continuous))
        return "tag: " + rest.substr(0, 60);
      if (match[1].length() > 0) {
        if (open.empty() || open.back() != match[2]) return "unmatched </" + match[2].str();
        open.pop_back();
      } else if (match[4].length() == 0) {
        open.push_back(match[2]);
      }
      at += static_cast<std::size_t>(match.length());
      if (open.empty() && at + 1 < text.size()) return "text behind the root";
    } else {
      if (text[at] == '&' && !std::regex_search(text.substr(at, 10), entity)) return "&";
      ++at;
    }
  }
  return open.empty() ? "" : "open <" + open.back();
}

FormatReport row(const std::string& name, double bits, double error) {
  FormatReport format;
  format.name = name;
  format.key_bits = format.value_bits = format.bits_per_coordinate = bits;
  format.accuracy.key_error = error;
  format.accuracy.value_error = 0.7 * error;
  return format;
}

Report crowded_report() {
  Report report;
  report.inputs = {"a<b>&c.safetensors"};
  report.formats = {row("f16", 16, 0), row("TQ8", 8.27, 3e-5), row("TurboProd3, keys", 3.25, 0.14)};
  report.formats.back().value_bits = report.formats.back().accuracy.value_error =
      std::numeric_limits<double>::quiet_NaN();
  for (int i = 0; i < 4; ++i) {
    const double bits = 3.9 + 0.15 * i, error = 0.01 * std::pow(4, -0.25 * i);
    report.formats.push_back(row("TQ" + std::to_string(i), bits, error));
    report.formats.push_back(row("KIVI-" + std::to_string(i) + ", 32 tokens", bits + 0.2, 1.5 * error));
    report.formats.push_back(row("polar" + std::to_string(i) + "/scalar" + std::to_string(i), bits + 0.1, 1.1 * error));
  }
  return report;
}

std::size_t count_of(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(Plot, IsWellFormed) {
  EXPECT_EQ(why_malformed("<a b=\"c\"><d/>x &amp; y</a>\n"), "");
  EXPECT_NE(why_malformed("<a><b></a></b>"), "");
  EXPECT_NE(why_malformed("<a>x & y</a>"), "");
  EXPECT_EQ(why_malformed(plot(crowded_report())), "");
  EXPECT_EQ(why_malformed(plot(Report{})), "");
}

TEST(Plot, DrawsEveryRowThatHasAnError) {
  const std::string svg = plot(crowded_report());
  EXPECT_EQ(svg.rfind("<svg", 0), 0U);
  EXPECT_EQ(count_of(svg, "<title>TQ3: "), 2U);
  EXPECT_EQ(count_of(svg, "<title>TurboProd3, keys: 3.250 bits, error 0.14<"), 1U);  // no values
  EXPECT_EQ(count_of(svg, "<title>f16"), 0U);                                        // no error
  EXPECT_EQ(count_of(svg, "class=\"label\">polar2<"), 1U);
  EXPECT_EQ(count_of(svg, "class=\"label\">scalar2<"), 1U);
  EXPECT_EQ(count_of(svg, "a&lt;b>&amp;c"), 1U);
  EXPECT_EQ(count_of(svg, "the bound for Gaussian numbers"), 2U);
}

TEST(Plot, SharedCodecsShareAPoint) {
  Report report;
  report.formats = {row("TQ4", 4.25, 0.008), row("polar4/scalar4", 4.25, 0.008), row("polar4/polar3", 4.25, 0.008)};
  const std::string svg = plot(report);
  EXPECT_EQ(count_of(svg, "<title>TQ4; polar4/scalar4; polar4/polar3: "), 2U);
  EXPECT_EQ(count_of(svg, ">TQ4 = polar4<"), 1U);
  EXPECT_EQ(count_of(svg, ">TQ4 = scalar4 = polar3<"), 1U);
}

TEST(Plot, LabelsDoNotCoverEachOther) {
  struct Box {
    double left, right, y;
  };
  std::vector<Box> boxes;
  const std::string svg = plot(crowded_report());
  const std::regex label(R"re(<text x="([\d.]+)" y="([\d.]+)" text-anchor="(\w+)" class="label">([^<]*)<)re");
  for (std::sregex_iterator match(svg.begin(), svg.end(), label), end; match != end; ++match) {
    const double x = std::stod((*match)[1]), width = 7 * static_cast<double>((*match)[4].length());
    const std::string anchor = (*match)[3];
    const double left = anchor == "start" ? x : anchor == "end" ? x - width : x - width / 2;
    boxes.push_back({left, left + width, std::stod((*match)[2])});
  }
  EXPECT_EQ(boxes.size(), 27U);  // 14 keys and 13 values
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    EXPECT_GT(boxes[i].left, 0);
    EXPECT_LT(boxes[i].right, 1200);
    for (std::size_t j = 0; j < i; ++j) {
      const bool covers =
          boxes[i].left < boxes[j].right && boxes[j].left < boxes[i].right && std::abs(boxes[i].y - boxes[j].y) < 12;
      EXPECT_FALSE(covers) << i << " and " << j;
    }
  }
}

}  // namespace

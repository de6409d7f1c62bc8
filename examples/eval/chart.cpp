// Lays out points, axes and labels, and writes SVG.
#include "chart.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <vector>

namespace turboquant_eval {
namespace {

constexpr double kWidth = 1200, kPanelHeight = 560, kLeft = 84, kRight = 24, kTop = 56, kBottom = 56;
constexpr double kRadius = 4.5, kFontSize = 12, kCharWidth = 7.2, kLineHeight = 15;
constexpr double kSmallestDrawn = 1e-8;

struct Box {
  double left, top, right, bottom;
  bool meets(const Box& other) const {
    return left < other.right && other.left < right && top < other.bottom && other.top < bottom;
  }
};

struct Point {
  double x, y, bits, value;
  std::size_t family;
  std::string label;
  std::vector<std::string> rows;
};

// Does the line from (x, y) to (to_x, to_y) pass through the box? Sampled: lines are short.
bool crosses(double x, double y, double to_x, double to_y, const Box& box) {
  constexpr int kSamples = 32;
  for (int i = 0; i <= kSamples; ++i) {
    const double at_x = x + (to_x - x) * i / kSamples, at_y = y + (to_y - y) * i / kSamples;
    if (box.meets({at_x - 0.5, at_y - 0.5, at_x + 0.5, at_y + 0.5})) return true;
  }
  return false;
}

// '&' and '<' for XML.
std::string escaped(std::string_view text) {
  std::string result;
  for (const char c : text) {
    if (c == '&') {
      result += "&amp;";
    } else if (c == '<') {
      result += "&lt;";
    } else {
      result += c;
    }
  }
  return result;
}

class Panel {
 public:
  Panel(const ChartPanel& panel, std::span<const ChartFamily> families, double top)
      : panel_(panel), families_(families), top_(top) {
    for (const ChartPoint& point : panel.points) {
      if (!(point.value > kSmallestDrawn) || !std::isfinite(point.value) || !(point.bits > 0)) continue;
      points_.push_back({0, 0, point.bits, point.value, point.family, point.label, {point.row}});
      least_bits_ = (std::min)(least_bits_, std::floor(2 * point.bits) / 2);
      most_bits_ = (std::max)(most_bits_, std::ceil(point.bits + 0.2));
      low_ = (std::min)(low_, std::floor(std::log10(point.value)));
    }
    for (Point& point : points_) {
      point.x = x(point.bits);
      point.y = y(point.value);
    }
    merge();
  }

  std::string svg() {
    const std::string behind = frame() + (panel_.has_bound ? bound() : "") + lines() + legend();
    return behind + labels() + circles();
  }

 private:
  double x(double bits) const {
    return kLeft + (bits - least_bits_) / (most_bits_ - least_bits_) * (kWidth - kLeft - kRight);
  }
  double y(double value) const {
    return top_ + kTop + (high_ - std::log10(value)) / (high_ - low_) * (kPanelHeight - kTop - kBottom);
  }
  double bottom() const { return top_ + kPanelHeight - kBottom; }

  // Rows that share a codec are one point.
  void merge() {
    std::vector<Point> merged;
    for (const Point& point : points_) {
      const auto same = std::find_if(merged.begin(), merged.end(), [&](const Point& other) {
        return std::abs(other.x - point.x) < 1 && std::abs(other.y - point.y) < 1;
      });
      if (same == merged.end()) {
        merged.push_back(point);
      } else {
        if ((" = " + same->label + " = ").find(" = " + point.label + " = ") == std::string::npos) {
          same->label += " = " + point.label;
        }
        same->rows.push_back(point.rows.front());
      }
    }
    points_ = std::move(merged);
  }

  std::string frame() const {
    std::string text =
        fmt::format("<text x=\"{}\" y=\"{}\" class=\"title\">{}</text>\n", kLeft, top_ + 34, panel_.title);
    for (double decade = low_; decade <= high_; ++decade) {
      const double at = y(std::pow(10, decade));
      text += fmt::format("<path d=\"M{} {:.1f}H{}\" class=\"grid\"/>\n", kLeft, at, kWidth - kRight);
      text += fmt::format(
          "<text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\" class=\"tick\">10"
          "<tspan dy=\"-5\" font-size=\"9\">{:.0f}</tspan></text>\n",
          kLeft - 8, at + 4, decade);
    }
    for (double bits = std::ceil(least_bits_); bits <= most_bits_; ++bits) {
      text += fmt::format("<path d=\"M{:.1f} {}V{}\" class=\"grid\"/>\n", x(bits), top_ + kTop, bottom());
      text += fmt::format("<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\" class=\"tick\">{:.0f}</text>\n", x(bits),
                          bottom() + 18, bits);
    }
    text +=
        fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">true bits per number, everything included</text>\n",
                    (kLeft + kWidth - kRight) / 2, bottom() + 40);
    text += fmt::format("<text transform=\"translate(22 {}) rotate(-90)\" text-anchor=\"middle\">{}</text>\n",
                        (top_ + kTop + bottom()) / 2, panel_.value_title);
    return text;
  }

  std::string bound() const {
    const double end = (std::min)(most_bits_, -low_ / std::log10(4.0));
    return fmt::format("<path d=\"M{:.1f} {:.1f}L{:.1f} {:.1f}\" class=\"bound\"/>\n", x(least_bits_),
                       y(std::pow(4, -least_bits_)), x(end), y(std::pow(4, -end)));
  }

  std::string lines() const {
    std::string text;
    for (std::size_t family = 0; family < families_.size(); ++family) {
      if (!families_[family].is_joined) continue;
      std::vector<const Point*> members;
      for (const Point& point : points_) {
        if (point.family == family) members.push_back(&point);
      }
      std::sort(members.begin(), members.end(), [](const Point* a, const Point* b) { return a->bits < b->bits; });
      std::string path;
      for (const Point* point : members)
        path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : "L", point->x, point->y);
      if (members.size() > 1) {
        text +=
            fmt::format("<path d=\"{}\" fill=\"none\" stroke=\"{}\" stroke-opacity=\"0.45\" stroke-width=\"1.5\"/>\n",
                        path, families_[family].color);
      }
    }
    return text;
  }

  std::string circles() const {
    std::string text;
    for (const Point& point : points_) {
      text += fmt::format(
          "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{}\" fill=\"{}\" stroke=\"#ffffff\"><title>{}: {:.3f} bits, {} "
          "{:.3g}</title></circle>\n",
          point.x, point.y, kRadius, families_[point.family].color,
          escaped(fmt::format("{}", fmt::join(point.rows, "; "))), point.bits, panel_.value_name, point.value);
    }
    return text;
  }

  std::string legend() {
    constexpr double kLegendWidth = 280;
    std::vector<std::size_t> present;
    for (std::size_t family = 0; family < families_.size(); ++family) {
      const bool is_present =
          std::any_of(points_.begin(), points_.end(), [=](const Point& point) { return point.family == family; });
      if (is_present) present.push_back(family);
    }
    const double left = kWidth - kRight - kLegendWidth, first = top_ + kTop + 14;
    const Box box{left, first - 10, kWidth - kRight - 4,
                  first + 20 * static_cast<double>(present.size() + (panel_.has_bound ? 1 : 0)) - 2};
    taken_.push_back(box);
    std::string text = fmt::format("<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" rx=\"4\" class=\"legend\"/>\n",
                                   box.left, box.top, box.right - box.left, box.bottom - box.top);
    double at = first + 4;
    for (const std::size_t family : present) {
      text += fmt::format("<circle cx=\"{}\" cy=\"{}\" r=\"{}\" fill=\"{}\"/><text x=\"{}\" y=\"{}\">{}</text>\n",
                          left + 18, at, kRadius, families_[family].color, left + 34, at + 4, families_[family].title);
      at += 20;
    }
    if (!panel_.has_bound) return text;
    return text +
           fmt::format(
               "<path d=\"M{} {}h20\" class=\"bound\"/><text x=\"{}\" y=\"{}\">4<tspan dy=\"-4\" font-size=\"9\">"
               "−b</tspan><tspan dy=\"4\">, the bound for Gaussian numbers</tspan></text>\n",
               left + 8, at, left + 34, at + 4);
  }

  // Is there room for a label of `point` in `box`, with a line from the point to (to_x, to_y)? If not `is_strict`,
  // lines may cross other points and labels other lines.
  bool is_free(const Box& box, const Point& point, double to_x, double to_y, bool is_strict) const {
    if (box.left < kLeft + 2 || box.right > kWidth - kRight || box.top < top_ + kTop || box.bottom > bottom())
      return false;
    const auto covers = [&](const Box& other) {
      return box.meets(other) || crosses(point.x, point.y, to_x, to_y, other);
    };
    if (std::any_of(taken_.begin(), taken_.end(), covers)) return false;
    constexpr double kReach = kRadius + 2;
    for (const Point& other : points_) {
      const Box dot{other.x - kReach, other.y - kReach, other.x + kReach, other.y + kReach};
      const bool is_behind = std::hypot(other.x - point.x, other.y - point.y) < 2 * kReach;
      if (box.meets(dot) || (is_strict && !is_behind && crosses(point.x, point.y, to_x, to_y, dot))) return false;
    }
    return !is_strict || std::none_of(leaders_.begin(), leaders_.end(), [&](const auto& line) {
      return crosses(line[0], line[1], line[2], line[3], box);
    });
  }

  // Each label goes to the nearest free place around its point; crowded points choose first.
  std::string labels() {
    std::vector<const Point*> order;
    for (const Point& point : points_) order.push_back(&point);
    const auto neighbours = [&](const Point* point) {
      return std::count_if(points_.begin(), points_.end(), [=](const Point& other) {
        return std::abs(other.x - point->x) < 120 && std::abs(other.y - point->y) < 40;
      });
    };
    std::stable_sort(order.begin(), order.end(),
                     [&](const Point* a, const Point* b) { return neighbours(a) > neighbours(b); });
    std::string text;
    for (const Point* point : order) {
      std::string placed = label(*point, true);
      text += placed.empty() ? label(*point, false) : placed;
    }
    return text;
  }

  std::string label(const Point& point, bool is_strict) {
    constexpr int kDirections = 24, kDistances = 40;
    constexpr double kPi = 3.14159265358979;
    const double width = kCharWidth * static_cast<double>(point.label.size());
    for (int distance = 0; distance < kDistances; ++distance) {
      for (int i = 0; i < kDirections; ++i) {
        // Right first, then alternately up and down.
        const double angle = (i % 2 == 0 ? 1 : -1) * ((i + 1) / 2) * 2 * kPi / kDirections, reach = 10 + 6 * distance;
        const double to_x = point.x + reach * std::cos(angle), to_y = point.y + reach * std::sin(angle);
        const bool is_right = std::cos(angle) > 0.3, is_left = std::cos(angle) < -0.3;
        const double left = is_right ? to_x : is_left ? to_x - width : to_x - width / 2;
        const Box box{left - 2, to_y - kLineHeight / 2, left + width + 2, to_y + kLineHeight / 2};
        if (!is_free(box, point, to_x, to_y, is_strict)) continue;
        taken_.push_back(box);
        leaders_.push_back({point.x, point.y, to_x, to_y});
        std::string text;
        if (distance > 0) {
          text = fmt::format("<path d=\"M{:.1f} {:.1f}L{:.1f} {:.1f}\" class=\"leader\"/>\n", point.x, point.y, to_x,
                             to_y);
        }
        const char* anchor = is_right ? "start" : is_left ? "end" : "middle";
        return text + fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\" class=\"label\">{}</text>\n",
                                  to_x, to_y + 4, anchor, escaped(point.label));
      }
    }
    return {};  // no room: the circle still has its title
  }

  const ChartPanel& panel_;
  std::span<const ChartFamily> families_;
  double top_, least_bits_ = 2, most_bits_ = 5, low_ = -3, high_ = 0;
  std::vector<Point> points_;
  std::vector<Box> taken_;
  std::vector<std::array<double, 4>> leaders_;
};

}  // namespace

std::string draw(std::string_view caption, std::span<const ChartFamily> families, std::span<const ChartPanel> panels) {
  const double height = 40 + static_cast<double>(panels.size()) * kPanelHeight;
  std::string text = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" width=\"{}\" height=\"{}\" "
      "font-family=\"Helvetica, Arial, DejaVu Sans, sans-serif\" font-size=\"{}\" fill=\"#202124\">\n",
      kWidth, height, kWidth, height, kFontSize);
  text +=
      "<style>.title{font-size:17px;font-weight:600}.tick{fill:#5f6368}.grid{stroke:#e3e6ea;fill:none}"
      ".bound{stroke:#5f6368;stroke-dasharray:6 4;stroke-width:1.5;fill:none}.leader{stroke:#9aa0a6;stroke-width:0.8}"
      ".legend{fill:#ffffff;stroke:#dadce0}"
      ".label{paint-order:stroke;stroke:#ffffff;stroke-width:3px;stroke-linejoin:round}</style>\n";
  text += fmt::format("<rect width=\"{}\" height=\"{}\" fill=\"#ffffff\"/>\n", kWidth, height);
  text += fmt::format("<text x=\"{}\" y=\"36\" font-size=\"14\" fill=\"#5f6368\">{}</text>\n", kLeft, escaped(caption));
  double top = 40;
  for (const ChartPanel& panel : panels) {
    text += Panel(panel, families, top).svg();
    top += kPanelHeight;
  }
  return text + "</svg>\n";
}

}  // namespace turboquant_eval

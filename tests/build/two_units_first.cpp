// Everything in alphabetical order, and a program that uses what the second unit uses too (B02).
#include "forward.hpp"

#include "two_units.hpp"

int main() {
  const int first = use_everything();
  return first == use_everything_in_second_unit() ? 0 : 1;
}

// Everything in the opposite order (B02).
#include "backward.hpp"

#include "two_units.hpp"

int use_everything_in_second_unit() { return use_everything(); }

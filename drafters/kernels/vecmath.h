// exp and log of sixteen floats, to about one unit in the last place and the same bits on every back end.
//
// The range reductions are the usual ones: exp splits off a power of two, log a power of two and then
// log(1 + f) = f - (f^2/2 - s (f^2/2 + R(s^2))) with s = f / (2 + f). Series are Taylor's.
#pragma once
#include "simd.h"

namespace vecmath {

using simd::F16;

constexpr float kLog2E = 1.44269504088896341f;
// ln 2 in two parts: a small integer times the first is exact.
constexpr float kLn2High = 0.693138122558593750f;
constexpr float kLn2Low = 9.05800061445916e-06f;
// Below it the result would leave the normal range.
constexpr float kExpLowest = -87.0f;
constexpr float kExpHighest = 88.0f;

// e^x for x in [-87, 88]; 0 below, e^88 above, infinity and NaN as they are.
inline F16 exp(F16 x) {
  using namespace simd;
  // The operand order keeps a NaN: min returns its second operand then.
  F16 bounded = min(splat(kExpHighest), x);
  F16 shifted = fma(bounded, splat(kLog2E), splat(kIntegerShift));
  F16 n = sub(shifted, splat(kIntegerShift));
  F16 r = fma(n, splat(-kLn2High), bounded);
  r = fma(n, splat(-kLn2Low), r);
  F16 p = splat(1.0f / 5040);
  p = fma(p, r, splat(1.0f / 720));
  p = fma(p, r, splat(1.0f / 120));
  p = fma(p, r, splat(1.0f / 24));
  p = fma(p, r, splat(1.0f / 6));
  p = fma(p, r, splat(0.5f));
  p = fma(p, mul(r, r), r);
  p = add(p, splat(1.0f));
  // x - x is zero unless x is infinite or NaN.
  F16 scaled = where_less(sub(x, x), splat(1.0f), scale_by_power(p, shifted), x);
  return where_less(x, splat(kExpLowest), zero(), scaled);
}

// ln x for normal positive x (not zero, subnormal, infinite or NaN).
inline F16 log(F16 x) {
  using namespace simd;
  F16 mantissa;
  F16 e = split_power(x, &mantissa);
  F16 f = sub(mantissa, splat(1.0f));
  F16 s = div(f, add(f, splat(2.0f)));
  F16 s2 = mul(s, s);
  F16 r = splat(2.0f / 11);
  r = fma(r, s2, splat(2.0f / 9));
  r = fma(r, s2, splat(2.0f / 7));
  r = fma(r, s2, splat(2.0f / 5));
  r = fma(r, s2, splat(2.0f / 3));
  r = mul(r, s2);
  F16 half_square = mul(mul(f, f), splat(0.5f));
  F16 tail = fma(s, add(half_square, r), mul(e, splat(kLn2Low)));
  return fma(e, splat(kLn2High), sub(f, sub(half_square, tail)));
}

}  // namespace vecmath

"""Four- and eight-bit linears of a drafter: rounding, packing and their kernels."""

"""Decoding in lanes: tokens of one sequence on their way through a looped policy at once."""

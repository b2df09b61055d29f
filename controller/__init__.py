"""Decides, round by round, between plain decoding and speculation. Pure: facts in, plan out."""

__dist__ = "taildraft"

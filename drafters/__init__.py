"""Builds and runs drafters made from the current policy. Torch, never Ray."""

__dist__ = "taildraft"

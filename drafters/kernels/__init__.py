"""Compiled CPU kernels: how they are built, and the vector type they are all written in."""

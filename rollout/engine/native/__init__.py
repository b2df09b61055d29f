"""The native engine: a paged, continuously batched decoder with exact numerics on CPU."""

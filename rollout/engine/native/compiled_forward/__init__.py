"""The forward on a CPU in compiled kernels: decoder, packed weights, reused memory, and the kernels."""

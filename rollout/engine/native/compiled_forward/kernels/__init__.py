"""The compiled forward: C++ headers of one purpose each, the driver they make up, and its C interface."""

"""The forward in torch: reference and fallback; on CUDA with fast attention and recorded graphs."""

"""A small looped policy: Ouro's architecture as transformers trains it, and how the shipped one was made."""

"""One thin adapter per trainer: it speaks that trainer's records and pushes its weights."""

__dist__ = "taildraft"

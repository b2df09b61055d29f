"""Where numbers go: one writer in the driver, JSONL always, other backends beside it."""

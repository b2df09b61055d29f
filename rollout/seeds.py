"""Seeds: a pure function of what a sample is, never of when, where or beside whom it runs."""

from hashlib import blake2b


def sample_seed(*, run_seed: int, trainer_step: int, prompt_uid: str, sample_index: int) -> int:
    """Return the 63-bit seed of one sample: stable across retries, hosts and batch order."""
    key = f"{run_seed}/{trainer_step}/{prompt_uid}/{sample_index}"
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big") >> 1


def round_seed(seed: int, length: int) -> int:
    """Return the seed of the round a sample starts at ``length`` tokens, for noise that must not repeat."""
    digest = blake2b(f"{seed}/round/{length}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1

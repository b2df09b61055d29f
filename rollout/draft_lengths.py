"""How many tokens a command lets drafters draft: what was asked for, or its own choice as far as they go."""

from collections.abc import Sequence

from rollout.errors import ConfigError
from rollout.progress import say


def gammas_to_try(
    asked: Sequence[int], *, usual: Sequence[int], max_gamma: int, setting: str
) -> tuple[int, ...]:
    """Return the draft lengths to try: those ``asked``, or where none are the ``usual`` ones.

    Usual lengths beyond ``drafter.max_gamma`` come to that many and are said so; one that was asked for by
    name, in ``setting``, raises ``ConfigError``: another length in its place would answer another question.
    """
    if asked:
        if max(asked) > max_gamma:
            raise ConfigError(
                f"{setting}: {max(asked)} is more than drafter.max_gamma={max_gamma}; ask for fewer, or "
                "raise drafter.max_gamma"
            )
        return tuple(asked)
    possible = tuple(sorted({min(gamma, max_gamma) for gamma in usual}))
    if max(usual) > max_gamma:
        lengths = ", ".join(map(str, possible))
        say(f"drafts of {lengths} instead of up to {max(usual)} tokens: drafter.max_gamma={max_gamma}")
    return possible

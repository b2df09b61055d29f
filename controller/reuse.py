"""Verification that goes on from what drafts computed: a forward as shares over unlike numbers of rows.

A drafter made of the policy's first loops leaves a share of the policy's forward done (its shape's
``reuse_frac``) for every row it was fed: one per draft token. That share then runs over the other rows only,
and the rest runs over all of them.
"""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple


class Share(NamedTuple):
    """A part of a policy forward that runs over the same rows."""

    frac: float
    """Of the whole forward; together 1, less what no row of the round needs."""

    rows: int
    context_tokens: float
    """Read by all of these rows together."""


class Reused(NamedTuple):
    """Rows that need not run a share again."""

    rows: int = 0
    context_tokens: float = 0.0


NOTHING_REUSED: Mapping[float, Reused] = MappingProxyType({})


def shares_of(rows: int, context_tokens: float, reused: Mapping[float, Reused]) -> list[Share]:
    """Return the shares of a forward of ``rows``; ``reused`` tells by share done which rows have it done."""
    left_rows = rows - sum(r.rows for r in reused.values())
    left_context = context_tokens - sum(r.context_tokens for r in reused.values())
    shares, done = [], 0.0
    for frac, joining in sorted(reused.items()):
        if left_rows > 0:
            shares.append(Share(frac - done, left_rows, left_context))
        done, left_rows = frac, left_rows + joining.rows
        left_context += joining.context_tokens
    shares.append(Share(1.0 - done, rows, context_tokens))
    return shares


def reused_by(
    drafted: Iterable[tuple[str, int, int]], reuse_frac: Callable[[str], float]
) -> Mapping[float, Reused]:
    """Return what drafts leave done; ``drafted`` tells drafter, draft tokens and context of each sequence."""
    out: dict[float, Reused] = {}
    for drafter, gamma, context in drafted:
        frac = reuse_frac(drafter) if gamma else 0.0
        if frac:
            rows, tokens = out.get(frac, Reused())
            out[frac] = Reused(rows + gamma, tokens + gamma * context)
    return out

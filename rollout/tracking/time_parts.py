"""Where a round's time went, as parts that sum to it. Pure: the step's metrics and the report share it."""

from typing import Protocol

from controller.types import PassSeconds

FORWARD = "forward"
CHOICE = "token_choice"
DRAFTING = "drafting"
OTHER = "other"

PARTS = ("linears", "attention", "head", "norms", FORWARD, CHOICE, DRAFTING, OTHER)
"""Of the policy's forward the first four, or ``forward`` where what computes does not split it. ``norms`` is
all of the forward that is none of the three before it; ``drafting`` is everything drafters do, forwards and
choices included; ``other`` is Python: picking rows, calling, committing, and the facts themselves."""


class Timed(Protocol):
    """A round as far as its time is concerned: ``RoundFacts``, or a line of the journal."""

    @property
    def total_s(self) -> float:
        """The whole round."""
        ...

    @property
    def draft_s(self) -> float:
        """Until all drafts are there."""
        ...

    @property
    def policy_pass(self) -> PassSeconds | None:
        """The policy's forward and its choices."""
        ...

    @property
    def draft_pass(self) -> PassSeconds | None:
        """The same of drafters, lanes among them; None where none of them ran a model."""
        ...


def time_parts(timed: Timed) -> dict[str, float]:
    """Return seconds by part, in the order of ``PARTS``; empty when the engine did not say.

    They sum to the round's time, because ``other`` is what is left of it.
    """
    passed = timed.policy_pass
    if passed is None:
        return {}
    parts = {**_pass_parts(passed), DRAFTING: timed.draft_s}
    parts[OTHER] = timed.total_s - sum(parts.values())
    return parts


def drafting_parts(timed: Timed) -> dict[str, float]:
    """Return what ``drafting`` of ``time_parts`` consists of, by the same names; they sum to it.

    ``other`` is then the Python of drafting: looking texts up, gathering rows, calling. A drafter that runs
    no model has nothing else.
    """
    passed = timed.draft_pass
    parts = {} if passed is None else _pass_parts(passed)
    parts[OTHER] = timed.draft_s - sum(parts.values())
    return parts


def _pass_parts(passed: PassSeconds) -> dict[str, float]:
    """Return the parts of forwards and of the choices from their logits."""
    parts: dict[str, float]
    if not passed.forward_s:
        parts = {}  # every sequence decoded in lanes, whose passes are drafting
    elif passed.split is None:
        parts = {FORWARD: passed.forward_s}
    else:
        split = passed.split
        parts = {
            "linears": split.linears_s,
            "attention": split.attention_s,
            "head": split.head_s,
            "norms": split.rest_s,
        }
    return parts | {CHOICE: passed.choose_s}

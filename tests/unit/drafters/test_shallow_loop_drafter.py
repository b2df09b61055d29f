"""The drafter of a looped policy's first loops, as it stands to any policy view."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from drafters.config import DrafterConfig
from drafters.registry import build
from drafters.shallow_loop import ShallowLoopDrafter
from drafters.types import (
    DraftError,
    DraftModel,
    DraftRequest,
    DraftStep,
    LinearWeight,
    QuantizedLinear,
)

HIDDEN, VOCAB = 8, 20


@dataclass(kw_only=True)
class Shape:
    name: str
    out_features: int
    in_features: int = HIDDEN


class Counting:
    """Says the number of its pass."""

    def __init__(self, depth: int) -> None:
        self.depth, self.passes = depth, 0

    def chain(self, requests: Sequence[DraftRequest], gammas: Sequence[int]) -> None:
        return None

    def step(self, requests: Sequence[DraftRequest], drafts: Sequence[Sequence[int]]) -> DraftStep:
        self.passes += 1
        return DraftStep(tokens=[self.passes] * len(requests), probs=None)


@dataclass(kw_only=True)
class Looped:
    """A ``PolicyView`` of which no weight is looked at."""

    loops: int
    policy_version: int = 0
    vocab_size: int = VOCAB
    compiled: bool = True
    chains: bool = True
    asked: list[int] = field(default_factory=list)

    def linears(self) -> Iterator[LinearWeight]:
        yield from (Shape(name="layers.0.qkv", out_features=24), Shape(name="head", out_features=VOCAB))  # type: ignore[misc]

    def with_linears(self, linears: Mapping[str, QuantizedLinear]) -> DraftModel:
        raise AssertionError("its linears are the policy's")

    def shallow(self, depth: int) -> DraftModel:
        self.asked.append(depth)
        return Counting(depth)


def request(gamma: int) -> DraftRequest:
    return DraftRequest(key=gamma, tokens=[1, 2], prompt_tokens=1, gamma=gamma, prompt_uid="p")


@pytest.mark.parametrize("depth", [1, 2, 3, 7, 255])
def test_a_policy_of_too_few_loops_is_refused_with_the_reason(depth: int) -> None:
    name = f"shallow_loop_{depth}"
    drafter = build(name, DrafterConfig())
    with pytest.raises(DraftError, match=f"{name} needs a looped policy of more than {depth} loops"):
        drafter.rebuild(Looped(loops=depth))
    with pytest.raises(DraftError, match="runs its block once"):
        drafter.rebuild(Looped(loops=1))
    assert (drafter.drafter_version, drafter.model, drafter.weight_bytes) == (-1, None, 0)
    with pytest.raises(DraftError, match="has not been built"):
        drafter.propose([request(1)])
    view = Looped(loops=depth + 1, policy_version=3)
    drafter.rebuild(view)
    assert (drafter.drafter_version, view.asked) == (3, [depth])


def test_a_pass_reads_the_body_once_per_loop_and_the_head_once() -> None:
    drafter = ShallowLoopDrafter(DrafterConfig(), depth=2)
    drafter.rebuild(Looped(loops=4))
    assert drafter.weight_bytes == 2 * (2 * 24 * HIDDEN + VOCAB * HIDDEN)


def test_ragged_gammas_drop_out_one_by_one() -> None:
    drafter = ShallowLoopDrafter(DrafterConfig(max_gamma=4), depth=1)
    drafter.rebuild(Looped(loops=2))
    proposal = drafter.propose([request(1), request(9), request(2)])
    assert proposal.tokens == [[1], [1, 2, 3, 4], [1, 2]]
    assert (proposal.passes, proposal.rows, proposal.context_tokens) == (4, 7, 2 * 3 + 3 * 2 + 4 + 5)
    assert proposal.probs is None


def test_a_refused_rebuild_leaves_nothing_of_the_policy_before() -> None:
    drafter = ShallowLoopDrafter(DrafterConfig(), depth=2)
    drafter.rebuild(Looped(loops=4))
    with pytest.raises(DraftError):
        drafter.rebuild(Looped(loops=2))
    assert drafter.model is None


def test_a_draft_of_no_loops_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one loop"):
        ShallowLoopDrafter(DrafterConfig(), depth=0)

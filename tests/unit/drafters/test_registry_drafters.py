"""The registry, and the drafters other tests use."""

import pytest
import torch

from drafters.config import DrafterConfig
from drafters.registry import build, check_names, least_loops, names_for, shallow_loops
from drafters.testing import FailingDrafter, ScriptedDrafter, continue_from, in_order
from drafters.types import Drafter, DraftError, DraftRequest


def request(tokens: list[int], *, gamma: int, key: int = 0) -> DraftRequest:
    return DraftRequest(key=key, tokens=tokens, prompt_tokens=1, gamma=gamma, prompt_uid="p")


@pytest.mark.parametrize("name", [*names_for(4), "shallow_loop_23"])
def test_every_registered_drafter_carries_its_name_and_offers_nothing_before_a_build(name: str) -> None:
    drafter: Drafter = build(name, DrafterConfig(max_gamma=5))
    assert (drafter.name, drafter.drafter_version, drafter.max_gamma) == (name, -1, 5)
    assert drafter.switch_tokens_per_sequence == 0
    assert drafter.weight_bytes == 0


def test_every_default_name_is_registered() -> None:
    check_names(DrafterConfig().names)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    known = "history, shallow_loop_1 to shallow_loop_255, w4, wavefront"
    with pytest.raises(ValueError, match=rf"unknown drafter 'w5'; known: {known}"):
        build("w5", DrafterConfig())


@pytest.mark.parametrize("depth", ["", "0", "01", "-1", "1.5", "256", "1000", "1_1", "x"])
def test_what_is_no_depth_of_a_family_is_an_unknown_name(depth: str) -> None:
    with pytest.raises(ValueError, match=rf"drafter\.names: unknown drafter 'shallow_loop_{depth}'"):
        build(f"shallow_loop_{depth}", DrafterConfig())


def test_a_policy_can_have_a_shallow_loop_for_every_depth_below_its_own() -> None:
    assert names_for(1) == ("history", "w4")
    assert names_for(2) == ("history", "shallow_loop_1", "w4", "wavefront")
    assert shallow_loops(1) == ()
    deepest = shallow_loops(256)
    check_names(deepest)
    assert [least_loops(name) for name in deepest] == list(range(2, 257))
    assert {least_loops(name) for name in names_for(1)} == {1}


def test_a_script_can_force_k_accepted_then_a_rejection() -> None:
    drafter = ScriptedDrafter(continue_from({"p": [10, 11, 12, 13]}, wrong_at={2}))
    assert drafter.propose([request([1], gamma=4)]).tokens == [[10, 11, 13, 13]]
    assert drafter.propose([request([1, 10, 11, 12], gamma=4)]).tokens == [[13]]
    assert [asked[0].tokens for asked in drafter.asked] == [(1,), (1, 10, 11, 12)]


def test_listed_calls_are_answered_in_order_cut_to_gamma_and_then_nothing() -> None:
    row_V = torch.tensor([0.5, 0.5])
    drafter = ScriptedDrafter(
        in_order([[[0, 1], [1]], [[1]]]), probs=lambda _request, tokens: row_V.expand(len(tokens), 2)
    )
    first = drafter.propose([request([1], gamma=1), request([1], gamma=3, key=1)])
    assert first.tokens == [[0], [1]]
    assert first.probs is not None
    assert [tuple(p.shape) for p in first.probs] == [(1, 2), (1, 2)]
    assert drafter.propose([request([1], gamma=3)]).tokens == [[1]]
    assert drafter.propose([request([1], gamma=3)]).tokens == [[]]


def test_a_failing_drafter_fails_in_the_calls_named() -> None:
    drafter = FailingDrafter(failing_proposals={1}, tokens=[5, 6])
    asked = [request([1], gamma=1)]
    assert drafter.propose(asked).tokens == [[5]]
    with pytest.raises(DraftError, match="proposal 1 fails on purpose"):
        drafter.propose(asked)
    assert drafter.propose(asked).tokens == [[5]]
    with pytest.raises(DraftError):
        FailingDrafter().propose(asked)

"""Which states of a draft stand for a row to verify: only those computed from just what it will read."""

import torch
from torch import Tensor

from drafters.types import DraftRequest
from rollout.engine.native.drafts.draft_states import DraftStates

WIDTH = 3


def request(tokens: list[int], key: int = 0) -> DraftRequest:
    return DraftRequest(key=key, tokens=tokens, prompt_tokens=1, gamma=8, prompt_uid="p")


def hidden(*values: float) -> Tensor:
    return torch.tensor(values)[:, None].expand(-1, WIDTH).clone()


def drafted(
    states: DraftStates, tokens: list[int], drafts: list[int], *, depth: int = 1, key: int = 0
) -> None:
    """Run a pass per fed token; the state of the row at index i is ``10 * key + i``."""
    asked = [request(tokens, key)]
    for i in range(len(drafts) + 1):
        states.overwritten(asked, [drafts[:i]])
        states.keep(asked, [drafts[:i]], hidden(10.0 * key + i), depth=depth)


def found(states: DraftStates, tokens: list[int], drafts: list[int], key: int = 0) -> tuple[int, list[float]]:
    depth, numbers = states.standing(key, [tokens[-1], *drafts], start=len(tokens) - 1)
    return depth, states.states()[numbers, 0].tolist() if numbers else []


def test_rows_go_on_from_their_own_states_and_the_last_draft_has_none() -> None:
    states = DraftStates()
    assert not states.any
    drafted(states, [7, 8], [4, 5], depth=2)
    drafted(states, [9], [4], depth=1, key=3)
    assert states.any
    assert found(states, [7, 8], [4, 5, 6]) == (2, [0.0, 1.0, 2.0])
    assert found(states, [9], [4, 5], key=3) == (1, [30.0, 31.0])
    assert found(states, [9], [4], key=4) == (0, [])


def test_states_are_copies_of_what_the_decoder_will_overwrite() -> None:
    states, buffer = DraftStates(), hidden(1.0)
    states.keep([request([7])], [[]], buffer, depth=1)
    buffer.zero_()
    assert found(states, [7], []) == (1, [1.0])


def test_from_the_first_row_of_another_token_on_no_state_stands() -> None:
    states = DraftStates()
    drafted(states, [7, 8], [4, 5, 6])
    assert found(states, [7, 8], [4, 9, 6]) == (1, [0.0, 1.0])
    assert found(states, [7, 8], [4]) == (1, [0.0, 1.0])
    assert found(states, [7, 9], [4, 5, 6]) == (1, [])


def test_a_sequence_that_has_moved_on_goes_on_from_nothing() -> None:
    states = DraftStates()
    drafted(states, [7, 8], [8])
    assert found(states, [7, 8, 8], [8]) == (0, [])
    assert found(states, [8], [8]) == (0, [])


def test_keys_written_by_another_model_end_what_stands() -> None:
    states = DraftStates()
    drafted(states, [7, 8], [4, 5, 6])
    states.overwritten([request([7, 8])], [[4, 5]])
    assert found(states, [7, 8], [4, 5, 6]) == (1, [0.0, 1.0])
    states.overwritten([request([7])], [[]])
    assert found(states, [7, 8], [4, 5, 6]) == (1, [])


def test_a_pass_whose_predecessors_were_not_computed_just_so_leaves_nothing() -> None:
    """It read its keys where nothing, or something else, was written."""
    fifth = hidden(5.0)
    for fed, depth, stands in (([4, 6], 1, True), ([9, 6], 1, False), ([4, 6], 2, False)):
        states = DraftStates()
        drafted(states, [7, 8], [4], depth=1)
        states.keep([request([7, 8])], [fed], fifth, depth=depth)
        assert (5.0 in found(states, [7, 8], fed)[1]) == stands
    states = DraftStates()
    states.keep([request([7, 8])], [[4]], fifth, depth=1)
    assert found(states, [7, 8], [4]) == (0, [])


def test_drafting_again_replaces_what_stood() -> None:
    states = DraftStates()
    drafted(states, [7, 8], [4, 5], depth=1)
    drafted(states, [7, 8], [6], depth=2)
    assert found(states, [7, 8], [4, 5]) == (2, [0.0])
    assert found(states, [7, 8], [6, 5]) == (2, [0.0, 1.0])


def test_nothing_outlives_a_round() -> None:
    states = DraftStates()
    drafted(states, [7, 8], [4, 5])
    states.clear()
    assert not states.any
    assert found(states, [7, 8], [4, 5]) == (0, [])


def test_a_chain_leaves_in_one_go_what_its_passes_leave_one_by_one() -> None:
    """Ragged: the second sequence sits out the last pass. Memory grows under what was kept before."""
    states = DraftStates()
    drafted(states, [1], [2], key=9)
    asked = [request([7, 8], key=0), request([9], key=3)]
    states.overwritten(asked, [[], []])
    memory, first = states.room(5, WIDTH)
    memory[first : first + 5] = hidden(0.0, 30.0, 1.0, 31.0, 2.0)
    states.keep_chain(asked, [[8, 4, 5], [9, 4]], first=first, depth=2)
    assert found(states, [7, 8], [4, 5, 6], key=0) == (2, [0.0, 1.0, 2.0])
    assert found(states, [9], [4, 5], key=3) == (2, [30.0, 31.0])
    assert found(states, [1], [2], key=9) == (1, [90.0, 91.0])

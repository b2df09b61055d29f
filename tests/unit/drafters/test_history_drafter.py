"""Suffix matches: hand-checked examples, a brute-force oracle on random text, and what is kept how long."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pytest

from drafters.config import DrafterConfig
from drafters.history import HistoryDrafter
from drafters.suffixes import CHAIN_PLACES, KEPT_ROLLOUTS, PromptTexts
from drafters.types import DraftModel, DraftRequest, LinearWeight, QuantizedLinear


@dataclass(frozen=True, kw_only=True)
class Version:
    """A ``PolicyView`` of which only the version is looked at."""

    policy_version: int
    vocab_size: int = 100
    compiled: bool = False
    chains: bool = False
    loops: int = 1

    def linears(self) -> Iterator[LinearWeight]:
        raise AssertionError("history reads no weights")

    def with_linears(self, linears: Mapping[str, QuantizedLinear]) -> DraftModel:
        raise AssertionError("history runs no model")


def request(
    tokens: Sequence[int], *, prompt: int, key: int = 0, gamma: int = 4, uid: str = "p"
) -> DraftRequest:
    return DraftRequest(key=key, tokens=tokens, prompt_tokens=prompt, gamma=gamma, prompt_uid=uid)


def drafter(**settings: int) -> HistoryDrafter:
    return HistoryDrafter(DrafterConfig(**settings))  # type: ignore[arg-type]


def drafted(history: HistoryDrafter, asked: DraftRequest) -> list[int]:
    proposal = history.propose([asked])
    assert history.ready([asked]) == [len(proposal.tokens[0])]
    assert (proposal.probs, proposal.passes, proposal.rows, proposal.context_tokens) == (None, 0, 0, 0)
    return proposal.tokens[0]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5, 1]),
        ([1, 2, 3, 4], []),
        ([7], []),
        # Two matches of two tokens: the newer one wins.
        ([1, 2, 3, 1, 2, 4, 9, 1, 2], [4, 9, 1, 2]),
        # The older match is longer, so it wins.
        ([8, 1, 2, 3, 9, 1, 2, 4, 8, 1, 2], [3, 9, 1, 2]),
        # A copy that reaches the end goes on with what it wrote.
        ([5, 6, 5, 6], [5, 6, 5, 6]),
        ([5, 5, 5], [5, 5, 5, 5]),
    ],
)
@pytest.mark.parametrize("prompt", [1, 3])
def test_a_sequence_continues_as_it_did_after_its_longest_then_newest_match(
    tokens: list[int], prompt: int, expected: list[int]
) -> None:
    assert drafted(drafter(), request(tokens, prompt=min(prompt, len(tokens)))) == expected


def test_one_token_is_no_match_by_default_and_is_one_when_asked_for() -> None:
    tokens = [1, 2, 3, 9, 2]
    assert drafted(drafter(), request(tokens, prompt=1)) == []
    assert drafted(drafter(history_min_match=1), request(tokens, prompt=1, gamma=2)) == [3, 9]


def test_gamma_bounds_the_draft_and_zero_drafts_nothing() -> None:
    tokens = [1, 2, 3, 4, 5, 1, 2]
    assert drafted(drafter(max_gamma=2), request(tokens, prompt=1)) == [3, 4]
    assert drafted(drafter(), request(tokens, prompt=1, gamma=1)) == [3]
    assert drafted(drafter(), request(tokens, prompt=1, gamma=0)) == []


def test_a_running_sibling_is_copied_but_not_past_its_end() -> None:
    history = drafter()
    history.ready([request([1, 2, 10, 11, 12], prompt=2, key=1)])
    assert drafted(history, request([1, 2, 10, 11], prompt=2, key=2)) == [12]
    history.forget(2)
    # At the start of its output the sample's suffix is the prompt's own end.
    assert drafted(history, request([1, 2], prompt=2, key=3)) == [10, 11, 12]


def test_other_prompts_are_never_copied_even_under_the_same_name() -> None:
    history = drafter()
    history.finished(request([1, 2, 10, 11, 12], prompt=2, key=1, uid="a"))
    assert drafted(history, request([1, 2, 10], prompt=2, key=2, uid="b")) == []
    assert drafted(history, request([3, 2, 10], prompt=2, key=3, uid="a")) == []
    assert drafted(history, request([1, 2, 10], prompt=2, key=4, uid="a")) == [11, 12]


def test_an_earlier_rollout_is_copied_across_policy_versions_and_remembers_its_own() -> None:
    """A24: old text may be guessed from, never trusted, and says whose it is."""
    history = drafter()
    assert history.drafter_version == -1
    history.rebuild(Version(policy_version=4))
    history.finished(request([1, 2, 10, 11, 12], prompt=2, key=1))
    history.rebuild(Version(policy_version=5))
    assert history.drafter_version == 5
    assert drafted(history, request([1, 2, 10], prompt=2, key=2)) == [11, 12]
    history.finished(request([1, 2, 10, 13], prompt=2, key=2))
    texts = next(iter(history._prompts.values()))
    assert texts.finished_versions == [4, 5]


def test_forgetting_drops_a_running_text_and_spares_a_finished_one() -> None:
    history = drafter()
    history.ready([request([1, 2, 10, 11], prompt=2, key=1)])
    history.finished(request([1, 2, 20, 21], prompt=2, key=2))
    history.forget(1)
    history.forget(2)
    history.forget(99)
    assert drafted(history, request([1, 2, 10], prompt=2, key=3)) == []
    assert drafted(history, request([1, 2, 20], prompt=2, key=4)) == [21]


def test_the_least_recently_used_prompt_is_dropped_first() -> None:
    history = drafter(history_prompts=2)
    for key, uid in enumerate("ab"):
        history.finished(request([1, 2, 10, 11], prompt=2, key=key, uid=uid))
    assert drafted(history, request([1, 2, 10], prompt=2, key=10, uid="a")) == [11]
    history.forget(10)
    history.finished(request([1, 2, 10, 11], prompt=2, key=2, uid="c"))
    assert len(history._prompts) == 2
    found = {
        uid: drafted(history, request([1, 2, 10], prompt=2, key=20 + i, uid=uid))
        for i, uid in enumerate("abc")
    }
    assert found == {"a": [11], "b": [], "c": [11]}


def test_prompts_with_running_samples_are_never_dropped() -> None:
    history = drafter(history_prompts=1)
    for key in range(5):
        history.ready([request([1, 2, 10, 11], prompt=2, key=key, uid=f"p{key}")])
    assert len(history._prompts) == 5
    for key in range(5):
        history.finished(request([1, 2, 10, 11, 12], prompt=2, key=key, uid=f"p{key}"))
    assert len(history._prompts) == 1
    assert not history._prompt_of


def test_a_prompt_keeps_its_newest_rollouts_only_and_frees_the_rest() -> None:
    history = drafter()
    total = 10 * KEPT_ROLLOUTS
    for key in range(total):
        history.finished(request([1, 2, 100 + key, 500 + key], prompt=2, key=key))
    texts = next(iter(history._prompts.values()))
    assert len(texts.finished_versions) == KEPT_ROLLOUTS
    assert len(texts._texts) <= 2 * KEPT_ROLLOUTS + 4
    kept = [
        bool(drafted(history, request([1, 2, 100 + key], prompt=2, key=1000 + key))) for key in range(total)
    ]
    assert kept == [False] * (total - KEPT_ROLLOUTS) + [True] * KEPT_ROLLOUTS


def brute_force(
    own: Sequence[int],
    others: Sequence[Sequence[int]],
    *,
    prompt: int,
    min_match: int,
    max_match: int,
    most: int,
) -> list[int]:
    """The longest match in the prompt, then in other samples' output, then in its own; of equals the last."""
    places = [(own, end) for end in range(min_match, min(prompt, len(own)))]
    for text in (*others, own):
        places += [(text, end) for end in range(max(min_match, prompt), len(text))]
    best, best_length = None, min_match
    for text, end in places:
        length = 0
        while length < min(max_match, end, len(own)) and text[end - 1 - length] == own[-1 - length]:
            length += 1
        if length >= best_length:
            best, best_length = (text, end), length
    if best is None:
        return []
    text, end = best
    if text is not own:
        return list(text[end : end + most])
    grown = list(own)
    for i in range(most):
        grown.append(grown[end + i])
    return grown[len(own) :]


@pytest.mark.parametrize("alphabet", [3, 6, 20])
@pytest.mark.parametrize("seed", range(4))
def test_a_growing_sequence_is_continued_as_brute_force_says(alphabet: int, seed: int) -> None:
    rng = random.Random(seed)
    history = drafter(history_max_match=6)
    tokens = [rng.randrange(alphabet) for _ in range(rng.randrange(1, 12))]
    prompt = len(tokens)
    # Runs of two stay under the search bound in an alphabet of three: 150 / 9 places on average.
    for _ in range(140):
        expected = brute_force(tokens, [], prompt=prompt, min_match=2, max_match=6, most=4)
        assert drafted(history, request(tokens, prompt=prompt)) == expected
        tokens.extend(rng.randrange(alphabet) for _ in range(rng.randrange(1, 3)))
        history.ready([request(tokens, prompt=prompt)])
        if len(tokens) > 150:
            break


@pytest.mark.parametrize(
    ("start", "max_match"), [(6, 5), (2, 16)], ids=["", "texts shorter than a match may be"]
)
@pytest.mark.parametrize("seed", range(4))
def test_siblings_and_earlier_rollouts_are_searched_as_brute_force_says(
    seed: int, start: int, max_match: int
) -> None:
    rng = random.Random(100 + seed)
    history = drafter(history_max_match=max_match)
    prompt = [rng.randrange(5) for _ in range(start)]
    others = []
    for key in range(4):
        text = prompt + [rng.randrange(5) for _ in range(rng.randrange(1, 30))]
        if key % 2 == 0:
            history.finished(request(text, prompt=start, key=key))
        else:
            history.ready([request(text, prompt=start, key=key)])
        others.append(text)
    own = list(prompt)
    for _ in range(40):
        assert drafted(history, request(own, prompt=start, key=9)) == brute_force(
            own, others, prompt=start, min_match=2, max_match=max_match, most=4
        )
        own.append(rng.randrange(5))


def test_a_text_that_is_the_start_of_another_is_continued_by_it_wherever_else_it_stands() -> None:
    texts = PromptTexts([1, 2], min_match=2, max_match=16)
    # Indexed first, so that its second 3, 4 is looked at after the whole of the third text was found.
    texts.follow(1, [1, 2, 3, 4, 9, 3, 4, 8], policy_version=0)
    texts.finish(1)
    texts.follow(2, [1, 2, 3, 4, 7], policy_version=0)
    texts.follow(3, [1, 2, 3, 4], policy_version=0)
    assert texts.continuation(3, 4) == [7]


def test_text_that_grew_while_nobody_asked_is_searched_once_somebody_does() -> None:
    rng = random.Random(5)
    asked, late = drafter(history_max_match=5), drafter(history_max_match=5)
    prompt = [rng.randrange(5) for _ in range(6)]
    texts = {key: list(prompt) for key in range(3)}
    for step in range(60):
        requests = []
        for key, text in texts.items():
            text.append(rng.randrange(5))
            requests.append(request(text, prompt=6, key=key, uid=f"p{key}"))
        told = asked.ready(requests)
        if step % 20 == 19:
            assert late.propose(requests).tokens == asked.propose(requests).tokens
            assert late.ready(requests) == told
            assert any(told or ())


def test_a_search_visits_a_bounded_number_of_places() -> None:
    texts = PromptTexts([0], min_match=2, max_match=16)
    # The one long match is followed by more short ones than a search visits.
    tokens = [0, 7, 8, 1, 2, 50, *[3, 1, 2] * (CHAIN_PLACES + 5), 7, 8, 1, 2]
    texts.follow(1, tokens, policy_version=0)
    assert texts.continuation(1, 1) == [7]
    texts.follow(2, [0, 7, 8, 1, 2, 50, *[3, 1, 2] * 5, 7, 8, 1, 2], policy_version=0)
    texts.drop(1)
    assert texts.continuation(2, 1) == [50]

"""What both choosers promise, and that the compiled one is the reference bit for bit in its tokens."""

import math
import random
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from rollout.engine.chooser_compiled import CompiledChooser
from rollout.engine.chooser_torch import TorchChooser
from rollout.engine.target import Choice, Chooser, TargetRow, logit_edits
from rollout.types import SamplingParams

CHOOSERS: dict[str, Chooser] = {"torch": TorchChooser(), "compiled": CompiledChooser(threads=2)}


@pytest.fixture(params=sorted(CHOOSERS))
def chooser(request: pytest.FixtureRequest) -> Chooser:
    return CHOOSERS[request.param]


def row(
    *,
    seed: int = 0,
    position: int = 1,
    counts: Mapping[int, int] | None = None,
    prompt: frozenset[int] = frozenset(),
    banned: tuple[int, ...] = (),
    **params: object,
) -> TargetRow:
    return TargetRow(
        seed=seed,
        position=position,
        params=SamplingParams.from_mapping(params),
        output_counts=counts or {},
        prompt_tokens=prompt,
        banned=banned,
    )


def logits_of(probs: list[float]) -> Tensor:
    return torch.tensor([probs], dtype=torch.float32).log()


def random_row(rng: random.Random, vocab_size: int) -> TargetRow:
    params: dict[str, object] = {"temperature": rng.choice([0, 0.3, 0.7, 1, 1, 1.5])}
    if rng.random() < 0.3:
        params["top_k"] = rng.choice([1, 5, 50, 400])
    if rng.random() < 0.3:
        params["top_p"] = rng.choice([0.1, 0.5, 0.9, 0.99])
    if rng.random() < 0.3:
        params["min_p"] = rng.choice([0.01, 0.1, 0.5])
    if rng.random() < 0.3:
        params |= {"repetition_penalty": 1.3, "presence_penalty": 0.3, "frequency_penalty": 0.2}
    if rng.random() < 0.2:
        params["logit_bias"] = {3: 2.0, 5: -math.inf}
    return row(
        seed=rng.getrandbits(63),
        position=rng.randrange(5000),
        counts={1: 2, 7: 1},
        prompt=frozenset({2, vocab_size - 1}),
        banned=(4,) if rng.random() < 0.1 else (),
        **params,
    )


def random_batch(
    seed: int, *, rows: int, vocab_size: int, ties: bool = False
) -> tuple[Tensor, list[TargetRow]]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab_size, generator=generator) * 3
    if ties:
        logits = (logits * 4).round() / 4
    rng = random.Random(seed)
    return logits, [random_row(rng, vocab_size) for _ in range(rows)]


def close(a: Choice, b: Choice, tolerance: float) -> bool:
    pairs = (
        (a.raw_logprob, b.raw_logprob),
        (a.scaled_logprob, b.scaled_logprob),
        (a.target_logprob, b.target_logprob),
        (a.kept_logmass, b.kept_logmass),
    )
    return a.token == b.token and all(x == y or abs(x - y) < tolerance for x, y in pairs)


# ---- the target distribution --------------------------------------------------------------------


def test_top_k_keeps_exactly_k_and_ties_by_lowest_id(chooser: Chooser) -> None:
    probs = chooser.probs(torch.tensor([[1.0, 2.0, 1.0, 1.0]]), [row(top_k=2)])[0]
    assert (probs > 0).tolist() == [True, True, False, False]


def test_top_p_keeps_the_smallest_prefix_that_reaches_it(chooser: Chooser) -> None:
    logits = logits_of([0.25, 0.4, 0.05, 0.3])
    kept = [(chooser.probs(logits, [row(top_p=p)])[0] > 0).tolist() for p in (0.3, 0.6, 0.9, 0.99)]
    assert kept[0] == [False, True, False, False]
    assert kept[1] == [False, True, False, True]
    assert kept[2] == [True, True, False, True]
    assert kept[3] == [True, True, True, True]


def test_top_p_breaks_ties_by_lowest_id(chooser: Chooser) -> None:
    probs = chooser.probs(torch.zeros(1, 4), [row(top_p=0.6)])[0]
    assert (probs > 0).tolist() == [True, True, True, False]


def test_top_p_applies_to_what_top_k_kept(chooser: Chooser) -> None:
    """Of (.4, .3, .2, .1) top-k 2 leaves (4/7, 3/7), so top-p .55 keeps one; without top-k it keeps two."""
    logits = logits_of([0.4, 0.3, 0.2, 0.1])
    both = chooser.probs(logits, [row(top_k=2, top_p=0.55)])[0]
    alone = chooser.probs(logits, [row(top_p=0.55)])[0]
    assert [int((p > 0).sum()) for p in (both, alone)] == [1, 2]


def test_min_p_is_relative_to_the_most_probable_token(chooser: Chooser) -> None:
    probs = chooser.probs(logits_of([0.5, 0.3, 0.15, 0.05]), [row(min_p=0.25)])[0]
    assert (probs > 0).tolist() == [True, True, True, False]
    assert float(probs.sum()) == pytest.approx(1.0, abs=1e-12)


def test_min_p_of_one_keeps_all_that_tie_for_the_first(chooser: Chooser) -> None:
    probs = chooser.probs(torch.tensor([[2.0, 1.0, 2.0]]), [row(min_p=1.0)])[0]
    assert probs.tolist() == [0.5, 0.0, 0.5]


def test_filters_see_the_tempered_distribution(chooser: Chooser) -> None:
    """At temperature 2 the odds 16:1 become 4:1."""
    probs = chooser.probs(logits_of([16 / 17, 1 / 17]), [row(temperature=2.0)])[0]
    torch.testing.assert_close(probs, torch.tensor([0.8, 0.2], dtype=torch.float64), atol=1e-6, rtol=0)


def test_penalties_follow_their_definitions(chooser: Chooser) -> None:
    logits = torch.tensor([[1.0, -1.0, 2.0, 0.5]])
    target = row(
        counts={2: 3},
        prompt=frozenset({0, 1}),
        repetition_penalty=2.0,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias={3: 1.5},
    )
    expected = torch.tensor([0.5, -2.0, 1.0 - 0.1 - 0.6, 2.0], dtype=torch.float64).softmax(-1)
    torch.testing.assert_close(chooser.probs(logits, [target])[0], expected, atol=1e-6, rtol=0)


def test_bans_and_minus_infinity_bias_remove_tokens(chooser: Chooser) -> None:
    logits = torch.tensor([[5.0, 1.0, 1.0]])
    target = row(banned=(0,), logit_bias={1: -math.inf})
    assert chooser.probs(logits, [target])[0].tolist() == [0.0, 0.0, 1.0]
    assert chooser.choose(logits, [target])[0].token == 2


def test_a_ban_beats_any_bias() -> None:
    edits = logit_edits(row(banned=(1,), logit_bias={1: 100.0, 0: 1.0}))
    assert edits.ids == [0, 1]
    assert edits.addends == [1.0, -math.inf]


def test_greedy_takes_the_lowest_id_of_the_best_whatever_the_seed(chooser: Chooser) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0]])
    choices = [chooser.choose(logits, [row(seed=s, temperature=0, top_k=2)])[0] for s in range(5)]
    assert {c.token for c in choices} == {1}
    assert choices[0].target_logprob == 0.0
    assert choices[0].kept_logmass == 0.0
    assert choices[0].scaled_logprob == choices[0].raw_logprob
    assert chooser.probs(logits, [row(temperature=0)])[0].tolist() == [0.0, 1.0, 0.0]


# ---- logprobs -----------------------------------------------------------------------------------


def test_the_three_logprobs_mean_what_they_say(chooser: Chooser) -> None:
    logits, _ = random_batch(1, rows=1, vocab_size=300)
    target = row(temperature=0.7, top_k=20, presence_penalty=1.0, counts={5: 1})
    choice = chooser.choose(logits, [target])[0]
    exact = logits[0].double()
    edited = exact.clone()
    edited[5] -= 1.0
    kept = (edited / 0.7).sort(descending=True).values[:20]
    log_kept = kept.logsumexp(0)
    assert choice.raw_logprob == pytest.approx(float(exact.log_softmax(0)[choice.token]), abs=2e-6)
    assert choice.scaled_logprob == pytest.approx(float((exact / 0.7).log_softmax(0)[choice.token]), abs=2e-6)
    assert choice.target_logprob == pytest.approx(float(edited[choice.token] / 0.7 - log_kept), abs=2e-6)
    assert choice.kept_logmass == pytest.approx(float(log_kept - (edited / 0.7).logsumexp(0)), abs=2e-6)


def test_kept_mass_is_exactly_one_without_filters_or_when_they_cut_nothing(chooser: Chooser) -> None:
    logits, _ = random_batch(2, rows=3, vocab_size=500)
    rows = [row(), row(top_k=500), row(presence_penalty=2.0, counts={1: 1}, banned=(3,))]
    assert [c.kept_logmass for c in chooser.choose(logits, rows)] == [0.0, 0.0, 0.0]


def test_scoring_the_chosen_token_repeats_its_choice(chooser: Chooser) -> None:
    logits, rows = random_batch(3, rows=40, vocab_size=700)
    choices = chooser.choose(logits, rows)
    assert chooser.score(logits, rows, [c.token for c in choices]) == choices


def test_a_token_the_filters_dropped_scores_minus_infinity(chooser: Chooser) -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    scored = chooser.score(
        logits.repeat(3, 1), [row(top_k=2), row(temperature=0), row(banned=(2,))], [2, 2, 2]
    )
    assert [c.target_logprob for c in scored] == [-math.inf] * 3
    assert all(math.isfinite(c.raw_logprob) for c in scored)


def test_target_logprobs_are_those_of_probs(chooser: Chooser) -> None:
    logits, rows = random_batch(4, rows=40, vocab_size=600)
    probs = chooser.probs(logits, rows)
    for i, choice in enumerate(chooser.choose(logits, rows)):
        assert math.exp(choice.target_logprob) == pytest.approx(float(probs[i, choice.token]), abs=1e-6)


def test_without_logprobs_the_token_is_the_same(chooser: Chooser) -> None:
    logits, rows = random_batch(5, rows=30, vocab_size=900)
    with_them = chooser.choose(logits, rows)
    without = chooser.choose(logits, rows, logprobs=False)
    assert [c.token for c in with_them] == [c.token for c in without]
    assert {(c.raw_logprob, c.target_logprob, c.kept_logmass) for c in without} == {(0.0, 0.0, 0.0)}


# ---- bad rows and bad calls ---------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", [0, 100, 1030])
def test_a_logit_that_is_not_finite_marks_its_row_alone(chooser: Chooser, bad: float, column: int) -> None:
    logits = torch.zeros(3, 1031)
    logits[1, column] = bad
    rows = [row(), row(top_p=0.9), row(temperature=0)]
    assert [c.finite for c in chooser.choose(logits, rows)] == [True, False, True]
    assert [c.finite for c in chooser.score(logits, rows, [0, 0, 0])] == [True, False, True]
    assert chooser.probs(logits, rows).isnan().any(-1).tolist() == [False, True, False]


def test_a_row_with_every_token_banned_keeps_none(chooser: Chooser) -> None:
    choice = chooser.choose(torch.zeros(1, 3), [row(banned=(0, 1, 2))])[0]
    assert not choice.finite


def test_wrong_calls_are_refused(chooser: Chooser) -> None:
    logits = torch.zeros(1, 4)
    with pytest.raises(ValueError, match="rows"):
        chooser.choose(logits, [row(), row()])
    with pytest.raises(ValueError, match="vocabulary"):
        chooser.score(logits, [row()], [4])
    with pytest.raises(ValueError, match="vocabulary"):
        chooser.choose(logits, [row(logit_bias={4: 1.0})])


def test_the_compiled_chooser_refuses_what_it_would_misread() -> None:
    with pytest.raises(ValueError, match="float32"):
        CHOOSERS["compiled"].choose(torch.zeros(1, 4, dtype=torch.float64), [row()])
    with pytest.raises(ValueError, match="next to each other"):
        CHOOSERS["compiled"].choose(torch.zeros(4, 3).t(), [row()] * 3)


def test_no_rows_is_no_work(chooser: Chooser) -> None:
    assert chooser.choose(torch.zeros(0, 5), []) == []
    assert tuple(chooser.probs(torch.zeros(0, 5), []).shape) == (0, 5)


# ---- independence and agreement -----------------------------------------------------------------


def test_a_row_does_not_depend_on_its_batch_mates(chooser: Chooser) -> None:
    logits, rows = random_batch(6, rows=37, vocab_size=2100)
    together = chooser.choose(logits, rows)
    alone = [chooser.choose(logits[i : i + 1], rows[i : i + 1])[0] for i in range(len(rows))]
    assert together == alone
    turned = chooser.choose(logits.flip(0), rows[::-1])
    assert turned[::-1] == together


def test_logits_are_left_alone_and_strided_rows_are_read_in_place(chooser: Chooser) -> None:
    logits, rows = random_batch(7, rows=8, vocab_size=100)
    wide = torch.full((8, 160), 9.0)
    wide[:, :100] = logits
    assert chooser.choose(wide[:, :100], rows) == chooser.choose(logits, rows)
    assert torch.equal(wide[:, :100], logits)


@pytest.mark.parametrize("vocab_size", [9, 64, 1024, 3333])
def test_bits_depend_on_neither_threads_nor_instruction_set(vocab_size: int) -> None:
    logits, rows = random_batch(8, rows=24, vocab_size=vocab_size)
    reference = CHOOSERS["compiled"].choose(logits, rows)
    for threads, defines in ((1, ()), (5, ()), (2, ("TAILDRAFT_AVX2",)), (2, ("TAILDRAFT_GENERIC",))):
        other = CompiledChooser(threads=threads, defines=defines)
        assert other.choose(logits, rows) == reference
        few = [other.choose(logits[i : i + 1], rows[i : i + 1])[0] for i in range(3)]
        assert few == reference[:3]


@pytest.mark.parametrize(("vocab_size", "ties"), [(9, True), (200, False), (1500, True), (20_000, False)])
def test_the_compiled_chooser_picks_the_reference_tokens(vocab_size: int, ties: bool) -> None:
    logits, rows = random_batch(9, rows=60, vocab_size=vocab_size, ties=ties)
    reference = CHOOSERS["torch"].choose(logits, rows)
    compiled = CHOOSERS["compiled"].choose(logits, rows)
    assert all(close(a, b, 2e-6) for a, b in zip(reference, compiled, strict=True))
    gap = (CHOOSERS["torch"].probs(logits, rows) - CHOOSERS["compiled"].probs(logits, rows)).abs().max()
    assert gap < 1e-6


def test_extreme_temperatures_and_logits_stay_in_range(chooser: Chooser) -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0, 1.0]])
    for temperature in (1e-300, 1e-6, 1e6, 1e300):
        choice = chooser.choose(logits, [row(temperature=temperature)])[0]
        assert choice.finite
        assert not math.isnan(choice.target_logprob)
    assert chooser.choose(logits, [row(temperature=1e-300)])[0].token == 0


def test_streams_draw_different_noise(chooser: Chooser) -> None:
    rows = [row(seed=s) for s in range(64)]
    tokens = [[c.token for c in chooser.choose(torch.zeros(64, 50), rows, stream=s)] for s in (0, 1)]
    assert sum(a == b for a, b in zip(*tokens, strict=True)) < 12

"""Coupled verification: whatever drafts, the tokens and their logprobs are those of AR, bit for bit."""

import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from rollout.engine.chooser_compiled import CompiledChooser
from rollout.engine.chooser_torch import TorchChooser
from rollout.engine.law_check import TinyModel
from rollout.engine.target import Choice, Chooser, TargetRow
from rollout.engine.verify import verify_coupled
from rollout.types import SamplingParams

pytestmark = pytest.mark.lossless

VOCAB = 40
LENGTH = 24
PROMPT = frozenset({0, 3})
PARAMS = {
    "plain": SamplingParams(),
    "greedy": SamplingParams(temperature=0),
    "cold": SamplingParams(temperature=0.4),
    "filters": SamplingParams(temperature=1.2, top_k=12, top_p=0.9, min_p=0.02),
    "penalties": SamplingParams(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    "min_tokens": SamplingParams(min_tokens=9, logit_bias={5: 3.0}),
}
CHOOSERS: dict[str, Chooser] = {"torch": TorchChooser(), "compiled": CompiledChooser(threads=1)}

Draft = Callable[[tuple[int, ...], int], list[int]]


def target_row(prefix: tuple[int, ...], params: SamplingParams, seed: int, *, shift: int = 0) -> TargetRow:
    return TargetRow(
        seed=seed,
        position=len(PROMPT) + len(prefix) + shift,
        params=params,
        output_counts=Counter(prefix),
        prompt_tokens=PROMPT,
        banned=(5,) if len(prefix) < params.min_tokens else (),
    )


class Sampler:
    """One sequence on a tiny target, plain or with drafts."""

    def __init__(self, chooser: Chooser, params: SamplingParams, *, seed: int) -> None:
        self.chooser, self.params, self.seed = chooser, params, seed
        self.target = TinyModel(vocab_size=VOCAB, seed=100 + seed)
        self.accepted = 0

    def choices(self, prefixes: list[tuple[int, ...]], *, shift: int = 0) -> list[Choice]:
        logits = torch.stack([self.target.logits(p) for p in prefixes]).float()
        rows = [target_row(p, self.params, self.seed, shift=shift) for p in prefixes]
        return self.chooser.choose(logits, rows)

    def plain(self) -> list[Choice]:
        out: list[Choice] = []
        while len(out) < LENGTH:
            out += self.choices([tuple(c.token for c in out)])
        return out

    def with_drafts(
        self, draft: Draft, gamma: Callable[[tuple[int, ...]], int], *, shift: int = 0
    ) -> list[Choice]:
        out: list[Choice] = []
        while len(out) < LENGTH:
            prefix = tuple(c.token for c in out)
            drafts = draft(prefix, gamma(prefix))
            found = self.choices([(*prefix, *drafts[:i]) for i in range(len(drafts) + 1)], shift=shift)
            verdict = verify_coupled(drafts, found)
            self.accepted += verdict.accepted
            out += [choice for choice, _ in verdict.tokens]
        return out[:LENGTH]


def drafter(chooser: Chooser, params: SamplingParams, *, seed: int, closeness: float) -> Draft:
    """A drafter whose logits mix the target's with its own, under the target's noise."""
    target = TinyModel(vocab_size=VOCAB, seed=100 + seed)
    own = TinyModel(vocab_size=VOCAB, seed=900 + seed)

    def draft(prefix: tuple[int, ...], gamma: int) -> list[int]:
        drafts: list[int] = []
        for _ in range(gamma):
            here = (*prefix, *drafts)
            logits = closeness * target.logits(here) + (1 - closeness) * own.logits(here)
            row = target_row(here, params, seed)
            drafts.append(chooser.choose(logits.float().unsqueeze(0), [row], logprobs=False)[0].token)
        return drafts

    return draft


@pytest.mark.parametrize("params", sorted(PARAMS))
@pytest.mark.parametrize("name", sorted(CHOOSERS))
def test_no_draft_length_or_drafter_changes_a_token_or_a_bit_of_its_logprobs(name: str, params: str) -> None:
    chooser = CHOOSERS[name]
    for seed, closeness in ((1, 0.95), (2, 0.6), (3, 0.0)):
        sampler = Sampler(chooser, PARAMS[params], seed=seed)
        expected = sampler.plain()
        draft = drafter(chooser, PARAMS[params], seed=seed, closeness=closeness)
        for gamma in range(1, 9):
            assert sampler.with_drafts(draft, lambda _, g=gamma: g) == expected  # type: ignore[misc]


def test_a_drafter_equal_to_the_policy_is_always_right() -> None:
    for params in PARAMS.values():
        chooser = CHOOSERS["compiled"]
        sampler = Sampler(chooser, params, seed=4)
        expected = sampler.plain()
        assert sampler.with_drafts(drafter(chooser, params, seed=4, closeness=1.0), lambda _: 5) == expected
        assert sampler.accepted == 5 * (LENGTH // 6)


def test_draft_lengths_that_follow_the_drafts_are_exact_too() -> None:
    """Under fixed noise no policy can bias the text, not even one that looks at what it then discards."""
    chooser = CHOOSERS["torch"]
    sampler = Sampler(chooser, PARAMS["plain"], seed=5)
    expected = sampler.plain()
    honest = drafter(chooser, PARAMS["plain"], seed=5, closeness=0.8)

    def trimmed(prefix: tuple[int, ...], gamma: int) -> list[int]:
        drafts = honest(prefix, gamma)
        return drafts[: next((i for i, token in enumerate(drafts) if token % 3 == 0), gamma)]

    assert sampler.with_drafts(trimmed, lambda _: 6) == expected
    assert sampler.accepted > 0


def test_planted_drafts_of_every_length_end_where_they_stop_being_the_targets() -> None:
    """Drafts copy AR's own text and err at one planted place: exactly the tokens before it are kept."""
    chooser = CHOOSERS["compiled"]
    sampler = Sampler(chooser, PARAMS["filters"], seed=6)
    text = [c.token for c in sampler.plain()]
    for wrong_at in range(7):
        drafts = text[:6]
        if wrong_at < 6:
            drafts[wrong_at] = (drafts[wrong_at] + 1) % VOCAB
        found = sampler.choices([tuple(drafts[:i]) for i in range(7)])
        verdict = verify_coupled(drafts, found)
        assert verdict.accepted == wrong_at
        assert [c.token for c, _ in verdict.tokens] == text[: wrong_at + 1]
        assert verdict.tokens[-1][1] == ("bonus" if wrong_at == 6 else "corrected")


def test_random_drafts_change_nothing() -> None:
    rng = random.Random(0)
    sampler = Sampler(CHOOSERS["compiled"], PARAMS["penalties"], seed=7)
    expected = sampler.plain()
    noise = sampler.with_drafts(
        lambda _, g: [rng.randrange(VOCAB) for _ in range(g)], lambda _: rng.randint(1, 8)
    )
    assert noise == expected


def test_noise_shifted_by_one_position_is_told_apart() -> None:
    """The planted error: verification that counts positions differently from AR."""
    chooser = CHOOSERS["compiled"]
    sampler = Sampler(chooser, PARAMS["plain"], seed=8)
    draft = drafter(chooser, PARAMS["plain"], seed=8, closeness=0.9)
    assert sampler.with_drafts(draft, lambda _: 4, shift=1) != sampler.plain()


def test_a_draft_kept_without_asking_the_target_is_told_apart() -> None:
    """The planted error: trusting a close drafter's first token."""
    chooser = CHOOSERS["compiled"]
    sampler = Sampler(chooser, PARAMS["plain"], seed=9)
    draft = drafter(chooser, PARAMS["plain"], seed=9, closeness=0.7)
    expected = [c.token for c in sampler.plain()]
    out: tuple[int, ...] = ()
    while len(out) < LENGTH:
        trusted = (*out, *draft(out, 1))
        out = (*trusted, *(c.token for c in sampler.choices([trusted])))
    assert list(out[:LENGTH]) != expected


@pytest.mark.parametrize("params", ["plain", "filters", "penalties"])
def test_a_resumed_prefix_continues_the_same_text(params: str) -> None:
    sampler = Sampler(CHOOSERS["compiled"], PARAMS[params], seed=10)
    text = tuple(c.token for c in sampler.plain())
    for cut in (1, 9, 17):
        assert [c.token for c in sampler.choices([text[:cut]])] == [text[cut]]

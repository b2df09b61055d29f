"""Looped drafts cell by cell: draft lengths, row budgets, ragged prompts, and every place a draft can fall.

Proposals are forced (``ForcedChooser``), so a cell happens when a test says so and not when a policy errs.
After each round every sequence must stand where plain decoding stands: frontier, tokens, and the bits of all
planes up to the frontier. One engine goes through many cells, each sequence beginning with another one.

Compiled kernels and the row-by-row float64 reference are held to equal bits, logprobs included. float64 that
computes rows together sums in another order: it is held to 1e-12, a million times less than any error of the
engine's makes.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch

from controller.types import Assignment, RoundFacts, RoundLoad, RoundPlan
from drafters.config import DrafterConfig
from drafters.registry import build, shallow_loops
from drafters.wavefront import WAVEFRONT
from rollout.config import EngineConfig
from rollout.engine.native.committer import Committer
from rollout.engine.native.compiled_forward.decoder import CompiledKV
from rollout.engine.native.engine import NativeEngine
from rollout.engine.native.lanes import lane_passes
from rollout.engine.native.rows import PAGE_TOKENS
from rollout.engine.native.torch_forward.attention import TorchKV
from rollout.engine.native.work import Work
from rollout.evaluation.forced import Chain
from rollout.evaluation.forced import ForcedChooser as ChainChooser
from rollout.testing import TinyPolicy, tiny_looped_policy
from rollout.testing_forced import DraftScript, ForcedChooser
from rollout.testing_native import ar_plan, fixed_plan, requests_for, text_of, tiny_chooser, tiny_engine
from rollout.testing_planes import NativeRun, assert_stands_as_native, native_runs
from rollout.types import Completion, Request, SamplingParams

pytestmark = pytest.mark.lossless

VOCAB, LOOPS = 48, 4
GAMMAS = (1, 2, 4, 8)
CELLS = [(gamma, wrong_at) for gamma in reversed(GAMMAS) for wrong_at in range(gamma + 1)]
"""Draft length, and the first draft that is wrong; the length itself where none is. Long drafts come first:
the end of a text has no room for them."""

PARAMS = (
    {},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 7, "top_p": 0.9},
)
"""The second is edited by what only Python knows, so it drafts pass by pass beside compiled calls."""

Arithmetic = Literal["compiled", "float64", "float64 together"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What computes, and how much of it may run at once."""

    arithmetic: Arithmetic
    budget: int
    """Most sequences that decode, and most prompt rows beside them."""

    @property
    def compiled(self) -> bool:
        return self.arithmetic == "compiled"

    @property
    def tolerance(self) -> float:
        return 1e-12 if self.arithmetic == "float64 together" else 0.0

    @property
    def policy(self) -> TinyPolicy:
        return tiny_looped_policy(loops=LOOPS, layers=2 if self.compiled else 1)

    def requests(self) -> list[Request]:
        """Return enough of them to fill the budget and to take places that others left."""
        count, tokens = {1: (4, 28), 3: (5, 24), 32: (34, 14)}[self.budget]
        params = [SamplingParams(max_tokens=tokens, ignore_eos=True, **p) for p in PARAMS]  # type: ignore[arg-type]
        return requests_for(vocab=VOCAB, prompts=count, params=params, seed=self.budget, longest_prompt=12)

    def engine(
        self,
        *,
        script: DraftScript | None,
        drafter: str,
        depth: int = 1,
        passes: int = 1,
        verify: Literal["coupled", "block"] = "coupled",
    ) -> NativeEngine:
        chooser = tiny_chooser(compiled=self.compiled)
        settings = EngineConfig(
            max_batch=self.budget, prefill_chunk_tokens=self.budget, max_context_tokens=128, verify=verify
        )
        config = DrafterConfig(wavefront_depth=depth, wavefront_passes=passes)
        return tiny_engine(
            self.policy,
            [build(drafter, config)],
            compiled=self.compiled,
            exact=self.arithmetic != "float64 together",
            config=settings,
            chooser=chooser if script is None else ForcedChooser(chooser, script),
        )


SETTINGS = [
    pytest.param(Setting(arithmetic=arithmetic, budget=budget), id=f"{arithmetic}, {budget} rows")
    for arithmetic, budget in (
        ("compiled", 1),
        ("compiled", 3),
        ("compiled", 32),
        ("float64 together", 1),
        ("float64", 3),
        ("float64 together", 32),
    )
]


@functools.cache
def natives_of(setting: Setting) -> dict[int, NativeRun]:
    """Return what plain decoding makes of a setting's requests, under no budget that matters."""
    engine = tiny_engine(
        setting.policy,
        compiled=setting.compiled,
        exact=setting.arithmetic != "float64 together",
        config=EngineConfig(max_batch=8, max_context_tokens=128),
    )
    return native_runs(engine, setting.requests())


@pytest.fixture(autouse=True)
def proposals_in_calls_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let lanes that Python advances ask for proposals apart, so that they can be told from choices."""
    monkeypatch.setattr(lane_passes, "ONE_CALL_VOCAB", 0)


Boundary = Callable[[RoundLoad, RoundFacts], None]


def run_forced(
    setting: Setting,
    engine: NativeEngine,
    plan: Callable[[RoundLoad], RoundPlan],
    *,
    after: Boundary = lambda _load, _facts: None,
) -> dict[int, Completion]:
    """Run a setting's requests, each round held against plain decoding; return completions by seed."""
    natives, seeds = natives_of(setting), {r.key: r.seed for r in setting.requests()}
    done: dict[int, Completion] = {}
    compared = 0
    for request in setting.requests():
        engine.add(request)
    while engine.busy:
        load = engine.load()
        outcome = engine.run_round(plan(load))
        assert not any(d.failures for d in outcome.facts.drafts)
        assert not engine._state.draft_states.any
        after(load, outcome.facts)
        compared += assert_stands_as_native(engine, natives, tolerance=setting.tolerance)
        done |= {seeds[c.prompt_uid, c.sample_index]: c for c in outcome.completions}
    assert compared > 150
    assert_texts_are_native(setting, done)
    engine.close()
    gauges = engine.gauges()
    assert (gauges["engine/kv_pages_used"], gauges["engine/lanes"]) == (0, 0)
    return done


def assert_texts_are_native(setting: Setting, done: Mapping[int, Completion]) -> None:
    natives = natives_of(setting)
    assert done.keys() == natives.keys()
    for seed, completion in done.items():
        found, native = text_of(completion), natives[seed].text
        assert found.ids == native.ids
        if setting.tolerance:
            for mine, wanted in zip(found.logprobs, native.logprobs, strict=True):
                assert mine == pytest.approx(wanted, abs=setting.tolerance)
        else:
            assert found == native


# ---- shallow loops --------------------------------------------------------------------------------


class CellPlan:
    """Takes every sequence from cell to cell, a cell a round, and hears whether it went as the cell says.

    Of n sequences each takes every n-th cell, so that together they take all before any takes one again.
    """

    def __init__(self, engine: NativeEngine, script: DraftScript, drafter: str, *, sequences: int) -> None:
        self.seen = Counter[tuple[int, int]]()
        self._running, self._script, self._drafter = engine._scheduler.running, script, drafter
        self._stride = sequences
        self._next: dict[int, int] = {}
        self._cells: dict[int, tuple[int, int]] = {}
        """By sequence key, of the round under way."""

    def plan(self, load: RoundLoad) -> RoundPlan:
        assignments = {}
        self._cells = {}
        for s in load.sequences:
            seed = self._running[s.key].request.seed
            turn = self._next.get(s.key, s.key)
            gamma, wrong_at = self._cells[s.key] = CELLS[turn % len(CELLS)]
            self._next[s.key] = turn + self._stride
            self._script.wrong[seed] = {s.context_tokens + wrong_at} if wrong_at < gamma else set()
            assignments[s.key] = Assignment(drafter=self._drafter, gamma=gamma)
        return RoundPlan(assignments=assignments, reason="cells")

    def after(self, load: RoundLoad, facts: RoundFacts) -> None:
        assert {o.key for o in facts.outcomes} == self._cells.keys()
        remaining = {s.key: s.remaining_tokens for s in load.sequences}
        for told in facts.outcomes:
            gamma, wrong_at = self._cells[told.key]
            assert told.gamma == min(gamma, remaining[told.key] - 1)
            assert told.accepted == min(wrong_at, told.gamma)
            assert told.committed == told.accepted + 1
            self.seen[gamma, wrong_at] += told.gamma == gamma


@pytest.mark.parametrize("drafter", shallow_loops(4))
@pytest.mark.parametrize("setting", SETTINGS)
def test_after_each_rejection_position_of_each_draft_length_all_planes_are_plain_decodings(
    setting: Setting, drafter: str
) -> None:
    texts = {seed: run.tokens for seed, run in natives_of(setting).items()}
    script = DraftScript(texts=texts, vocab_size=VOCAB)
    engine = setting.engine(script=script, drafter=drafter)
    cells = CellPlan(engine, script, drafter, sequences=len(texts))
    run_forced(setting, engine, cells.plan, after=cells.after)
    assert set(+cells.seen) == set(CELLS)
    assert engine.gauges()["engine/reused_row_loops"] > 0


# ---- block verification ---------------------------------------------------------------------------


def run_block(
    setting: Setting,
    drafter: str,
    requests: Sequence[Request],
    *,
    natives: dict[int, NativeRun] | None = None,
) -> dict[int, tuple[int, ...]]:
    """Run requests under ``block``, a draft length a round; return prompts and texts by seed.

    With ``natives`` every round is held against them.
    """
    engine = setting.engine(script=None, drafter=drafter, verify="block")
    asked = {r.key: r for r in requests}
    texts: dict[int, tuple[int, ...]] = {}
    kept, rejected, compared = 0, 0, 0
    for request in requests:
        engine.add(request)
    for gamma in itertools.cycle(GAMMAS):
        if not engine.busy:
            break
        outcome = engine.run_round(fixed_plan(drafter, gamma)(engine.load()))
        kept += sum(o.accepted for o in outcome.facts.outcomes)
        rejected += sum(o.gamma - o.accepted for o in outcome.facts.outcomes)
        if natives is not None:
            compared += assert_stands_as_native(engine, natives)
        for done in outcome.completions:
            request = asked[done.prompt_uid, done.sample_index]
            texts[request.seed] = request.prompt_ids + done.token_ids
    assert kept > 20
    assert rejected > 3, "drafts of three of four loops are nearly always kept"
    assert natives is None or compared > 150
    assert engine.gauges()["engine/reused_row_loops"] > 0
    engine.close()
    return texts


@pytest.mark.parametrize("drafter", shallow_loops(4))
@pytest.mark.parametrize("arithmetic", ["compiled", "float64"])
def test_whatever_block_verification_keeps_all_planes_are_plain_decodings_of_the_same_text(
    arithmetic: Arithmetic, drafter: str
) -> None:
    """Its texts are not those plain decoding draws, so they are forced on it, row by row."""
    setting = Setting(arithmetic=arithmetic, budget=3)
    requests = [replace(r, seed=number) for number, r in enumerate(setting.requests())]  # names its chain
    texts = run_block(setting, drafter, requests)
    chains = [Chain(tokens=texts[r.seed], prompt_tokens=len(r.prompt_ids)) for r in requests]
    serial = tiny_engine(
        setting.policy,
        compiled=setting.compiled,
        config=EngineConfig(max_batch=8, max_context_tokens=128),
        chooser=ChainChooser(chains),
    )
    natives = native_runs(serial, requests)
    assert {seed: run.tokens for seed, run in natives.items()} == texts
    assert run_block(setting, drafter, requests, natives=natives) == texts


# ---- lanes ----------------------------------------------------------------------------------------

GAPS = (1, 2, 3, 4, 5)
"""Tokens from one wrong proposal to the next: so many lanes stand before it, or as many as there may be."""


LANE_SETTINGS = [
    pytest.param(*setting.values, passes, id=f"{setting.id}, {passes} passes")
    for setting in SETTINGS
    for passes in ((1, 8) if "compiled" in str(setting.id) else (1,))
]
"""With the most passes of a round in which nothing else is computed; never fewer than there are loops."""


def wrong_indices(tokens: int, first_gap: int) -> Iterator[tuple[int, int]]:
    """Yield the indices of a text whose proposals are wrong, each with its gap, all gaps in turn."""
    index, turn = 0, first_gap
    while True:
        gap = GAPS[turn % len(GAPS)]
        index, turn = index + gap, turn + 1
        if index >= tokens:
            return
        yield index, gap


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("setting", "passes"), LANE_SETTINGS)
def test_wherever_a_lane_falls_all_planes_are_plain_decodings(
    setting: Setting, depth: int, passes: int
) -> None:
    """Each token must come as the script has it: of a lane that lived, or in place of one that fell."""
    natives = natives_of(setting)
    script = DraftScript(texts={s: run.tokens for s, run in natives.items()}, vocab_size=VOCAB)
    falls: dict[int, dict[int, int]] = {}
    gammas: dict[int, int] = {}
    for number, request in enumerate(setting.requests()):
        indices = dict(wrong_indices(len(natives[request.seed].text.ids), number))
        falls[request.seed], gammas[request.seed] = indices, GAMMAS[number % len(GAMMAS)]
        script.wrong[request.seed] = {len(request.prompt_ids) + index for index in indices}
    engine = setting.engine(script=script, drafter=WAVEFRONT, depth=depth, passes=passes)
    running = engine._scheduler.running

    def plan(load: RoundLoad) -> RoundPlan:
        lanes = {
            s.key: Assignment(drafter=WAVEFRONT, gamma=gammas[running[s.key].request.seed])
            for s in load.sequences
        }
        return RoundPlan(assignments=lanes, reason="lanes")

    done = run_forced(setting, engine, plan)
    seen = Counter[tuple[int, int]]()
    for seed, completion in done.items():
        origins = [t.origin for t in completion.tokens]
        # The first token comes with its prompt, and no lane is sent for the last one.
        for index, origin in list(enumerate(origins))[1:-1]:
            assert origin == ("corrected" if index in falls[seed] else "accepted"), f"token {index}"
            if index in falls[seed]:
                seen[gammas[seed], falls[seed][index]] += 1
    wanted = {(gammas[seed], gap) for seed in done for gap in GAPS}
    assert set(seen) == wanted


# ---- the comparison can fail ----------------------------------------------------------------------


def flip_lowest_bit(engine: NativeEngine, plane: int, *, page: int, token: int) -> None:
    """Change the last bit of one number that is held of a token on one plane: of a value, the last thing."""
    storage = engine._state.storage
    if isinstance(storage, TorchKV):
        storage.values[plane, page * PAGE_TOKENS + token].view(torch.int64)[-1, -1] ^= 1
    else:
        assert isinstance(storage, CompiledKV)
        values = storage.data[plane, page, -1, 1].view(PAGE_TOKENS, -1)
        values[token].view(torch.int16)[-1] ^= 1


@pytest.mark.parametrize("arithmetic", ["compiled", "float64"])
def test_one_bit_on_any_plane_at_any_position_is_found(arithmetic: Arithmetic) -> None:
    setting = Setting(arithmetic=arithmetic, budget=3)
    natives = natives_of(setting)
    engine = setting.engine(script=None, drafter=WAVEFRONT)
    request = setting.requests()[0]
    engine.add(request)
    while not engine.load().sequences or engine.load().sequences[0].generated_tokens < 18:
        engine.run_round(ar_plan(engine.load()))
    frontier = assert_stands_as_native(engine, natives)
    (sequence,) = engine._scheduler.running.values()
    assert frontier == sequence.frontier > PAGE_TOKENS
    for plane in range(setting.policy.spec.planes):
        for position in range(frontier):
            place = {"page": sequence.pages[position // PAGE_TOKENS], "token": position % PAGE_TOKENS}
            flip_lowest_bit(engine, plane, **place)
            with pytest.raises(AssertionError, match=rf"other bits on planes \[{plane}\] "):
                assert_stands_as_native(engine, natives)
            flip_lowest_bit(engine, plane, **place)
    assert assert_stands_as_native(engine, natives) == frontier


def test_a_frontier_that_counts_a_rejected_draft_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(arithmetic="compiled", budget=3)
    texts = {seed: run.tokens for seed, run in natives_of(setting).items()}
    script = DraftScript(texts=texts, vocab_size=VOCAB)
    engine = setting.engine(script=script, drafter="shallow_loop_1")
    cells = CellPlan(engine, script, "shallow_loop_1", sequences=len(texts))
    commit = Committer.commit

    def forgetful(committer: Committer, work: Work, *args: object, **kwargs: object) -> object:
        told = commit(committer, work, *args, **kwargs)  # type: ignore[arg-type]
        for sequence in work.decoding:
            sequence.frontier += bool(work.drafts_of(sequence).tokens)
        return told

    monkeypatch.setattr(Committer, "commit", forgetful)
    with pytest.raises(AssertionError, match="frontier"):
        run_forced(setting, engine, cells.plan, after=cells.after)

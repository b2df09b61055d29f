"""Fixed chains: drafts that are reused against one serial forward of full depth, number by number.

The production engine drafts, verifies and commits; only its choices are not its own: every one is the next
token of a given chain. So each draft is right, each round goes on from all states its drafts left, and what
was computed can be compared position by position with plain decoding of the chain, one row at a time.

It is run twice. In *compiled calls*, as rounds are served: a call for all drafts, one for what is left, one
for the passes of lanes, and the chooser behind them found where they look for it. And *pass by pass* from
Python, where the state after every loop can be seen.

Shapes: L loops, T positions, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from drafters.config import DrafterConfig
from drafters.registry import build as build_drafter
from rollout.config import EngineConfig
from rollout.engine.native.compiled_forward.decoder import CompiledDecoder
from rollout.engine.native.decoder import Decoder
from rollout.engine.native.decoder_work import DecoderWork
from rollout.engine.native.drafts.drafting import Drafting
from rollout.engine.native.engine import NativeEngine
from rollout.engine.target import Chooser
from rollout.evaluation.call_recording import CallRecorder
from rollout.evaluation.forced import Chain, ForcedChooser, ForcedPort
from rollout.evaluation.recording import Kept, RecordingDecoder
from rollout.evaluation.serial import Computed, SerialReference
from rollout.evaluation.spread import Limits, Spread, spread
from rollout.evaluation.ways import DraftWay
from rollout.testing_native import Planner, fixed_plan
from rollout.types import Request, SamplingParams

PROMPT_CHUNK = 16
"""Prompt rows per round: short, so that some chains draft beside prompts of others."""

Path = Literal["compiled calls", "pass by pass"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaneSpread:
    """Differences on one KV plane."""

    loop: int
    layer: int
    keys: Spread
    values: Spread


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainReport:
    """Reused drafts of one drafter, depth and gamma against the serial forward, over all chains."""

    drafter: str
    depth: int
    gamma: int
    path: Path
    positions: int
    states: tuple[Spread | None, ...]
    """By loop, from the first on; None where no state after that loop is left to be looked at."""

    states_seen: tuple[int, ...]
    """By loop, positions whose state was compared. Keys and values are those of every position always."""

    planes: tuple[PlaneSpread, ...]
    logits: Spread
    argmax_mismatches: int
    drafts_kept: int
    """None, and nothing was reused."""

    rows_by_loop: tuple[int, ...]
    """What the decoder counted: as many as positions where nothing is done twice."""

    most_often: int | None
    """How often the most computed (position, loop) was computed; None where only rows are counted."""

    def line(self) -> str:
        """Return the largest differences, in words."""
        planes = max(max(p.keys.largest, p.values.largest) for p in self.planes)
        states = max(s.largest for s in self.states if s is not None)
        return (
            f"largest differences: states {states:.3g} ({sum(self.states_seen)} seen), KV {planes:.3g}, "
            f"logits {self.logits.largest:.3g}; {self.argmax_mismatches} argmax mismatches in "
            f"{self.positions} positions; {self.drafts_kept} drafts kept, each (position, loop) computed once"
        )

    def problem(self, limits: Limits) -> str:
        """Return what is wrong, or nothing."""
        return self._undone() or self._apart(limits)

    def _undone(self) -> str:
        """Return what was not put to the test, or was computed twice."""
        if not self.drafts_kept:
            return "no draft was kept: nothing was reused"
        if self.most_often not in (None, 1):
            return f"a position was computed {self.most_often} times at one loop"
        for loop, rows in enumerate(self.rows_by_loop, start=1):
            if rows != self.positions:
                return f"loop {loop} was run for {rows} rows of {self.positions} positions"
        every = (self.positions,) * len(self.states)
        if self.path == "pass by pass" and self.states_seen != every:
            return f"states of {self.states_seen} positions by loop were seen, not of {self.positions}"
        return "" if any(self.states_seen) else "no state was left to be looked at"

    def _apart(self, limits: Limits) -> str:
        for loop, states in enumerate(self.states, start=1):
            if states is not None and not states.within(limits.states):
                return f"states after loop {loop} differ by {states.largest:.3g}"
        for plane in self.planes:
            for what, apart in (("keys", plane.keys), ("values", plane.values)):
                if not apart.within(limits.states):
                    where = f"{what} of loop {plane.loop + 1}, layer {plane.layer}"
                    return f"{where} differ by {apart.largest:.3g}"
        if not self.logits.within(limits.logits):
            return f"logits differ by {self.logits.largest:.3g}"
        return f"{self.argmax_mismatches} choices differ" if self.argmax_mismatches else ""


def paths_of(decoder: Decoder) -> tuple[Path, ...]:
    """Return the ways in which this decoder's rounds can be run."""
    return ("compiled calls", "pass by pass") if isinstance(decoder, CompiledDecoder) else ("pass by pass",)


def reuse_report(
    decoder: Decoder, reference: SerialReference, config: DrafterConfig, way: DraftWay, gamma: int, path: Path
) -> ChainReport:
    """Run the reference's chains through the engine, drafting this way, and return how far they lie apart.

    Raises ``LookupError`` for a chain that was never computed.
    """
    run = _in_calls if path == "compiled calls" else _pass_by_pass
    found = run(decoder, reference.chains, way.config(config), fixed_plan(way.drafter, gamma), way.drafter)
    wanted = reference.computed
    a_TV, b_TV = (torch.cat([c.logits_TV for c in side]) for side in (found.computed, wanted))
    by_loop = [_states(found.computed, wanted, loop) for loop in range(decoder.spec.loops)]
    return ChainReport(
        drafter=way.drafter,
        depth=way.depth,
        gamma=gamma,
        path=path,
        positions=sum(len(chain.fed) for chain in reference.chains),
        states=tuple(apart for apart, _ in by_loop),
        states_seen=tuple(seen for _, seen in by_loop),
        planes=tuple(_by_plane(found.computed, wanted, layers=decoder.spec.layers)),
        logits=spread(a_TV, b_TV),
        argmax_mismatches=int((a_TV.argmax(-1) != b_TV.argmax(-1)).sum()),
        drafts_kept=found.drafts_kept,
        rows_by_loop=found.work.rows_by_loop,
        most_often=found.most_often,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """What came of running all chains together."""

    computed: list[Computed]
    drafts_kept: int
    work: DecoderWork
    most_often: int | None = None


def _pass_by_pass(
    decoder: Decoder, chains: Sequence[Chain], config: DrafterConfig, plan: Planner, drafter: str
) -> _Found:
    recorder = RecordingDecoder(decoder)

    def computed(number: int) -> Computed:
        chain = chains[number]
        slot = recorder.kept.slot_of(chain.fed)
        logits_TV = recorder.logits(slot, chain.chosen_after)
        return _taken(recorder.kept, slot, chain, logits_TV)

    before = recorder.work
    engine = _engine(recorder, ForcedChooser(chains), chains, config, drafter)
    ended, kept = _run(engine, chains, plan, computed)
    work = recorder.work - before
    return _Found(computed=ended, drafts_kept=kept, work=work, most_often=max(recorder.take().values()))


def _in_calls(
    decoder: Decoder, chains: Sequence[Chain], config: DrafterConfig, plan: Planner, drafter: str
) -> _Found:
    assert isinstance(decoder, CompiledDecoder), "paths_of says so"
    recorder, port = CallRecorder(decoder), ForcedPort(chains)

    def computed(number: int) -> Computed:
        chain = chains[number]
        logits_TV = port.logits(number, chain.chosen_after)
        return _taken(recorder.kept, recorder.kept.slot_of(chain.fed), chain, logits_TV)

    engine = _engine(recorder, port, chains, config, drafter)
    ended, kept = _run(engine, chains, plan, computed, check=port.check)
    return _Found(computed=ended, drafts_kept=kept, work=recorder.work)


def _taken(kept: Kept, slot: int, chain: Chain, logits_TV: torch.Tensor) -> Computed:
    """Return what is kept of a chain that has just ended, and forget it."""
    computed = Computed(
        states=kept.states(slot),
        logits_TV=logits_TV,
        keys_and_values=kept.keys_and_values(slot, len(chain.fed)),
    )
    kept.end(slot, len(chain.fed))
    return computed


def _run(
    engine: NativeEngine,
    chains: Sequence[Chain],
    plan: Planner,
    computed: Callable[[int], Computed],
    *,
    check: Callable[[], None] = lambda: None,
) -> tuple[list[Computed], int]:
    """Run all chains together; return what was computed of each, and how many drafts were kept."""
    ended: dict[int, Computed] = {}
    kept = 0
    for request in _requests(chains):
        engine.add(request)
    while engine.busy:
        outcome = engine.run_round(plan(engine.load()))
        check()
        kept += sum(o.accepted for o in outcome.facts.outcomes)
        # At once: their pages are free now, and the next round may give them to another chain.
        ended |= {int(c.prompt_uid): computed(int(c.prompt_uid)) for c in outcome.completions}
    return [ended[number] for number in range(len(chains))], kept


def _states(found: Sequence[Computed], wanted: Sequence[Computed], loop: int) -> tuple[Spread | None, int]:
    """Return how far the states after a loop lie apart where both are known, and how many those are."""
    pairs = [
        (state, expected.states[at])
        for one, expected in zip(found, wanted, strict=True)
        for at, state in one.states.items()
        if at[0] == loop
    ]
    if not pairs:
        return None, 0
    a_TD, b_TD = (torch.stack(side) for side in zip(*pairs, strict=True))
    return spread(a_TD, b_TD), len(pairs)


def _by_plane(found: Sequence[Computed], wanted: Sequence[Computed], *, layers: int) -> list[PlaneSpread]:
    a = torch.cat([c.keys_and_values for c in found], dim=2)
    b = torch.cat([c.keys_and_values for c in wanted], dim=2)
    return [
        PlaneSpread(
            loop=plane // layers,
            layer=plane % layers,
            keys=spread(a[plane, 0], b[plane, 0]),
            values=spread(a[plane, 1], b[plane, 1]),
        )
        for plane in range(a.shape[0])
    ]


def _requests(chains: Sequence[Chain]) -> list[Request]:
    return [
        Request(
            prompt_uid=str(number),
            sample_index=0,
            prompt_ids=chain.tokens[: chain.prompt_tokens],
            params=SamplingParams(max_tokens=len(chain.tokens) - chain.prompt_tokens, ignore_eos=True),
            seed=number,  # names the chain to the chooser
        )
        for number, chain in enumerate(chains)
    ]


def _engine(
    decoder: Decoder, chooser: Chooser, chains: Sequence[Chain], config: DrafterConfig, drafter: str
) -> NativeEngine:
    vocab = decoder.spec.vocab_size
    return NativeEngine(
        decoder=decoder,
        chooser=chooser,
        drafting=Drafting(
            [build_drafter(drafter, config)], vocab_size=vocab, failure_limit=config.failure_limit
        ),
        config=EngineConfig(
            max_batch=len(chains),
            max_context_tokens=max(len(chain.tokens) for chain in chains) + 1,
            prefill_chunk_tokens=PROMPT_CHUNK,
            prefix_cache=False,
        ),
        numerics_exact=True,
        decoder_description="recorded",
        detokenizer=None,
        policy_version=0,
        weights_checksum="recorded",
    )

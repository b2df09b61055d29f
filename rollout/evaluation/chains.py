"""Fixed chains: drafts that are reused against one serial forward of full depth, number by number.

The production engine drafts, verifies and commits; only its choices are not its own: every one is the next
token of a given chain. So each draft is right, each round goes on from all states its drafts left, and what
was computed can be compared position by position with plain decoding of the chain, one row at a time.

Shapes: L loops, T positions, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.config import DrafterConfig
from drafters.registry import build as build_drafter
from rollout.config import EngineConfig
from rollout.engine.chooser_torch import TorchChooser
from rollout.engine.native.decoder import Decoder
from rollout.engine.native.drafts.drafting import Drafting
from rollout.engine.native.engine import NativeEngine
from rollout.engine.native.exit_gate import exit_probabilities
from rollout.engine.native.pages import pages_for
from rollout.engine.native.rows import RowBatch
from rollout.engine.target import Choice, TargetRow
from rollout.evaluation.recording import RecordingDecoder
from rollout.evaluation.spread import Limits, Spread, spread
from rollout.testing_native import Planner, fixed_plan
from rollout.types import Request, SamplingParams

PROMPT_CHUNK = 16
"""Prompt rows per round: short, so that some chains draft beside prompts of others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """A prompt and the text that is forced after it."""

    tokens: tuple[int, ...]
    prompt_tokens: int

    @property
    def fed(self) -> tuple[int, ...]:
        """Every token that is computed: all but the last, which ends the text."""
        return self.tokens[:-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaneSpread:
    """Differences on one KV plane."""

    loop: int
    layer: int
    keys: Spread
    values: Spread


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainReport:
    """Reused drafts of one drafter and gamma against the serial forward, over all chains."""

    drafter: str
    gamma: int
    positions: int
    states: tuple[Spread, ...]
    """By loop, from the first on."""

    planes: tuple[PlaneSpread, ...]
    logits: Spread
    argmax_mismatches: int
    drafts_kept: int
    """None, and nothing was reused."""

    most_often: int
    """How often the most computed (position, loop) was computed: 1 where nothing is done twice."""

    def line(self) -> str:
        """Return the largest differences, in words."""
        planes = max(max(p.keys.largest, p.values.largest) for p in self.planes)
        return (
            f"largest differences: states {max(s.largest for s in self.states):.3g}, KV {planes:.3g}, logits "
            f"{self.logits.largest:.3g}; {self.argmax_mismatches} argmax mismatches in {self.positions} "
            f"positions; {self.drafts_kept} drafts kept, each (position, loop) computed once"
        )

    def problem(self, limits: Limits) -> str:
        """Return what is wrong, or nothing."""
        if not self.drafts_kept:
            return "no draft was kept: nothing was reused"
        if self.most_often != 1:
            return f"a position was computed {self.most_often} times at one loop"
        for loop, states in enumerate(self.states):
            if not states.within(limits.states):
                return f"states after loop {loop + 1} differ by {states.largest:.3g}"
        for plane in self.planes:
            for what, apart in (("keys", plane.keys), ("values", plane.values)):
                if not apart.within(limits.states):
                    where = f"{what} of loop {plane.loop + 1}, layer {plane.layer}"
                    return f"{where} differ by {apart.largest:.3g}"
        if not self.logits.within(limits.logits):
            return f"logits differ by {self.logits.largest:.3g}"
        return f"{self.argmax_mismatches} choices differ" if self.argmax_mismatches else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExitReport:
    """What the exit gate says of the chains' positions. Nobody obeys it: every token runs all loops."""

    positions: int
    leaves_after: tuple[float, ...]
    """By loop, the mean probability that a token would leave after it; they sum to 1."""

    @property
    def mean_loops(self) -> float:
        """Loops a token would run on average."""
        return sum(loop * share for loop, share in enumerate(self.leaves_after, start=1))

    def line(self) -> str:
        """Return it in words."""
        shares = ", ".join(f"{share:.3f}" for share in self.leaves_after)
        return (
            f"exit gate: a token would leave after {self.mean_loops:.2f} loops on average (by loop {shares})"
        )


class ForcedChooser:
    """Implements ``Chooser``: the choice after a position is the chain's next token, whatever the logits."""

    def __init__(self, chains: Sequence[Chain]) -> None:
        self._chains = chains
        self._reference = TorchChooser()

    def choose(
        self, logits_RV: Tensor, rows: Sequence[TargetRow], *, stream: int = 0, logprobs: bool = True
    ) -> list[Choice]:
        """Return the tokens of the rows' chains, which are named by the requests' seeds."""
        chains = [self._chains[row.seed].tokens for row in rows]
        return self.score(logits_RV, rows, [c[row.position] for c, row in zip(chains, rows, strict=True)])

    def score(self, logits_RV: Tensor, rows: Sequence[TargetRow], tokens: Sequence[int]) -> list[Choice]:
        """Return the reference chooser's."""
        return self._reference.score(logits_RV, rows, tokens)

    def probs(self, logits_RV: Tensor, rows: Sequence[TargetRow]) -> Tensor:
        """Return the reference chooser's."""
        return self._reference.probs(logits_RV, rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Computed:
    """What a run computed of one chain."""

    states_LTD: Tensor
    logits_TV: Tensor
    """From the prompt's last position on: where tokens are chosen."""

    keys_and_values: Tensor
    """By plane, keys and values."""


class SerialReference:
    """Every chain computed row by row at full depth: what plain decoding alone computes."""

    def __init__(self, decoder: Decoder, chains: Sequence[Chain]) -> None:
        self._decoder = decoder
        recorder = RecordingDecoder(decoder)
        pages = [pages_for(len(chain.fed)) for chain in chains]
        storage = recorder.new_storage(sum(pages))
        table_SP = torch.zeros(len(chains), max(pages), dtype=torch.int32)
        for slot, count in enumerate(pages):
            first = sum(pages[:slot])
            table_SP[slot, :count] = torch.arange(first, first + count, dtype=torch.int32)
        for slot, chain in enumerate(chains):
            for position, token in enumerate(chain.fed):
                recorder.forward(_one_row(token, position, slot, table_SP), storage)
        self.chains = chains
        self.computed = [_computed(recorder, chain) for chain in chains]

    def exits(self) -> ExitReport | None:
        """Return what the exit gate says of all positions, None where there is no gate."""
        if not self._decoder.spec.exit_gate:
            return None
        states_LND = torch.cat([computed.states_LTD for computed in self.computed], dim=1)
        gates_NL = torch.stack([self._decoder.exit_gate(states_ND) for states_ND in states_LND], dim=1)
        shares_L = exit_probabilities(gates_NL).mean(0)
        return ExitReport(positions=len(gates_NL), leaves_after=tuple(shares_L.tolist()))


def _one_row(token: int, position: int, slot: int, table_SP: Tensor) -> RowBatch:
    def one(number: int) -> Tensor:
        return torch.tensor([number], dtype=torch.int32)

    return RowBatch(
        token_ids_M=one(token),
        positions_M=one(position),
        table_M=one(slot),
        page_table_SP=table_SP,
        head_rows_R=one(0),
    )


def _computed(recorder: RecordingDecoder, chain: Chain) -> _Computed:
    count = len(chain.fed)
    slot = recorder.slot_of(chain.fed)
    return _Computed(
        states_LTD=recorder.states(slot, count),
        logits_TV=recorder.logits(slot, range(chain.prompt_tokens - 1, count)),
        keys_and_values=recorder.keys_and_values(slot, count),
    )


def reuse_report(
    decoder: Decoder, reference: SerialReference, config: DrafterConfig, drafter: str, gamma: int
) -> ChainReport:
    """Run the reference's chains through the engine with ``drafter`` and return how far they lie apart."""
    chains = reference.chains
    recorder = RecordingDecoder(decoder)
    engine = _engine(recorder, chains, config, drafter)
    found, drafts_kept = _run(engine, recorder, chains, fixed_plan(drafter, gamma))
    wanted = reference.computed
    a_TV, b_TV = (torch.cat([c.logits_TV for c in side]) for side in (found, wanted))
    return ChainReport(
        drafter=drafter,
        gamma=gamma,
        positions=sum(len(chain.fed) for chain in chains),
        states=tuple(_by_loop(found, wanted)),
        planes=tuple(_by_plane(found, wanted, layers=decoder.spec.layers)),
        logits=spread(a_TV, b_TV),
        argmax_mismatches=int((a_TV.argmax(-1) != b_TV.argmax(-1)).sum()),
        drafts_kept=drafts_kept,
        most_often=max(recorder.take().values()),
    )


def _run(
    engine: NativeEngine, recorder: RecordingDecoder, chains: Sequence[Chain], plan: Planner
) -> tuple[list[_Computed], int]:
    """Run all chains together; return what was computed of each, and how many drafts were kept."""
    computed: dict[str, _Computed] = {}
    kept = 0
    for request in _requests(chains):
        engine.add(request)
    while engine.busy:
        outcome = engine.run_round(plan(engine.load()))
        kept += sum(o.accepted for o in outcome.facts.outcomes)
        # At once: their pages are free now, and the next round may give them to another chain.
        ended = [(c.prompt_uid, chains[int(c.prompt_uid)]) for c in outcome.completions]
        computed |= {name: _computed(recorder, chain) for name, chain in ended}
        for _, chain in ended:
            recorder.wipe(recorder.slot_of(chain.fed), len(chain.fed))
    return [computed[request.prompt_uid] for request in _requests(chains)], kept


def _by_loop(found: Sequence[_Computed], wanted: Sequence[_Computed]) -> list[Spread]:
    a_LTD = torch.cat([c.states_LTD for c in found], dim=1)
    b_LTD = torch.cat([c.states_LTD for c in wanted], dim=1)
    return [spread(a_TD, b_TD) for a_TD, b_TD in zip(a_LTD, b_LTD, strict=True)]


def _by_plane(found: Sequence[_Computed], wanted: Sequence[_Computed], *, layers: int) -> list[PlaneSpread]:
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


def _engine(decoder: Decoder, chains: Sequence[Chain], config: DrafterConfig, drafter: str) -> NativeEngine:
    vocab = decoder.spec.vocab_size
    return NativeEngine(
        decoder=decoder,
        chooser=ForcedChooser(chains),
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

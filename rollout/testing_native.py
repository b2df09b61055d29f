"""Native engines over tiny policies, and plans to drive them: what exactness tests are built from."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from controller.types import Assignment, RoundLoad, RoundPlan
from drafters.types import Drafter
from rollout.config import EngineConfig
from rollout.engine.chooser_compiled import CompiledChooser
from rollout.engine.chooser_torch import TorchChooser
from rollout.engine.native.compiled_forward.decoder import CompiledDecoder
from rollout.engine.native.decoder import Decoder
from rollout.engine.native.drafts.drafting import Drafting
from rollout.engine.native.engine import NativeEngine
from rollout.engine.native.torch_forward.decoder import TorchDecoder
from rollout.engine.native.torch_forward.forward_graphs import EagerRecorder
from rollout.engine.protocol import Engine
from rollout.engine.target import Chooser
from rollout.seeds import sample_seed
from rollout.testing import TinyPolicy, char_tokenizer
from rollout.types import Completion, Request, SamplingParams

Planner = Callable[[RoundLoad], RoundPlan]


def tiny_engine(
    policy: TinyPolicy,
    drafters: Sequence[Drafter] = (),
    *,
    compiled: bool = False,
    dtype: torch.dtype = torch.float64,
    config: EngineConfig | None = None,
    threads: int = 1,
    version: int = 0,
    device: str = "cpu",
    exact: bool = True,
    decoder: Decoder | None = None,
    chooser: Chooser | None = None,
) -> NativeEngine:
    """Return a native engine: float64 torch by default, the compiled kernels when asked.

    ``device`` and ``exact`` are for torch. A ``decoder`` of the same kind that is given holds the policy, and
    a ``chooser`` takes the place of the usual one.
    """
    chooser = chooser or tiny_chooser(compiled=compiled, threads=threads)
    if decoder is None:
        decoder = tiny_decoder(
            policy, compiled=compiled, dtype=dtype, threads=threads, device=device, exact=exact
        )
    vocab = policy.spec.vocab_size
    return NativeEngine(
        decoder=decoder,
        chooser=chooser,
        drafting=Drafting(list(drafters), vocab_size=vocab, failure_limit=3),
        config=config or EngineConfig(max_batch=8, max_context_tokens=128, dtype="bfloat16"),
        numerics_exact=compiled or exact,
        decoder_description="compiled" if compiled else f"torch {dtype}",
        detokenizer=char_tokenizer(vocab) if vocab >= 48 else None,
        policy_version=version,
        weights_checksum="tiny",
    )


def tiny_chooser(*, compiled: bool, threads: int = 1) -> Chooser:
    """Return what chooses in ``tiny_engine``."""
    return CompiledChooser(threads=threads) if compiled else TorchChooser()


def tiny_decoder(
    policy: TinyPolicy,
    *,
    compiled: bool = False,
    dtype: torch.dtype = torch.float64,
    threads: int = 1,
    device: str = "cpu",
    exact: bool = True,
) -> Decoder:
    """Return a decoder that holds the policy: float64 torch, row by row, or the compiled kernels."""
    decoder: Decoder
    if compiled:
        decoder = CompiledDecoder(policy.spec, cos_PH=policy.cos_PH, sin_PH=policy.sin_PH, threads=threads)
    else:
        decoder = TorchDecoder(
            policy.spec, cos_PH=policy.cos_PH, sin_PH=policy.sin_PH, dtype=dtype, device=device, exact=exact
        )
    decoder.load(policy.state)
    return decoder


def ar_plan(load: RoundLoad) -> RoundPlan:
    """Decode plainly."""
    return RoundPlan(assignments={}, reason="ar")


def fixed_plan(drafter: str, gamma: int) -> Planner:
    """Return a planner that always drafts ``gamma`` tokens for everyone."""
    assignment = Assignment(drafter=drafter, gamma=gamma)

    def plan(load: RoundLoad) -> RoundPlan:
        return RoundPlan(assignments={s.key: assignment for s in load.sequences}, reason="fixed")

    return plan


def random_plan(drafters: Sequence[str], *, max_gamma: int, seed: int) -> Planner:
    """Return a planner that gives every sequence another drafter and gamma (or none) every round."""
    rng = random.Random(seed)

    def plan(load: RoundLoad) -> RoundPlan:
        assignments = {}
        for sequence in load.sequences:
            gamma = rng.randrange(max_gamma + 1)
            if gamma:
                assignments[sequence.key] = Assignment(drafter=rng.choice(list(drafters)), gamma=gamma)
        return RoundPlan(assignments=assignments, reason="random")

    return plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """What exactness compares: ids, all logprobs bit for bit, and how it ended."""

    ids: tuple[int, ...]
    logprobs: tuple[tuple[float, float, float, float], ...]
    finish_reason: str
    text: str | None


def text_of(completion: Completion) -> Text:
    """Return the part of a completion that must not depend on speculation."""
    return Text(
        ids=completion.token_ids,
        logprobs=tuple(
            (t.raw_logprob, t.scaled_logprob, t.target_logprob, t.kept_logmass) for t in completion.tokens
        ),
        finish_reason=completion.finish_reason,
        text=completion.text,
    )


def run_engine(
    engine: Engine, requests: Iterable[Request], plan: Planner, *, pending: int = 0
) -> dict[tuple[str, int], Completion]:
    """Run requests, and ``pending`` earlier ones, to their end; every request ends exactly once."""
    expected = pending
    for request in requests:
        engine.add(request)
        expected += 1
    done: dict[tuple[str, int], Completion] = {}
    while engine.busy:
        for completion in engine.run_round(plan(engine.load())).completions:
            key = (completion.prompt_uid, completion.sample_index)
            assert key not in done, f"{key} ended twice"
            done[key] = completion
    assert len(done) == expected
    return done


def texts(completions: dict[tuple[str, int], Completion]) -> dict[tuple[str, int], Text]:
    """Return every completion's ``Text``."""
    return {key: text_of(c) for key, c in completions.items()}


def requests_for(
    *,
    vocab: int,
    prompts: int,
    samples: int = 1,
    seed: int = 0,
    params: Sequence[SamplingParams] = (SamplingParams(max_tokens=24),),
    longest_prompt: int = 40,
) -> list[Request]:
    """Return seeded random requests; ``params`` are dealt out in turn."""
    rng = random.Random(seed)
    out: list[Request] = []
    for p in range(prompts):
        prompt = tuple(rng.randrange(3, vocab) for _ in range(rng.randrange(1, longest_prompt)))
        for i in range(samples):
            out.append(
                Request(
                    prompt_uid=f"p{p}",
                    sample_index=i,
                    prompt_ids=prompt,
                    params=params[len(out) % len(params)],
                    seed=sample_seed(run_seed=seed, trainer_step=0, prompt_uid=f"p{p}", sample_index=i),
                )
            )
    return out


MIXED_PARAMS: tuple[SamplingParams, ...] = (
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=24, temperature=0.0),
    SamplingParams(max_tokens=24, temperature=0.7, top_k=7),
    SamplingParams(max_tokens=24, top_p=0.8),
    SamplingParams(max_tokens=24, temperature=1.3, min_p=0.1),
    SamplingParams(max_tokens=24, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
    SamplingParams(max_tokens=24, logit_bias={5: 2.0, 7: float("-inf")}, min_tokens=9),
    SamplingParams(max_tokens=30, stop_ids=(9, 11), top_k=20, top_p=0.9, min_p=0.02),
)
"""One of every kind: plain, greedy, each filter, penalties, bias and bans, stops with all filters."""


class CountingRecorder(EagerRecorder):
    """Counts what is recorded and how often it runs."""

    def __init__(self) -> None:
        self.recorded = self.runs = 0

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """See ``Recorder``."""
        self.recorded += 1

        def counted() -> None:
            self.runs += 1
            run()

        return counted


def assert_holds_nothing(engine: NativeEngine) -> None:
    """Assert that no sequence, page, slot, lane or state is left once prompts kept for others are let go."""
    scheduler = engine._scheduler
    assert not engine.busy
    assert engine.gauges()["engine/lanes"] == 0
    assert not engine._state.draft_states.any
    scheduler.prefix.clear()
    assert scheduler.pool.free == scheduler.pool.total
    assert len(scheduler._free_slots) == engine.traits.max_batch

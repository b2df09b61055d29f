"""More failures users reported: what the numbers of a rollout mean, and when they may differ at all.

Ids in docstrings name the retold report.
"""

import math
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from queue import Queue
from typing import Any

import pytest
import torch
from torch import Tensor

from controller.config import ControllerConfig
from controller.decide import build_controller
from drafters.config import DrafterConfig
from drafters.registry import build
from drafters.testing import ScriptedDrafter
from rollout.config import EngineConfig
from rollout.engine.chooser_torch import TorchChooser
from rollout.engine.native.drafts.drafting import Drafting
from rollout.engine.native.engine import NativeEngine
from rollout.engine.native.pages import pages_for
from rollout.engine.native.rows import RowBatch
from rollout.engine.native.torch_forward.decoder import TorchDecoder
from rollout.policy.weights import manifest
from rollout.proof.margin import choice_margin
from rollout.service.loop import EngineLoop
from rollout.service.records import HostEvents
from rollout.testing import TinyPolicy, tiny_policy
from rollout.testing_native import (
    MIXED_PARAMS,
    Planner,
    Text,
    ar_plan,
    fixed_plan,
    requests_for,
    run_engine,
    texts,
    tiny_engine,
)
from rollout.types import Completion, Request, SamplingParams

pytestmark = pytest.mark.lossless


def _forced(policy: TinyPolicy, tokens: Sequence[int]) -> Tensor:
    """Return float64 logits (T, V) after every token, from one forward that no engine had a part in."""
    decoder = TorchDecoder(
        policy.spec, cos_PH=policy.cos_PH, sin_PH=policy.sin_PH, dtype=torch.float64, exact=False
    )
    decoder.load(policy.state)
    span, pages = torch.arange(len(tokens), dtype=torch.int32), pages_for(len(tokens))
    batch = RowBatch(
        token_ids_M=torch.tensor(list(tokens), dtype=torch.int32),
        positions_M=span,
        table_M=torch.zeros_like(span),
        page_table_SP=torch.arange(pages, dtype=torch.int32)[None],
        head_rows_R=span,
    )
    return decoder.forward(batch, decoder.new_storage(pages)).logits_RV


def _forced_at(policy: TinyPolicy, request: Request, completion: Completion) -> Tensor:
    """Return the logits (N, V) each of the completion's tokens was chosen from."""
    logits_TV = _forced(policy, [*request.prompt_ids, *completion.token_ids])
    return logits_TV[len(request.prompt_ids) - 1 : -1]


SHORT = [replace(p, max_tokens=8, min_tokens=min(p.min_tokens, 8)) for p in MIXED_PARAMS]


@cache
def _sixteen() -> tuple[Request, ...]:
    return tuple(requests_for(vocab=48, prompts=16, params=SHORT, seed=2, longest_prompt=12))


@cache
def _plain_sixteen() -> dict[tuple[str, int], Text]:
    return texts(run_engine(tiny_engine(tiny_policy()), _sixteen(), ar_plan))


@pytest.mark.parametrize("batch", range(1, 17))
def test_no_batch_size_row_order_or_draft_length_moves_a_bit(batch: int) -> None:
    """A7: sixteen requests, batches of 1 to 16, each draft length from 0 to 8, any order."""
    policy = tiny_policy()
    requests = list(_sixteen())
    w4 = build("w4", DrafterConfig(w4_kernel="torch"))
    engine = tiny_engine(policy, [w4], config=EngineConfig(max_batch=batch, max_context_tokens=128))
    random.Random(batch).shuffle(requests)
    gamma = (batch - 1) % 9
    done = run_engine(engine, requests, fixed_plan("w4", gamma) if gamma else ar_plan)
    assert texts(done) == _plain_sixteen()


# ---- fast numerics --------------------------------------------------------------------------------

FAST_MARGIN_NATS = 0.1
"""Most a greedy choice may lead by where fast numerics chose otherwise. Logits of the tiny policy have a
deviation near 2 and pass some ten roundings to bfloat16, each of a relative 1/256 at most: together a few
hundredths. A wrong position, page or weight moves logits by their own size."""


class _Displaced:
    """A decoder that computes the drafts of a round one position too late: the planted error."""

    def __init__(self, inner: TorchDecoder) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(self, batch: Any, kv: Any, **more: Any) -> Any:
        positions_M = batch.positions_M.clone()
        following = batch.table_M[1:] == batch.table_M[:-1]
        positions_M[1:][following] += 1
        return self._inner.forward(replace(batch, positions_M=positions_M), kv, **more)


def _fast_engine(policy: TinyPolicy) -> NativeEngine:
    decoder = TorchDecoder(
        policy.spec, cos_PH=policy.cos_PH, sin_PH=policy.sin_PH, dtype=torch.bfloat16, exact=False
    )
    decoder.load(policy.state)
    drafter = build("w4", DrafterConfig(w4_kernel="torch"))
    return NativeEngine(
        decoder=decoder,
        chooser=TorchChooser(),
        drafting=Drafting([drafter], vocab_size=policy.spec.vocab_size, failure_limit=3),
        config=EngineConfig(max_batch=8, max_context_tokens=128, numerics="fast"),
        numerics_exact=False,
        decoder_description="torch bfloat16 fast",
        detokenizer=None,
        policy_version=0,
        weights_checksum="tiny",
    )


def _margins(
    policy: TinyPolicy, requests: list[Request], plan: Planner, spoil: Callable[[NativeEngine], None]
) -> list[float]:
    """Return, for every request whose text differs from plain decoding's, how clear the first choice was."""
    engine = _fast_engine(policy)
    plain = run_engine(engine, requests, ar_plan)
    spoil(engine)
    done = run_engine(engine, requests, plan)
    margins = []
    for request in requests:
        ours, theirs = done[request.key].token_ids, plain[request.key].token_ids
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        if at is not None:
            before = theirs[:at]
            logits_V = _forced(policy, [*request.prompt_ids, *before])[-1]
            margins.append(abs(choice_margin(logits_V, request, before, chosen=theirs[at])))
    return margins


def test_where_fast_numerics_choose_otherwise_the_choice_was_a_near_tie(record_property: Any) -> None:
    """A7: in bfloat16 a text may change only where the two best tokens were closer than rounding."""
    greedy = [SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)]
    margins: list[float] = []
    compared = 0
    for seed, first in ((0, 8), (2, 4)):  # where rounding has been seen to decide
        policy = tiny_policy(seed=seed)
        requests = requests_for(vocab=48, prompts=16, params=greedy, seed=seed)[first : first + 4]
        margins += _margins(policy, requests, fixed_plan("w4", 3 + 2 * seed), lambda engine: None)
        compared += len(requests)
    record_property("diverged_frac", len(margins) / compared)
    assert max(margins, default=0.0) < FAST_MARGIN_NATS

    def displace(engine: NativeEngine) -> None:
        engine._decoder = _Displaced(engine._decoder)  # type: ignore[arg-type, assignment]

    requests = requests_for(vocab=48, prompts=12, params=greedy, seed=9)
    wrong = _margins(policy, requests, fixed_plan("w4", 4), displace)
    assert sum(m > FAST_MARGIN_NATS for m in wrong) > len(requests) // 2, "the bound tells an error apart"


# ---- what a logprob means -------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_logprobs_a_trainer_gets_have_ratio_one_under_filters(temperature: float) -> None:
    """A13: ``scaled`` is the full vocabulary's; ``target`` differs by the mass the filters kept."""
    policy = tiny_policy()
    params = SamplingParams(max_tokens=24, temperature=temperature, top_p=0.8, ignore_eos=True)
    engine = tiny_engine(policy, [build("w4", DrafterConfig(w4_kernel="torch"))])
    requests = requests_for(vocab=48, prompts=4, params=[params], seed=6)
    done = run_engine(engine, requests, fixed_plan("w4", 3))
    kept = []
    for request in requests:
        completion = done[request.key]
        for logits_V, token in zip(_forced_at(policy, request, completion), completion.tokens, strict=True):
            own = float((logits_V / temperature).log_softmax(-1)[token.token_id])
            assert math.exp(own - token.scaled_logprob) == pytest.approx(1.0, abs=1e-6)
            assert token.target_logprob == pytest.approx(own - token.kept_logmass, abs=1e-9)
            kept.append(math.exp(token.kept_logmass))
    assert 0.8 - 1e-9 <= min(kept) < sum(kept) / len(kept) < 0.99


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_every_logprob_is_that_of_a_forward_over_the_text_so_far(temperature: float) -> None:
    """A12: accepted, corrected, bonus and plain tokens alike, each against the policy computed alone."""
    policy = tiny_policy()
    params = SamplingParams(max_tokens=40, temperature=temperature, ignore_eos=True)
    engine = tiny_engine(policy, [build("w4", DrafterConfig(w4_kernel="torch"))])
    requests = requests_for(vocab=48, prompts=3, params=[params], seed=9)
    done = run_engine(engine, requests, fixed_plan("w4", 2))
    origins = set()
    for request in requests:
        completion = done[request.key]
        for logits_V, token in zip(_forced_at(policy, request, completion), completion.tokens, strict=True):
            raw = float(logits_V.log_softmax(-1)[token.token_id])
            scaled = float((logits_V / temperature).log_softmax(-1)[token.token_id])
            assert token.raw_logprob == pytest.approx(raw, abs=1e-9)
            assert token.scaled_logprob == token.target_logprob == pytest.approx(scaled, abs=1e-9)
            assert token.target_logprob < 0
            origins.add(token.origin)
    assert origins == {"plain", "accepted", "corrected", "bonus"}


# ---- updates in the middle of a forward -----------------------------------------------------------


class _HeldLayer:
    """Stops the forward inside its second layer when told to, until the test lets it go on."""

    def __init__(self, decoder: TorchDecoder) -> None:
        self._layer = decoder._layer
        self.hold, self.held, self.go_on = threading.Event(), threading.Event(), threading.Event()
        self.inside = False
        self.loads_inside = 0
        load = decoder.load

        def watched(state: Any) -> None:
            self.loads_inside += self.inside
            load(state)

        decoder._layer, decoder.load = self, watched  # type: ignore[method-assign, assignment]

    def __call__(self, *args: Any, layer: int, **more: Any) -> Any:
        self.inside = True
        if layer == 1 and self.hold.is_set():
            self.hold.clear()
            self.held.set()
            assert self.go_on.wait(30)
            self.go_on.clear()
        out = self._layer(*args, layer=layer, **more)
        self.inside = layer == 0
        return out


def test_an_update_sent_in_the_middle_of_a_layer_waits_for_the_round_to_end() -> None:
    """A28: twenty of them; each token's logprob is that of the version it names, over its whole text."""
    policies = [tiny_policy(seed=v) for v in range(21)]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    requests = requests_for(vocab=48, prompts=2, params=[params], seed=1, longest_prompt=10)
    engine = tiny_engine(policies[0], [ScriptedDrafter(script=lambda r: [3] * r.gamma)])
    held = _HeldLayer(engine._decoder)  # type: ignore[arg-type]
    fixed = ControllerConfig(kind="fixed", drafter="scripted", gamma=2)
    controller = build_controller(fixed, engine.traits, engine.part_shapes(), None)
    done: Queue[Completion] = Queue()

    def deliver(events: HostEvents) -> None:
        for completion in events.completions:
            done.put(completion)

    loop = EngineLoop(engine, controller, host="here", deliver=deliver)
    thread = threading.Thread(target=loop.run, daemon=True)
    loop.add(requests)
    held.hold.set()
    thread.start()
    for version in range(1, 21):
        assert held.held.wait(30)
        held.held.clear()
        state = policies[version].state
        loop.begin_update(manifest(state, version), "recompute")
        loop.stage(list(state.items()))
        live = loop.commit_update()
        assert not live.done()
        held.go_on.set()
        assert live.result(30) == version
        held.hold.set()
    held.hold.clear()
    held.go_on.set()
    ended = [done.get(timeout=60) for _ in requests]
    loop.close()
    thread.join(30)
    assert held.loads_inside == 0
    seen: set[int] = set()
    for completion in ended:
        request = next(r for r in requests if r.prompt_uid == completion.prompt_uid)
        versions = [t.policy_version for t in completion.tokens]
        assert versions == sorted(versions)
        seen |= set(versions)
        logits = {v: _forced_at(policies[v], request, completion) for v in set(versions)}
        for i, token in enumerate(completion.tokens):
            own = float(logits[token.policy_version][i].log_softmax(-1)[token.token_id])
            assert token.raw_logprob == pytest.approx(own, abs=1e-9)
    assert seen >= set(range(21)) - {0}

"""One compiled call drafts what passes one by one draft: the same tokens, states, keys and values."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from controller.types import POLICY
from drafters.config import DrafterConfig
from drafters.passes import draft_by_passes
from drafters.registry import build
from drafters.types import DraftChain, DraftError, DraftModel, DraftRequest, DraftStep, Proposal
from rollout.config import EngineConfig
from rollout.engine.native.compiled_forward.decoder import CompiledDecoder, CompiledKV, compiled_unavailable
from rollout.engine.native.decoder import ForwardResult
from rollout.engine.native.drafts import draft_chain
from rollout.engine.native.drafts.view import NativeDraftModel, NativePolicyView
from rollout.engine.native.engine import NativeEngine
from rollout.engine.native.rows import RowBatch
from rollout.engine.native.work import draft_request
from rollout.testing import tiny_looped_policy
from rollout.testing_native import MIXED_PARAMS, ar_plan, fixed_plan, requests_for, run_engine, tiny_engine
from rollout.types import SamplingParams

pytestmark = pytest.mark.skipif(compiled_unavailable() is not None, reason=str(compiled_unavailable()))

NAMES = ("w4", "shallow_loop_1", "shallow_loop_3")
VOCAB = 48
UNEDITED = tuple(p for p in MIXED_PARAMS if not (p.has_penalties or p.logit_bias or p.min_tokens))
EDITED = tuple(p for p in MIXED_PARAMS if p not in UNEDITED)
UNFILTERED = tuple(p for p in UNEDITED if not p.has_filters)
GAMMAS = (3, 0, 5, 1, 5, 2)


@dataclass(kw_only=True)
class PassByPass:
    """A draft model without its chain."""

    inner: DraftModel

    def chain(self, requests: Sequence[DraftRequest], gammas: Sequence[int]) -> DraftChain | None:
        return None

    def step(self, requests: Sequence[DraftRequest], drafts: Sequence[Sequence[int]]) -> DraftStep:
        return self.inner.step(requests, drafts)


def engine_of(
    *, threads: int = 1, verify: str = "coupled", context: int = 128, vocab: int = VOCAB, **settings: object
) -> NativeEngine:
    return tiny_engine(
        tiny_looped_policy(vocab=vocab),
        [build(name, DrafterConfig(**settings)) for name in NAMES],  # type: ignore[arg-type]
        compiled=True,
        threads=threads,
        config=EngineConfig(max_batch=8, max_context_tokens=context, verify=verify),  # type: ignore[arg-type]
    )


@contextmanager
def decoding(
    engine: NativeEngine, params: Sequence[SamplingParams] = UNEDITED, *, prompts: int = len(GAMMAS)
) -> Iterator[list[DraftRequest]]:
    """Yield requests of sequences that have some tokens and room for drafts."""
    for request in requests_for(vocab=VOCAB, prompts=prompts, params=params, seed=7):
        engine.add(request)
    for _ in range(3):
        engine.run_round(ar_plan(engine.load()))
    scheduler = engine._scheduler
    running = scheduler.decoding()
    for sequence in running:
        assert scheduler.reserve(sequence, len(sequence.tokens) + 8, may_preempt=False)
    yield [draft_request(s, gamma) for s, gamma in zip(running, GAMMAS, strict=False)]


def model_of(engine: NativeEngine, name: str) -> NativeDraftModel:
    model = engine._drafting.slots[name].drafter.model
    assert isinstance(model, NativeDraftModel)
    return model


@dataclass(kw_only=True)
class Drafts:
    """What one way of drafting left behind."""

    proposal: Proposal
    states: dict[int, tuple[int, list[list[float]]]]
    """By key: the depth, and the states of the rows that verification may go on from."""

    kv: Tensor


def drafts_of(engine: NativeEngine, model: DraftModel, requests: Sequence[DraftRequest]) -> Drafts:
    """Draft, and put KV memory back as it was."""
    storage, states = engine._state.storage, engine._state.draft_states
    assert isinstance(storage, CompiledKV)
    before = storage.data.clone()
    vocab = engine._decoder.spec.vocab_size
    proposal = draft_by_passes("it", model, requests, max_gamma=8, vocab_size=vocab)
    left: dict[int, tuple[int, list[list[float]]]] = {}
    for request, tokens in zip(requests, proposal.tokens, strict=True):
        fed = [request.tokens[-1], *tokens]
        depth, numbers = states.standing(request.key, fed, start=len(request.tokens) - 1)
        left[request.key] = (depth, states.states()[numbers].tolist() if numbers else [])
    states.clear()
    out = Drafts(proposal=proposal, states=left, kv=storage.data.clone())
    storage.data.copy_(before)
    return out


def both(engine: NativeEngine, name: str, requests: Sequence[DraftRequest]) -> tuple[Drafts, Drafts]:
    model = model_of(engine, name)
    return drafts_of(engine, model, requests), drafts_of(engine, PassByPass(inner=model), requests)


def assert_same(chain: Drafts, steps: Drafts) -> None:
    assert chain.proposal == steps.proposal
    assert chain.states == steps.states
    assert torch.equal(chain.kv, steps.kv)


# ---- the same bits ------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_chain_leaves_the_tokens_states_and_keys_of_passes_one_by_one(name: str, threads: int) -> None:
    """Ragged gammas, none among them; temperatures, greedy and every filter in one batch."""
    engine = engine_of(threads=threads)
    with decoding(engine) as requests:
        chain, steps = both(engine, name, requests)
        assert_same(chain, steps)
        assert [len(tokens) for tokens in chain.proposal.tokens] == list(GAMMAS)
        assert (chain.proposal.passes, chain.proposal.rows) == (max(GAMMAS), sum(GAMMAS))
        kept = [len(states) for _, states in chain.states.values()]
        assert kept == ([0] * len(GAMMAS) if name == "w4" else list(GAMMAS))
        for request in requests:  # nor does it matter who else drafts
            if request.gamma:
                alone = drafts_of(engine, model_of(engine, name), [request])
                index = requests.index(request)
                assert alone.proposal.tokens[0] == chain.proposal.tokens[index]
                assert alone.states[request.key] == chain.states[request.key]


class NeverStepped(PassByPass):
    """A model that must be asked for chains."""

    def chain(self, requests: Sequence[DraftRequest], gammas: Sequence[int]) -> DraftChain | None:
        return self.inner.chain(requests, gammas)

    def step(self, requests: Sequence[DraftRequest], drafts: Sequence[Sequence[int]]) -> DraftStep:
        raise AssertionError("these requests need no pass of their own")


@pytest.mark.parametrize("name", NAMES)
def test_whole_rollouts_are_drafted_by_chains_alone(name: str) -> None:
    engine = engine_of()
    drafter = engine._drafting.slots[name].drafter
    drafter.model = NeverStepped(inner=model_of(engine, name))
    requests = requests_for(vocab=VOCAB, prompts=6, params=UNEDITED, seed=1)
    done = run_engine(engine, requests, fixed_plan(name, 4))
    assert engine.gauges()[f"drafter/{name}_failures"] == 0
    plain = run_engine(engine_of(), requests, ar_plan)
    assert {k: c.token_ids for k, c in done.items()} == {k: c.token_ids for k, c in plain.items()}
    assert sum(c.provenance.accepted for c in done.values() if c.provenance) > 0


# ---- a head with a screen ------------------------------------------------------------------------


def looking_at(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    monkeypatch.setattr(draft_chain, "SHORTLIST", tokens)


@pytest.mark.parametrize("head_bits", [8, 16])
def test_a_head_that_looks_at_every_token_chooses_as_without_a_screen(
    monkeypatch: pytest.MonkeyPatch, head_bits: int
) -> None:
    """However wrong the screen may be, the head decides among what it is shown."""
    looking_at(monkeypatch, VOCAB)
    engine = engine_of(threads=2, w4_screen="on", w4_head_bits=head_bits)
    assert model_of(engine, "w4").decoder.screens  # type: ignore[attr-defined]
    assert not model_of(engine, "shallow_loop_1").decoder.screens  # type: ignore[attr-defined]
    with decoding(engine, UNFILTERED) as requests:
        assert_same(*both(engine, "w4", requests))


@pytest.mark.parametrize("params", [UNEDITED, EDITED], ids=["filters", "edits"])
def test_filters_and_edits_need_all_of_the_head(
    monkeypatch: pytest.MonkeyPatch, params: tuple[SamplingParams, ...]
) -> None:
    looking_at(monkeypatch, 1)  # what it would choose is almost never the head's choice
    engine = engine_of(w4_screen="on")
    with decoding(engine, params) as requests:
        assert_same(*both(engine, "w4", requests))


def test_a_short_list_holds_what_the_head_would_choose_but_for_few() -> None:
    engine = engine_of(vocab=2000, w4_screen="on")
    with decoding(engine, UNFILTERED) as requests:
        chain, steps = both(engine, "w4", requests)
    pairs = zip(chain.proposal.tokens, steps.proposal.tokens, strict=True)
    same = [a == b for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True)]
    assert len(same) == sum(GAMMAS)
    assert sum(same) >= 0.9 * len(same)


def test_rollouts_drafted_through_a_screen_are_the_policys(monkeypatch: pytest.MonkeyPatch) -> None:
    looking_at(monkeypatch, 2)
    engine = engine_of(threads=2, w4_screen="on")
    requests = requests_for(vocab=VOCAB, prompts=6, params=UNEDITED, seed=2)
    done = run_engine(engine, requests, fixed_plan("w4", 4))
    plain = run_engine(engine_of(), requests, ar_plan)
    assert {k: c.token_ids for k, c in done.items()} == {k: c.token_ids for k, c in plain.items()}
    assert sum(c.provenance.accepted for c in done.values() if c.provenance) > 0


@pytest.mark.parametrize(("verify", "chains"), [("coupled", True), ("block", False), ("token", False)])
def test_a_screen_is_offered_where_chains_draft(verify: str, chains: bool) -> None:
    """Drafts whose distribution counts are drawn from the head alone."""
    view = NativePolicyView(engine_of(verify=verify)._state, policy_version=0)
    assert view.compiled
    assert view.chains is chains


def test_a_pass_is_timed_with_its_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, asked = engine_of(w4_screen="on"), list[bool]()
    forward = CompiledDecoder.forward

    def spied(self: CompiledDecoder, *args: Any, screened: bool = False, **settings: Any) -> ForwardResult:
        asked.append(screened and self.screens)
        return forward(self, *args, screened=screened, **settings)

    monkeypatch.setattr(CompiledDecoder, "forward", spied)
    for part in ("w4", "shallow_loop_1", POLICY):
        assert engine.time_forward(part, rows=2, context_tokens=4) > 0.0
    assert asked == [True, False, False]


def test_logits_of_a_screen_are_not_the_heads_but_near() -> None:
    engine = engine_of(w4_screen="on")
    decoder = model_of(engine, "w4").decoder
    assert isinstance(decoder, CompiledDecoder)
    rows = RowBatch(
        token_ids_M=torch.arange(5, dtype=torch.int32),
        positions_M=torch.arange(5, dtype=torch.int32),
        table_M=torch.zeros(5, dtype=torch.int32),
        page_table_SP=torch.zeros(1, 1, dtype=torch.int32),
        head_rows_R=torch.arange(5, dtype=torch.int32),
    )
    storage = decoder.new_storage(1)
    head, screen = (
        decoder.forward(rows, storage, screened=screened).logits_RV.clone() for screened in (False, True)
    )
    assert not torch.equal(head, screen)
    assert (head - screen).norm() < 0.3 * head.norm()


# ---- where it says no ---------------------------------------------------------------------------


def refuses(engine: NativeEngine, name: str, requests: Sequence[DraftRequest]) -> bool:
    model = model_of(engine, name)
    refused = model.chain(requests, [r.gamma for r in requests]) is None
    assert not (refused and engine._state.draft_states.any)
    engine._state.draft_states.clear()
    return refused


@pytest.mark.parametrize("edited", EDITED, ids=["penalties", "bias and bans"])
def test_edits_beside_others_are_drafted_pass_by_pass(edited: SamplingParams) -> None:
    engine = engine_of()
    with decoding(engine, [UNEDITED[0], edited]) as requests:
        assert refuses(engine, "w4", requests)
        assert not refuses(engine, "w4", requests[::2])
        for name in NAMES:
            assert_same(*both(engine, name, requests))


def test_min_tokens_end_where_nothing_is_banned_any_more() -> None:
    engine = engine_of()
    few = SamplingParams(max_tokens=24, min_tokens=5, stop_ids=(VOCAB - 1,), ignore_eos=True)
    with decoding(engine, [few], prompts=2) as requests:
        assert refuses(engine, "w4", requests)
        for _ in range(3):
            engine.run_round(ar_plan(engine.load()))
        assert not refuses(engine, "w4", requests)


@pytest.mark.parametrize("verify", ["block", "token"])
def test_drafts_that_are_sampled_report_their_distributions_pass_by_pass(verify: str) -> None:
    engine = engine_of(verify=verify)
    with decoding(engine) as requests:
        assert refuses(engine, "w4", requests)


def test_the_torch_decoder_drafts_pass_by_pass() -> None:
    engine = tiny_engine(tiny_looped_policy(layers=1), [build("shallow_loop_1", DrafterConfig())])
    with decoding(engine, prompts=1) as requests:
        assert refuses(engine, "shallow_loop_1", requests)


# ---- what ends a chain --------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_where_pages_end_the_drafts_before_stand_and_the_reason_is_told(name: str) -> None:
    engine = engine_of(context=48)
    with decoding(engine, prompts=2) as requests:
        longest = max(requests, key=lambda r: len(r.tokens))
        room = 48 - len(longest.tokens) + 1
        far = DraftRequest(
            key=longest.key, tokens=longest.tokens, prompt_tokens=1, gamma=room + 2, prompt_uid="p"
        )
        sequence = engine._scheduler.running[longest.key]
        assert engine._scheduler.reserve(sequence, 48, may_preempt=False)
        model = model_of(engine, name)
        outcomes = []
        for way in (model, PassByPass(inner=model)):
            proposal = draft_by_passes("it", way, [far], max_gamma=64, vocab_size=VOCAB)
            outcomes.append(proposal)
            engine._state.draft_states.clear()
        assert outcomes[0] == outcomes[1]
        assert (len(outcomes[0].tokens[0]), outcomes[0].passes) == (room, room)
        assert "page" in outcomes[0].problem


@pytest.mark.parametrize("name", NAMES)
def test_a_token_that_is_none_is_refused_before_anything_is_drafted(name: str) -> None:
    engine = engine_of()
    with decoding(engine) as requests:
        bad = DraftRequest(
            key=requests[0].key, tokens=[*requests[0].tokens, VOCAB], prompt_tokens=1, gamma=2, prompt_uid="p"
        )
        with pytest.raises(DraftError, match="a token id lies outside the vocabulary"):
            drafts_of(engine, model_of(engine, name), [bad, *requests[1:]])
        assert not any(
            engine._state.draft_states.standing(r.key, r.tokens[-1:], start=0)[0] for r in requests
        )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ends_at", [0, 1, 2])
def test_a_row_that_cannot_be_chosen_from_ends_the_drafts_where_passes_would(name: str, ends_at: int) -> None:
    engine = engine_of()
    greedy = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    with decoding(engine, [greedy]) as requests:
        model = model_of(engine, name)
        good = drafts_of(engine, model, requests).proposal.tokens
        fed = [[r.tokens[-1], *tokens] for r, tokens in zip(requests, good, strict=True)]
        poison = fed[2][ends_at]
        first = min(t.index(poison) for t in fed if poison in t[:-1])
        engine._decoder._weights.embedding_VD[poison] = float("nan")  # type: ignore[attr-defined]
        if first == 0:
            for way in (model, PassByPass(inner=model)):
                with pytest.raises(DraftError, match="logits are not finite"):
                    drafts_of(engine, way, requests)
                engine._state.draft_states.clear()
            return
        chain, steps = both(engine, name, requests)
        assert chain.proposal.tokens == steps.proposal.tokens == [t[:first] for t in good]
        assert chain.proposal.passes == steps.proposal.passes == first
        assert "logits are not finite" in chain.proposal.problem
        assert {k: len(s) for k, (_, s) in chain.states.items()} == {
            k: len(s) for k, (_, s) in steps.states.items()
        }


def test_a_forked_child_is_told_that_its_threads_are_gone() -> None:
    engine = engine_of(threads=2)
    with decoding(engine) as requests:
        child = os.fork()
        if child == 0:
            told = 1
            try:
                drafts_of(engine, model_of(engine, "w4"), requests)
            except DraftError as error:
                told = 0 if "forked" in str(error) else 2
            os._exit(told)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# ---- what it tells of itself --------------------------------------------------------------------


def test_forwards_and_choices_of_a_chain_are_on_the_clock() -> None:
    engine = engine_of()
    with decoding(engine) as requests:
        clock = engine._clock
        clock.take()
        drafts_of(engine, model_of(engine, "shallow_loop_1"), requests)
        taken = clock.take()
        assert taken.choose_s > 0
        assert taken.split is not None
        parts = (taken.split.linears_s, taken.split.attention_s, taken.split.head_s, taken.split.rest_s)
        assert min(parts) > 0
        assert taken.forward_s == pytest.approx(sum(parts))

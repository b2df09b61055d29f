"""The 4-bit drafter over a small policy of linears: builds, versions, ragged drafts, costs, refusals."""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from drafters import w4
from drafters.config import DrafterConfig
from drafters.int4.linears import Kernel, build_linear
from drafters.int4.menu import ROWS, KernelMenu, LinearShape, menu_of
from drafters.types import DraftError, DraftRequest, DraftStep, LinearWeight, QuantizedLinear
from drafters.w4 import SCREENED_VOCAB, W4Drafter

VOCAB, HIDDEN = 48, 32


@dataclass(frozen=True, kw_only=True)
class Rows:
    name: str
    weight_NK: Tensor
    panels: None = None

    @property
    def out_features(self) -> int:
        return self.weight_NK.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight_NK.shape[1]

    def rows(self) -> Tensor:
        return self.weight_NK


class SmallModel:
    """Greedy next token of the last token alone, through whatever linears it was given."""

    def __init__(self, embedding_VD: Tensor, apply: Mapping[str, Callable[[Tensor], Tensor]]) -> None:
        self.embedding_VD = embedding_VD
        self.apply = apply
        self.rows_per_pass: list[list[int]] = []

    def chain(self, requests: Sequence[DraftRequest], gammas: Sequence[int]) -> None:
        return None

    def step(self, requests: Sequence[DraftRequest], drafts: Sequence[Sequence[int]]) -> DraftStep:
        self.rows_per_pass.append([r.key for r in requests])
        last = [d[-1] if d else r.tokens[-1] for r, d in zip(requests, drafts, strict=True)]
        hidden_RD = self.embedding_VD[last]
        for name in ("layers.0.qkv", "layers.0.down"):
            hidden_RD = hidden_RD + torch.tanh(self.apply[name](hidden_RD))
        return DraftStep(tokens=self.apply["head"](hidden_RD).argmax(-1).tolist(), probs=None)


class SmallPolicy:
    """A ``PolicyView`` with float32 weights of a given seed."""

    vocab_size = VOCAB
    loops = 1

    def __init__(self, *, version: int, seed: int = 0, hidden: int = HIDDEN, compiled: bool = False) -> None:
        self.policy_version = version
        self.compiled = self.chains = compiled
        noise = torch.Generator().manual_seed(seed)
        self.embedding_VD = torch.randn(VOCAB, hidden, generator=noise)
        self.weights = {
            name: torch.randn(n, hidden, generator=noise) / hidden**0.5
            for name, n in (("layers.0.qkv", hidden), ("layers.0.down", hidden), ("head", VOCAB))
        }

    def linears(self) -> Iterator[LinearWeight]:
        return (Rows(name=name, weight_NK=w) for name, w in self.weights.items())

    def with_linears(self, linears: Mapping[str, QuantizedLinear]) -> SmallModel:
        own = {name: lambda x, w=w: x @ w.T for name, w in self.weights.items()}
        return SmallModel(self.embedding_VD, {**own, **{n: q.apply for n, q in linears.items()}})


class Answering:
    """A draft model that answers what it is told to."""

    def __init__(self, answer: Callable[[int], DraftStep]) -> None:
        self.answer = answer

    def chain(self, requests: Sequence[DraftRequest], gammas: Sequence[int]) -> None:
        return None

    def step(self, requests: Sequence[DraftRequest], drafts: Sequence[Sequence[int]]) -> DraftStep:
        return self.answer(len(requests))


class AnsweringPolicy(SmallPolicy):
    def __init__(self, answer: Callable[[int], DraftStep]) -> None:
        super().__init__(version=1)
        self.answer = answer

    def with_linears(self, linears: Mapping[str, QuantizedLinear]) -> Answering:  # type: ignore[override]
        return Answering(self.answer)


def request(key: int, tokens: Sequence[int], gamma: int) -> DraftRequest:
    return DraftRequest(key=key, tokens=tokens, prompt_tokens=1, gamma=gamma, prompt_uid=f"p{key}")


def built(view: SmallPolicy, **settings: object) -> W4Drafter:
    drafter = W4Drafter(DrafterConfig(**settings))  # type: ignore[arg-type]
    drafter.rebuild(view)
    return drafter


def addresses(drafter: W4Drafter) -> dict[str, int]:
    return {
        f"{name}.{buffer}": value.data_ptr()
        for name, linear in drafter.linears.items()
        for buffer, value in vars(linear).items()
        if isinstance(value, Tensor)
    }


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Mapping[Kernel, tuple[float, ...]]:
    """Timings in place of those of this machine: ``aten`` to 2 rows, ``torch`` beyond."""
    seconds: dict[Kernel, tuple[float, ...]] = {
        "aten": tuple(1.0 if rows <= 2 else 3.0 for rows in ROWS),
        "torch": tuple(2.0 for _ in ROWS),
    }
    monkeypatch.setattr(w4, "kept_or_taken", lambda *_, **__: menu_of(seconds, {"nf4": "none here"}))
    return seconds


def test_ragged_gammas_drop_out_one_by_one_and_costs_count_every_row() -> None:
    drafter = built(SmallPolicy(version=3), w4_kernel="torch")
    requests = [request(0, [1, 2, 3], 3), request(1, [4, 5], 1), request(2, [6], 0), request(3, [7, 8], 2)]
    proposal = drafter.propose(requests)
    assert [len(t) for t in proposal.tokens] == [3, 1, 0, 2]
    assert isinstance(drafter.model, SmallModel)
    assert drafter.model.rows_per_pass == [[0, 1, 3], [0, 3], [0]]
    assert (proposal.passes, proposal.rows) == (3, 6)
    assert proposal.context_tokens == (3 + 2 + 2) + (4 + 3) + 5
    assert proposal.probs is None


def test_a_sequence_drafts_the_same_tokens_alone_and_among_others() -> None:
    drafter = built(SmallPolicy(version=0), w4_kernel="compiled")
    requests = [request(key, [key + 1], 4) for key in range(6)]
    together = drafter.propose(requests).tokens
    assert [drafter.propose([r]).tokens[0] for r in requests] == together
    assert len({tuple(t) for t in together}) > 1


def test_without_anything_to_draft_no_pass_runs() -> None:
    drafter = built(SmallPolicy(version=0), w4_kernel="torch")
    for requests in ([], [request(0, [1], 0)]):
        proposal = drafter.propose(requests)
        assert (proposal.passes, proposal.rows, proposal.context_tokens) == (0, 0, 0)
    assert isinstance(drafter.model, SmallModel)
    assert drafter.model.rows_per_pass == []


def test_gamma_is_capped_by_what_the_drafter_offers() -> None:
    drafter = built(SmallPolicy(version=0), w4_kernel="torch", max_gamma=2)
    assert [len(t) for t in drafter.propose([request(0, [1], 7)]).tokens] == [2]


@pytest.mark.parametrize("kernel", ["compiled", "aten", "torch"])
def test_every_kernel_drafts_what_the_policy_would_mostly_say(kernel: str) -> None:
    view = SmallPolicy(version=0)
    drafter = built(view, w4_kernel=kernel)
    own = view.with_linears({})
    agreed = sum(
        drafter.propose([request(0, [token], 1)]).tokens[0] == own.step([request(0, [token], 1)], [[]]).tokens
        for token in range(VOCAB)
    )
    assert agreed >= 0.75 * VOCAB


@pytest.mark.parametrize("kernel", ["compiled", "aten", "torch"])
def test_a_new_version_is_rounded_into_the_same_buffers_and_equals_a_fresh_build(kernel: str) -> None:
    """A26, A30."""
    drafter = built(SmallPolicy(version=1, seed=1), w4_kernel=kernel)
    before = addresses(drafter)
    second = SmallPolicy(version=2, seed=2)
    drafter.rebuild(second)
    fresh = built(second, w4_kernel=kernel)
    assert drafter.drafter_version == second.policy_version == 2
    assert before == addresses(drafter)
    requests = [request(k, [k], 5) for k in range(8)]
    assert drafter.propose(requests).tokens == fresh.propose(requests).tokens


def test_drafting_before_a_build_or_for_another_version_is_refused() -> None:
    """A26: no lag behind the policy is ever served."""
    drafter = W4Drafter(DrafterConfig(w4_kernel="torch"))
    assert drafter.drafter_version == -1
    with pytest.raises(DraftError, match="has not been built"):
        drafter.propose([request(0, [1], 1)])
    view = SmallPolicy(version=1)
    drafter.rebuild(view)
    view.policy_version = 2
    with pytest.raises(DraftError, match="policy version 1, the live one is 2"):
        drafter.propose([request(0, [1], 1)])


def test_a_refused_build_leaves_nothing_to_draft_with_until_the_next_good_one() -> None:
    drafter = built(SmallPolicy(version=1), w4_kernel="compiled")
    broken = SmallPolicy(version=2)
    broken.weights["layers.0.down"][3, 4] = float("nan")
    with pytest.raises(DraftError, match=r"build refused: layers\.0\.down"):
        drafter.rebuild(broken)
    assert drafter.drafter_version == -1
    with pytest.raises(DraftError, match="has not been built"):
        drafter.propose([request(0, [1], 1)])
    drafter.rebuild(SmallPolicy(version=3))
    assert drafter.propose([request(0, [1], 1)]).passes == 1


def test_a_head_of_16_bits_stays_the_policys_own_and_its_bytes_still_count() -> None:
    view = SmallPolicy(version=0)
    sixteen, eight = (built(view, w4_kernel="compiled", w4_head_bits=bits) for bits in (16, 8))
    assert set(sixteen.linears) == {"layers.0.qkv", "layers.0.down"}
    assert {n: q.bits for n, q in eight.linears.items()} == {"layers.0.qkv": 4, "layers.0.down": 4, "head": 8}
    body = sum(q.weight_bytes for q in sixteen.linears.values())
    assert sixteen.weight_bytes == body + 2 * VOCAB * HIDDEN
    assert eight.weight_bytes == body + eight.linears["head"].weight_bytes
    looped = SmallPolicy(version=0)
    looped.loops = 3
    thrice = built(looped, w4_kernel="compiled", w4_head_bits=8)
    assert thrice.weight_bytes == 3 * body + eight.linears["head"].weight_bytes


def test_a_screen_is_a_head_of_4_bits_that_follows_the_policy_in_its_buffers() -> None:
    view = SmallPolicy(version=0, compiled=True)
    with_one, without = built(view, w4_screen="on"), built(view)
    assert set(with_one.linears) - set(without.linears) == {"screen"}
    screen, head = with_one.linears["screen"], with_one.linears["head"]
    assert (screen.bits, screen.out_features, screen.in_features) == (4, VOCAB, HIDDEN)
    assert with_one.weight_bytes == without.weight_bytes - head.weight_bytes + screen.weight_bytes
    assert with_one.held_bytes == without.held_bytes + screen.weight_bytes
    with_one.rebuild(SmallPolicy(version=1, seed=3, compiled=True))
    assert with_one.linears["screen"] is screen
    fresh = built(SmallPolicy(version=1, seed=3, compiled=True), w4_screen="on").linears["screen"]
    x = torch.eye(HIDDEN)
    assert torch.equal(screen.apply(x), fresh.apply(x))


def test_a_screen_is_taken_by_itself_for_large_vocabularies_in_the_compiled_decoder_alone() -> None:
    def has_screen(view: SmallPolicy, **settings: object) -> bool:
        return "screen" in built(view, **settings).linears

    def large(*, compiled: bool) -> SmallPolicy:
        view = SmallPolicy(version=0, compiled=compiled)
        view.vocab_size = SCREENED_VOCAB
        return view

    assert has_screen(large(compiled=True))
    assert not has_screen(large(compiled=True), w4_screen="off")
    assert not has_screen(large(compiled=False))
    assert not has_screen(SmallPolicy(version=0, compiled=True))
    for view in (large(compiled=False), large(compiled=True)):
        view.chains = False  # as under verify=block|token: nothing would read it
        assert not has_screen(view)
        with pytest.raises(DraftError, match="w4_screen=on needs the compiled decoder and verify=coupled"):
            has_screen(view, w4_screen="on")
    with pytest.raises(ValueError, match=r"drafter\.w4_screen must be one of"):
        DrafterConfig(w4_screen="maybe")  # type: ignore[arg-type]


def test_auto_takes_the_compiled_kernel_where_the_engine_is_compiled() -> None:
    drafter = built(SmallPolicy(version=0, compiled=True))
    assert type(drafter.linears["head"]).__name__ == "PackedInt8Linear"


def test_auto_takes_by_row_count_what_was_timed_and_says_so_once(
    caplog: pytest.LogCaptureFixture, timed: Mapping[Kernel, tuple[float, ...]]
) -> None:
    with caplog.at_level(logging.INFO, logger="drafters.w4"):
        drafter = built(SmallPolicy(version=0))
        drafter.rebuild(SmallPolicy(version=1))
    assert {type(q).__name__ for q in drafter.linears.values()} == {"MenuLinear"}
    assert [r.getMessage() for r in caplog.records] == [
        "drafter.w4_kernel: auto -> aten to 2 rows, torch from there on (not nf4: none here)"
    ]


def test_a_layout_is_packed_when_its_rows_come_counted_from_then_on_and_rebuilt_in_place(
    timed: Mapping[Kernel, tuple[float, ...]],
) -> None:
    drafter = built(SmallPolicy(version=0))
    aten, torchs = (built(SmallPolicy(version=0), w4_kernel=kernel) for kernel in ("aten", "torch"))
    drafter.propose([request(0, [1], 2), request(1, [2], 2)])
    assert drafter.held_bytes == drafter.weight_bytes == aten.held_bytes
    four = [request(key, [key], 2) for key in range(4)]
    assert drafter.propose(four).tokens == torchs.propose(four).tokens
    assert drafter.held_bytes == aten.held_bytes + torchs.held_bytes
    assert drafter.weight_bytes == aten.weight_bytes
    layouts = [layout for q in drafter.linears.values() for layout in q.layouts.values()]  # type: ignore[attr-defined]
    addresses_before = [t.data_ptr() for q in layouts for t in vars(q).values() if isinstance(t, Tensor)]
    new = SmallPolicy(version=1, seed=4)
    drafter.rebuild(new)
    for kernel, some in (("aten", four[:1]), ("torch", four)):
        assert drafter.propose(some).tokens == built(new, w4_kernel=kernel).propose(some).tokens
    again = [layout for q in drafter.linears.values() for layout in q.layouts.values()]  # type: ignore[attr-defined]
    assert all(a is b for a, b in zip(layouts, again, strict=True))
    assert addresses_before == [
        t.data_ptr() for q in again for t in vars(q).values() if isinstance(t, Tensor)
    ]


def test_a_head_that_stays_the_policys_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[LinearShape, ...]] = []

    def note(shapes: tuple[LinearShape, ...], **_: object) -> KernelMenu:
        asked.append(shapes)
        return menu_of({"torch": (1.0,) * len(ROWS)}, {})

    monkeypatch.setattr(w4, "kept_or_taken", note)
    view = SmallPolicy(version=0)
    view.loops = 3
    built(view, w4_head_bits=16)
    built(view)
    body = LinearShape(out_features=HIDDEN, in_features=HIDDEN, bits=4, count=6)
    assert asked == [(body,), (body, LinearShape(out_features=VOCAB, in_features=HIDDEN, bits=8, count=1))]


def test_a_chosen_kernel_is_never_replaced() -> None:
    with pytest.raises(DraftError, match="does not fit torch's int4 kernel"):
        built(SmallPolicy(version=0, hidden=24), w4_kernel="aten")
    with pytest.raises(DraftError, match="w4_kernel=torch cannot run inside the compiled decoder"):
        built(SmallPolicy(version=0, compiled=True), w4_kernel="torch")


def test_a_linear_that_changes_its_shape_is_refused() -> None:
    drafter = built(SmallPolicy(version=0), w4_kernel="torch")
    with pytest.raises(DraftError, match=r"layers\.0\.qkv changed its shape"):
        drafter.rebuild(SmallPolicy(version=1, hidden=64))


def test_an_engine_that_will_not_take_the_linears_is_a_draft_error() -> None:
    class Refusing(SmallPolicy):
        def with_linears(self, linears: Mapping[str, QuantizedLinear]) -> SmallModel:
            raise ValueError("there is no linear 'head' to replace")

    with pytest.raises(DraftError, match="could not be built: there is no linear 'head'"):
        built(Refusing(version=0), w4_kernel="torch")


def raising(_rows: int) -> DraftStep:
    raise RuntimeError("kernel fell over")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda rows: DraftStep(tokens=[0] * (rows + 1), probs=None), "chose 2 tokens for 1 rows"),
        (lambda rows: DraftStep(tokens=[VOCAB] * rows, probs=None), "outside the vocabulary"),
        (lambda rows: DraftStep(tokens=[-1] * rows, probs=None), "outside the vocabulary"),
        (lambda rows: DraftStep(tokens=[0] * rows, probs=[]), "reported 0 distributions for 1 rows"),
        (
            lambda rows: DraftStep(tokens=[0] * rows, probs=[torch.full((VOCAB,), float("nan"))] * rows),
            "not finite",
        ),
        (raising, "draft pass failed: kernel fell over"),
    ],
)
def test_an_answer_that_cannot_be_drafted_from_is_a_draft_error(
    answer: Callable[[int], DraftStep], message: str
) -> None:
    drafter = built(AnsweringPolicy(answer), w4_kernel="torch")
    with pytest.raises(DraftError, match=message):
        drafter.propose([request(0, [1], 1)])


def test_reported_distributions_come_back_as_rows_per_request() -> None:
    row_V = torch.full((VOCAB,), 1 / VOCAB)
    answer = lambda rows: DraftStep(tokens=[0] * rows, probs=[row_V] * rows)  # noqa: E731
    drafter = built(AnsweringPolicy(answer), w4_kernel="torch")
    proposal = drafter.propose([request(0, [1], 2), request(1, [1], 0), request(2, [1], 1)])
    assert proposal.probs is not None
    assert [tuple(p.shape) for p in proposal.probs] == [(2, VOCAB), (0, VOCAB), (1, VOCAB)]


def test_requests_are_only_read() -> None:
    drafter = built(SmallPolicy(version=0), w4_kernel="torch")
    tokens = [1, 2, 3]
    asked = request(0, tokens, 3)
    copy = dataclasses.replace(asked)
    drafter.propose([asked])
    drafter.finished(asked)
    drafter.forget(0)
    assert asked == copy
    assert tokens == [1, 2, 3]
    assert drafter.ready([asked]) is None


def test_compiled_linears_are_the_ones_the_oracle_rounds() -> None:
    view = SmallPolicy(version=0)
    drafter = built(view, w4_kernel="compiled")
    x_RK = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(9))
    for weight in view.linears():
        bits = drafter.linears[weight.name].bits
        oracle = build_linear("torch", weight, bits=bits, group=32)  # type: ignore[arg-type]
        difference = (drafter.linears[weight.name].apply(x_RK) - oracle.apply(x_RK)).abs().max()
        assert difference <= 0.02 * oracle.apply(x_RK).abs().max()


def test_drafts_before_a_failed_pass_are_kept_and_the_failure_is_named() -> None:
    passes = iter([DraftStep(tokens=[5], probs=None), DraftStep(tokens=[6], probs=None)])

    def answer(rows: int) -> DraftStep:
        step = next(passes, None)
        return raising(rows) if step is None else step

    proposal = built(AnsweringPolicy(answer), w4_kernel="torch").propose([request(0, [1], 4)])
    assert proposal.tokens == [[5, 6]]
    assert proposal.passes == 2
    assert "kernel fell over" in proposal.problem

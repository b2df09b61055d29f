"""Stop strings end a sample where decoding the whole text after each token would, and cut it nowhere else."""

import random
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from drafters.testing import ScriptedDrafter, continue_from
from rollout.engine.native.commit import commit_token, final_text
from rollout.engine.native.sequence import LiveSequence
from rollout.engine.target import Choice
from rollout.policy.embedded import embedded_folder
from rollout.testing import char_tokenizer, tiny_policy
from rollout.testing_native import ar_plan, fixed_plan, run_engine, text_of, tiny_engine
from rollout.types import Completion, Request, SamplingParams

Ended = tuple[int, str]
"""How many tokens a sample got, and its text."""

SPECIALS = ("<s>", "</s>", "<pad>")
WORDS = (" the", "ing", "e\u0301", "\u00e9", " caf\u00e9", "\u4f60\u597d", "\n\n", " .", "  ", "ab")
EMOJI = "\U0001f600"


def _byte_level(text: str) -> str:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]


def _byte_tokenizer() -> Any:
    """Return a tokenizer of all bytes, some words, pieces of characters, and special tokens."""
    halves = (
        _byte_level(EMOJI)[:2],
        _byte_level(EMOJI)[2:],
        _byte_level("x\u4f60")[:2],
        _byte_level("\u4f60y")[1:],
    )
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map(_byte_level, WORDS), *halves]
    core = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token=pieces[0]))
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(name, special=True) for name in SPECIALS])
    return PreTrainedTokenizerFast(tokenizer_object=core)


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def _by_whole_decoding(tokenizer: Any, ids: list[int], params: SamplingParams) -> Ended:
    """Return how ``ids`` end when everything is decoded after each token: the definition."""
    before = ""
    for count in range(1, len(ids) + 1):
        text = _decode(tokenizer, ids[:count])
        starts = [
            at
            for stop in params.stop
            for at in range(len(text) - len(stop) + 1)
            if text.startswith(stop, at) and not before.startswith(text[: at + len(stop)])
        ]
        if starts and count >= params.min_tokens:
            return count, text[: min(starts)]
        before = text
    return len(ids), before


def _committed(tokenizer: Any, ids: list[int], params: SamplingParams, *, prefix: int = 0) -> Ended:
    """Return how ``ids`` end when the engine's commit gets them one by one, after a replayed prefix."""
    request = Request(prompt_uid="a", sample_index=0, prompt_ids=(5,), params=params, seed=0)
    sequence = LiveSequence(
        key=0,
        request=request,
        tokens=[5, *ids[:prefix]],
        stop_ids=frozenset(),
        eos_ids=frozenset(),
        max_new_tokens=10_000,
        added_s=0.0,
    )
    for token in ids[prefix:]:
        choice = Choice(
            token=token,
            raw_logprob=0.0,
            scaled_logprob=0.0,
            target_logprob=0.0,
            kept_logmass=0.0,
            finite=True,
        )
        if commit_token(
            sequence, choice, origin="plain", drafter="ar", policy_version=0, detokenizer=tokenizer
        ):
            break
    text = final_text(sequence, tokenizer)
    assert text is not None
    return sequence.new_tokens, text


def _random_ids(rng: random.Random, tokenizer: Any, special_ids: list[int]) -> list[int]:
    """Return text, broken characters and runs of special tokens, mixed."""
    vocab = len(tokenizer)
    ids: list[int] = []
    for _ in range(rng.randrange(1, 30)):
        kind = rng.randrange(6)
        if kind == 0:
            ids += [rng.choice(special_ids)] * rng.randrange(1, 30)
        elif kind == 1:
            ids += [rng.randrange(vocab)]
        else:
            text = rng.choice([*WORDS, EMOJI, "a", "b", " "])
            whole = [tokenizer.convert_tokens_to_ids(c) for c in _byte_level(text)]
            ids += whole[: rng.choice([1, 2, 9, 9, 9])]
    return ids


def _cases(tokenizer: Any, count: int) -> list[tuple[list[int], SamplingParams, int]]:
    """Return ids, parameters whose stop strings often occur in them, and where an attempt broke off."""
    rng = random.Random(0)
    special_ids = list(tokenizer.all_special_ids) or [0]
    cases = []
    while len(cases) < count:
        ids = _random_ids(rng, tokenizer, special_ids)
        full = _decode(tokenizer, ids)
        if not full:
            continue
        stops = []
        for _ in range(rng.choice([1, 1, 2])):
            at = rng.randrange(len(full))
            stops.append(rng.choice([full[at : at + rng.choice([1, 2, 3, 6])], "\ufffd\ufffd", "ab"]))
        minimum = rng.choice([0, 0, 1, rng.randrange(len(ids) + 3)])
        params = SamplingParams(stop=tuple(stops), min_tokens=minimum, ignore_eos=True)
        cases.append((ids, params, rng.randrange(len(ids))))
    return cases


def _mismatches(tokenizer: Any, cases: list[tuple[list[int], SamplingParams, int]]) -> list[object]:
    wrong: list[object] = []
    stopped = 0
    for ids, params, broken_off in cases:
        expected = _by_whole_decoding(tokenizer, ids, params)
        stopped += expected[0] < len(ids)
        # An attempt that was broken off had not ended: its prefix is shorter than the sample.
        for prefix in (0, min(broken_off, expected[0] - 1)):
            found = _committed(tokenizer, ids, params, prefix=prefix)
            if found != expected:
                wrong.append((ids, params.stop, params.min_tokens, prefix, expected, found))
    assert stopped > len(cases) // 4, "the cases test something"
    return wrong


@pytest.mark.slow
def test_stopping_and_cutting_equal_whole_decoding_whatever_the_bytes() -> None:
    tokenizer = _byte_tokenizer()
    assert _mismatches(tokenizer, _cases(tokenizer, 1500)) == []


@pytest.mark.policy
@pytest.mark.slow
def test_stopping_and_cutting_equal_whole_decoding_with_the_embedded_tokenizer() -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_folder())
    assert _mismatches(tokenizer, _cases(tokenizer, 600)) == []


@pytest.mark.slow
def test_a_stop_string_is_found_where_one_broken_character_hides_all_bytes_beside_it() -> None:
    core = Tokenizer(models.WordLevel({f"<0x{byte:02X}>": byte for byte in range(256)}, unk_token="<0x00>"))
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    assert _decode(tokenizer, list("\u4f60\u4f60".encode()[1:])) == "\ufffd" * 5
    rng = random.Random(1)
    for _ in range(200):
        text = "".join(rng.choices(f"\u00e9\u4f60\u597d{EMOJI}", k=40))
        at = rng.randrange(20, 37)
        params = SamplingParams(stop=(text[at : at + rng.randrange(1, 5)],), ignore_eos=True)
        ids = list(text.encode())
        assert _committed(tokenizer, ids, params) == _by_whole_decoding(tokenizer, ids, params)


def test_a_stop_string_is_found_across_any_number_of_special_tokens() -> None:
    tokenizer = char_tokenizer(48)
    a, b = (tokenizer.convert_tokens_to_ids(c) for c in "ab")
    for between in (0, 1, 12, 200):
        ids = [b, a, *[1] * between, b, a, a]
        params = SamplingParams(stop=("ab",), ignore_eos=True)
        assert _committed(tokenizer, ids, params) == (3 + between, "b")


REQUEST = Request(
    prompt_uid="a",
    sample_index=0,
    prompt_ids=(5, 6, 7),
    params=SamplingParams(max_tokens=12, ignore_eos=True),
    seed=4,
)


def _alone(request: Request) -> Completion:
    return run_engine(tiny_engine(tiny_policy(), compiled=True), [request], ar_plan)[request.key]


@pytest.mark.slow
@pytest.mark.parametrize("minimum", range(13))
def test_a_string_completed_before_min_tokens_neither_stops_nor_cuts_drafted_or_resumed(minimum: int) -> None:
    free = _alone(REQUEST)
    assert free.text is not None
    tokenizer = char_tokenizer(48)
    for stop in ((free.text[2],), (free.text[5], free.text[2:4]), (free.text[0],)):
        params = replace(REQUEST.params, stop=stop, min_tokens=minimum)
        expected = _by_whole_decoding(tokenizer, list(free.token_ids), params)
        request = replace(REQUEST, params=params)
        plain = _alone(request)
        assert (len(plain.tokens), plain.text) == expected
        assert plain.text == _decode(tokenizer, list(plain.token_ids))[: len(expected[1])]
        drafter = ScriptedDrafter(continue_from({"a": free.token_ids}))
        fast = run_engine(
            tiny_engine(tiny_policy(), [drafter], compiled=True), [request], fixed_plan("scripted", 5)
        )
        assert text_of(fast[request.key]) == text_of(plain)
        for done in range(0, len(plain.tokens), 3):
            resumed = _alone(replace(request, prefix_ids=plain.token_ids[:done], attempt=1))
            assert resumed.token_ids == plain.token_ids[done:]
            assert (resumed.text, resumed.finish_reason) == (plain.text, plain.finish_reason)


def test_a_sample_that_ended_otherwise_keeps_all_its_text() -> None:
    free = _alone(REQUEST)
    assert free.text is not None
    kept = _alone(replace(REQUEST, params=replace(REQUEST.params, stop=(free.text[2],), min_tokens=12)))
    assert (kept.finish_reason, kept.text) == ("length", free.text)

"""Every field of a request is checked by type and value before anything else sees it, and kept plain."""

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import pytest

from rollout.errors import RequestError, SamplingParamsError, TokenRangeError
from rollout.seeds import sample_seed
from rollout.service.client import RolloutClient
from rollout.service.door import check_item, refused_item
from rollout.service.naming import Namer
from rollout.types import Request, SamplingParams

GOOD = Request(prompt_uid="p", sample_index=0, prompt_ids=(5, 6), params=SamplingParams(), seed=3)
HUGE = 10**5000
"""Python refuses to write it in decimal, and no float holds it."""

BAD_FIELDS: dict[str, tuple[Any, ...]] = {
    "prompt_uid": (None, 5, "", ["a"], "\ud800", b"a"),
    "sample_index": (None, "a", -1, 1.0, 2**63, True, [0]),
    "prompt_ids": (None, "567", b"ab", 5, [5, 6.0], ["5"], [None], [[5]], [-1], [HUGE], {5: 6}, {5}, [True]),
    "params": (5, "temperature", [("temperature", 1.0)], {"temperature": "hot"}, {1: 2}, {"nope": 1}),
    "seed": ("x", 3.0, -1, 2**63, HUGE, [1], float("nan"), True),
    "attempt": (None, "a", -1, 0.5),
    "prefix_ids": (None, "5", [1.5], [-1], 3),
    "deadline_s": ("x", 0, -1.0, float("nan"), float("inf"), HUGE, [1], True),
}


def checked(item: object) -> Request:
    return check_item(item, 7, context_tokens=64, run_seed=0)


def named(items: Iterable[object], alive: Collection[object] = ()) -> list[Any]:
    """Return the items of one call with names, beside calls whose samples are ``alive``."""
    namer = Namer(lambda key: key in alive)
    return [namer.named(item) for item in items]


def as_plain(request: Request) -> dict[str, Any]:
    return {f.name: getattr(request, f.name) for f in dataclasses.fields(request)}


@pytest.mark.parametrize("name", BAD_FIELDS)
def test_a_field_of_the_wrong_type_or_value_is_refused_by_its_name(name: str) -> None:
    for value in BAD_FIELDS[name]:
        for item in (dataclasses.replace(GOOD, **{name: value}), {**as_plain(GOOD), name: value}):
            with pytest.raises(RequestError) as refused:
                checked(item)
            named = "temperature" if value == {"temperature": "hot"} and isinstance(item, dict) else name
            assert named.removesuffix("s") in str(refused.value), (value, refused.value)
            ending = refused_item(item, 7, refused.value)
            assert ending.finish_reason == "failed"
            assert isinstance(ending.prompt_uid, str)
            assert ending.prompt_uid
            assert type(ending.sample_index) is int
            assert type(ending.attempt) is int


@pytest.mark.parametrize("value", [None, {"max_tokens": 3}])
def test_a_typed_request_has_typed_params(value: object) -> None:
    with pytest.raises(SamplingParamsError, match="params must be SamplingParams"):
        checked(dataclasses.replace(GOOD, params=value))


def test_a_typed_request_has_a_seed() -> None:
    with pytest.raises(RequestError, match="seed must be a whole number, got None"):
        checked(dataclasses.replace(GOOD, seed=None))


def test_numpy_numbers_are_accepted_and_become_plain_ones() -> None:
    odd: dict[str, Any] = {
        "sample_index": np.int32(0),
        "prompt_ids": np.array([5, 6]),
        "seed": np.uint64(3),
        "attempt": np.int64(0),
        "prefix_ids": [np.int16(9)],
        "deadline_s": np.float32(2.0),
    }
    plain = dataclasses.replace(GOOD, prefix_ids=(9,), deadline_s=2.0)
    for item in (dataclasses.replace(GOOD, **odd), {**as_plain(GOOD), **odd}):
        request = checked(item)
        assert repr(request) == repr(plain)


BAD_PARAMS: dict[str, tuple[Any, ...]] = {
    "temperature": (None, "1", True, 10**400, HUGE, float("nan"), float("inf"), -0.5, [1.0], 1j),
    "top_k": (2.5, np.float64(3), None, "3", -1, 2**63, HUGE, True, float("nan")),
    "top_p": (None, "0.5", 0, 1.5, float("nan"), True),
    "min_p": (None, "0", -0.1, 1.5, float("nan")),
    "repetition_penalty": (None, 0, -1.0, float("inf"), float("nan"), HUGE),
    "presence_penalty": (None, "0", float("inf"), float("nan"), 10**400),
    "frequency_penalty": (None, "0", float("-inf"), float("nan"), 10**400),
    "logit_bias": (
        *(None, [(5, 1.0)], 5, "5", {5.7: 1.0}, {"x": 1.0}, {-1: 1.0}, {None: 1.0}, {True: 1.0}, {(5,): 1.0}),
        *({5: "a"}, {5: None}, {5: HUGE}, {5: float("nan")}, {5: float("inf")}, {5: True}),
    ),
    "min_tokens": (2.5, float("nan"), None, "2", -1, True),
    "max_tokens": (7.5, float("nan"), float("inf"), "7", 0, -1, True),
    "stop_ids": (5, None, "5", ["a"], [None], [[1]], [1.5], [-1], [HUGE], [True], {5}, {5: 1}),
    "stop": (None, 5, b"a", [1], [None], [b"a"], [["a"]], [""], "", ["a", ""], {"a"}, ["\ud800"]),
    "ignore_eos": ("false", None, 0, 1, "", []),
}


def test_every_sampling_parameter_is_among_those_tried() -> None:
    assert list(BAD_PARAMS) == [f.name for f in dataclasses.fields(SamplingParams)]


@pytest.mark.parametrize("name", BAD_PARAMS)
def test_a_parameter_of_the_wrong_type_or_value_is_refused_by_its_name(name: str) -> None:
    for value in BAD_PARAMS[name]:
        with pytest.raises(SamplingParamsError, match=name):
            SamplingParams(**{name: value})
        with pytest.raises(SamplingParamsError, match=name):
            checked({"prompt_ids": [5], "params": {name: value}})


class Unreadable(dict):  # type: ignore[type-arg]
    """A mapping that breaks whatever one does with it."""

    def __iter__(self) -> Any:
        raise ZeroDivisionError("not today")

    __contains__ = keys = items = get = __getitem__ = __iter__


class Unreal:
    """A number that breaks when it is one."""

    def __index__(self) -> int:
        raise ZeroDivisionError("not today")

    __int__ = __index__


@pytest.mark.parametrize("item", [Unreadable(prompt_ids=[1]), {"sample_index": Unreal()}])
def test_an_item_that_cannot_be_read_twice_still_has_an_ending(item: Any) -> None:
    ending = refused_item(item, 7, RequestError("odd"))
    assert (ending.prompt_uid, ending.sample_index, ending.attempt) == ("item-7", 0, 0)
    assert ending.error == "RequestError: odd"


def test_params_are_plain_data_whatever_they_were_given_as() -> None:
    given = SamplingParams(
        temperature=np.float32(1),
        top_k=np.int64(3),
        top_p=1,
        logit_bias={np.int32(5): np.float64(-1), 6: float("-inf")},
        min_tokens=np.uint8(2),
        max_tokens=np.int32(7),
        stop_ids=np.array([9, 11]),
        stop=["a", "b"],
    )
    plain = SamplingParams(
        temperature=1.0,
        top_k=3,
        top_p=1.0,
        logit_bias={5: -1.0, 6: float("-inf")},
        min_tokens=2,
        max_tokens=7,
        stop_ids=(9, 11),
        stop=("a", "b"),
    )
    assert repr(given) == repr(plain)
    assert given == plain


def test_a_bare_stop_string_is_one_string() -> None:
    assert SamplingParams(stop="abc").stop == SamplingParams.from_mapping({"stop": "abc"}).stop == ("abc",)


def test_ids_named_by_digits_are_ids_because_json_has_no_other_names() -> None:
    assert SamplingParams.from_mapping({"logit_bias": {"5": 1}}).logit_bias == {5: 1.0}
    for name in ("5.0", " 5", "-5", "\u0665"):
        with pytest.raises(SamplingParamsError, match="logit_bias"):
            SamplingParams.from_mapping({"logit_bias": {name: 1}})


CLIENT = RolloutClient(None)
"""Only says what it would send."""


@pytest.mark.parametrize(
    "prompt", ["hello", "567", [5.9, 6.2], None, [10**30], [float("nan")], [-1], 5, np.array([[5]])]
)
def test_a_prompt_that_is_none_goes_to_the_door_which_refuses_it_alone(prompt: Any) -> None:
    for names in (None, ["a", "b", "c"]):
        sent = named(CLIENT.requests([[5, 6], prompt, np.array([5, 6])], n=2, prompt_uids=names))
        good = [checked(item) for item in (*sent[:2], *sent[4:])]
        assert [r.prompt_ids for r in good] == [(5, 6)] * 4
        assert len({r.key for r in good}) == 4
        for item in sent[2:4]:
            with pytest.raises(TokenRangeError, match="prompt_ids"):
                checked(item)


def test_unnamed_prompts_of_calls_at_once_are_further_samples_with_noise_of_their_own() -> None:
    client = RolloutClient(None, run_seed=9)
    call = client.requests([[5, 6], [7], [5, 6]], n=2, trainer_step=3)
    first = [checked(item) for item in named(call)]
    alive = {r.key for r in first}
    beside = [checked(item) for item in named(call, alive=alive)]
    assert len({r.key for r in (*first, *beside)}) == 12, "two calls at once are both served"
    assert len({r.seed for r in (*first, *beside)}) == 12
    for r in (*first, *beside):
        told = {"prompt_uid": r.prompt_uid, "sample_index": r.sample_index}
        assert r.seed == sample_seed(run_seed=9, trainer_step=3, **told)
    assert [checked(item) for item in named(call)] == first, "asked for again, the same"


@pytest.mark.parametrize("name", [["a"], None, 5, "", "\ud800"])
def test_a_name_that_is_none_goes_to_the_door_which_refuses_it_alone(name: Any) -> None:
    good, bad = CLIENT.requests([[5], [6]], prompt_uids=["a", name])
    assert checked(good).prompt_uid == "a"
    with pytest.raises(RequestError, match="prompt_uid"):
        checked(bad)


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 0},
        {"n": -1},
        {"n": 1.5},
        {"n": True},
        {"trainer_step": "a"},
        {"prompt_uids": ["a"]},
        {"prompt_uids": "ab"},
        {"params": 5},
        {"params": {"temperature": "1"}},
    ],
)
def test_what_concerns_all_samples_of_a_call_is_refused_before_any_is_sent(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        CLIENT.requests([[5], [6]], **wrong)

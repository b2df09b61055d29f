"""Tokens by column read, compare, join and travel as the records they stand for."""

import pickle
from dataclasses import replace
from random import Random

import pytest

from rollout.tokens import Origin, TokenLog, TokenRecord, Tokens

ORIGINS: tuple[Origin, ...] = ("plain", "accepted", "corrected", "bonus")


def some_records(count: int, *, seed: int = 0) -> list[TokenRecord]:
    rng = Random(seed)
    return [
        TokenRecord(
            token_id=rng.randrange(50_000),
            raw_logprob=-rng.random(),
            scaled_logprob=-rng.random(),
            target_logprob=rng.choice([-rng.random(), float("-inf")]),
            kept_logmass=-rng.random(),
            policy_version=rng.randrange(3),
            origin=rng.choice(ORIGINS),
            drafter=rng.choice(["ar", "w4", "history"]),
        )
        for _ in range(count)
    ]


def test_they_read_as_the_records_they_were_made_of() -> None:
    records = some_records(40)
    tokens = Tokens(records)
    assert list(tokens) == records
    assert tokens == records
    assert tokens == tuple(records)
    assert [tokens[at] for at in (0, 39, -1, -40)] == [records[at] for at in (0, 39, -1, -40)]
    assert tokens.ids == tuple(r.token_id for r in records)
    assert tokens.raw_logprobs == [r.raw_logprob for r in records]
    assert tokens.scaled_logprobs == [r.scaled_logprob for r in records]
    assert tokens.target_logprobs == [r.target_logprob for r in records]
    assert tokens.kept_logmasses == [r.kept_logmass for r in records]
    assert [tuple(s) for s in tokens.sources] == [(r.policy_version, r.origin, r.drafter) for r in records]
    for wrong in (40, -41):
        with pytest.raises(IndexError):
            tokens[wrong]
    assert not Tokens()
    assert Tokens() == ()
    assert list(Tokens()) == []


@pytest.mark.parametrize("cut", [slice(None), slice(3, 9), slice(-4, None), slice(9, 3), slice(1, 30, 7)])
def test_slices_are_those_of_a_list(cut: slice) -> None:
    records = some_records(20)
    part = Tokens(records)[cut]
    assert isinstance(part, Tokens)
    assert list(part) == records[cut]
    assert len(part) == len(records[cut])
    assert list(part[1:]) == records[cut][1:], "and slices of slices"


@pytest.mark.parametrize("field", list(TokenRecord.__slots__))
def test_one_changed_field_makes_them_unequal(field: str) -> None:
    records = some_records(5)
    other = {"origin": "bonus" if records[3].origin != "bonus" else "plain", "drafter": "else"}
    changed = replace(records[3], **{field: other.get(field, 7)})
    assert Tokens(records) != Tokens([*records[:3], changed, records[4]])
    assert Tokens(records) != [*records[:3], changed, records[4]]
    assert Tokens(records) != records[:4]


def test_a_log_grows_and_what_was_cut_from_it_stays() -> None:
    records = some_records(30)
    log, cut = TokenLog(), []
    for at, r in enumerate(records):
        logs = (r.raw_logprob, r.scaled_logprob, r.target_logprob, r.kept_logmass)
        log.add(r.token_id, logs, policy_version=r.policy_version, origin=r.origin, drafter=r.drafter)
        cut.append((at, log[-2:], log[:]))
    assert log == records
    for at, last, whole in cut:
        assert list(last) == records[max(0, at - 1) : at + 1]
        assert list(whole) == records[: at + 1]
    kept = log[:]
    log.clear()
    assert not log
    assert kept == records
    log.extend(records[:2])
    assert log == records[:2]
    assert kept == records


def test_joining_copies_only_what_lies_apart() -> None:
    records = some_records(12)
    log = TokenLog(records)
    parts = [log[:3], log[3:4], log[4:4], log[4:12]]
    joined = Tokens()
    for part in parts:
        joined += part
    assert joined == records
    assert joined._ids is log._ids
    apart = log[:3] + log[5:8]
    assert apart == [*records[:3], *records[5:8]]
    assert apart._ids is not log._ids
    assert log == records, "what was joined is untouched"
    strangers = Tokens(some_records(4, seed=1)) + Tokens(some_records(4, seed=2))
    assert strangers == [*some_records(4, seed=1), *some_records(4, seed=2)]


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_they_travel_bit_for_bit(protocol: int) -> None:
    log = TokenLog(some_records(9))
    for tokens in (log, log[2:7], Tokens()):
        back = pickle.loads(pickle.dumps(tokens, protocol))
        assert back == tokens
        assert type(back) is type(tokens)
    part = pickle.loads(pickle.dumps(log[2:7], protocol))
    assert len(pickle.dumps(part, protocol)) < len(pickle.dumps(log, protocol)), "a part travels as a part"
    grown = pickle.loads(pickle.dumps(log, protocol))
    grown.extend(some_records(2, seed=3))
    assert grown[:9] == log
    assert len(grown) == 11

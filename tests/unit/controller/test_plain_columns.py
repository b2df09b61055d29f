"""Rows kept by column read, travel and are logged as the same rows one by one."""

import json
import pickle
from array import array
from dataclasses import replace

import pytest

from controller.log import facts_from_dict, facts_to_dict, load_from_dict, load_to_dict
from controller.types import (
    AR,
    PlainLoads,
    PlainOutcomes,
    RoundFacts,
    RoundLoad,
    RoundPlan,
    SequenceLoad,
    SequenceOutcome,
)
from rollout.tracking.recorder import round_record
from rollout.tracking.reduce import RolloutPool

KEYS, CONTEXTS = array("q", [7, 3, 12]), array("q", [40, 17, 90])
LOADS = PlainLoads(KEYS, CONTEXTS, array("q", [4, 1, 60]), array("q", [9, 30, 1]))
OUTCOMES = PlainOutcomes(KEYS, CONTEXTS, array("b", [1, 0, 1]), array("b", [0, 1, 1]))
LOAD_ROWS = (
    SequenceLoad(7, 40, 4, 9),
    SequenceLoad(3, 17, 1, 30),
    SequenceLoad(12, 90, 60, 1),
)
OUTCOME_ROWS = (
    SequenceOutcome(7, AR, 0, 0, 1, 40, False, False),
    SequenceOutcome(3, AR, 0, 0, 0, 17, True, True),
    SequenceOutcome(12, AR, 0, 0, 1, 90, False, True),
)
LOAD = RoundLoad(round_index=5, policy_version=2, sequences=LOADS, waiting=1)
FACTS = RoundFacts(
    round_index=5,
    policy_version=2,
    batch=3,
    prefill_rows=0,
    verify_rows=3,
    context_tokens=147,
    draft_s=0.0,
    verify_s=0.01,
    commit_s=0.001,
    total_s=0.011,
    outcomes=OUTCOMES,
)


@pytest.mark.parametrize(("columns", "rows"), [(LOADS, LOAD_ROWS), (OUTCOMES, OUTCOME_ROWS)])
def test_columns_are_a_sequence_of_their_rows(
    columns: PlainLoads | PlainOutcomes, rows: tuple[tuple[object, ...], ...]
) -> None:
    assert tuple(columns) == rows
    assert columns == rows
    assert columns != rows[:2]
    assert (columns[0], columns[-1], columns[1:]) == (rows[0], rows[-1], rows[1:])
    assert type(columns[0]) is type(rows[0])
    assert len(columns) == len(rows)
    assert repr(columns) == repr(rows)
    assert pickle.loads(pickle.dumps(columns)) == rows
    assert columns.columns() == {name: [getattr(r, name) for r in rows] for name in rows[0]._fields}  # type: ignore[attr-defined]


def test_a_round_says_the_same_of_columns_and_of_rows() -> None:
    load, facts = replace(LOAD, sequences=LOAD_ROWS), replace(FACTS, outcomes=OUTCOME_ROWS)
    assert load == LOAD
    assert facts == FACTS
    assert LOAD.keys == load.keys == (3, 7, 12)
    assert LOAD.context_tokens == load.context_tokens == 147
    assert FACTS.decoded == facts.decoded == 2
    assert list(FACTS.telling) == list(facts.telling) == list(OUTCOME_ROWS[1:])
    assert not FACTS.speculated
    assert list(replace(FACTS, outcomes=OUTCOMES[:1]).telling) == []


def test_logs_and_journals_are_the_same() -> None:
    load, facts = replace(LOAD, sequences=LOAD_ROWS), replace(FACTS, outcomes=OUTCOME_ROWS)
    plan = RoundPlan(assignments={}, reason="always plain")
    assert load_from_dict(json.loads(json.dumps(load_to_dict(LOAD)))) == load
    assert facts_from_dict(json.loads(json.dumps(facts_to_dict(FACTS)))) == facts
    by_column, by_row = (
        round_record(host="h", at_s=1.0, load=a, plan=plan, facts=b)
        for a, b in ((LOAD, FACTS), (load, facts))
    )
    assert json.dumps(by_column) == json.dumps(by_row)
    pools = RolloutPool(), RolloutPool()
    pools[0].add_round(FACTS)
    pools[1].add_round(facts)
    assert pools[0] == pools[1]

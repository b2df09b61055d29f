"""What the controller is told of forwards: of the policy, of its first loops, of drafters that are off."""

import pytest

from controller.types import POLICY
from drafters.config import DrafterConfig
from drafters.registry import build, shallow_loops
from rollout.testing import tiny_looped_policy, tiny_policy
from rollout.testing_looped import CountingDecoder
from rollout.testing_native import tiny_decoder, tiny_engine

LOOPS = 4
NAMES = shallow_loops(LOOPS)


def test_a_shallow_draft_costs_its_loops_and_the_head_and_leaves_its_loops_done() -> None:
    policy = tiny_looped_policy(loops=LOOPS)
    shapes = tiny_engine(policy, [build(name, DrafterConfig()) for name in NAMES]).part_shapes()
    body, head, whole = policy.spec.body_linear_params, policy.spec.head_params, shapes[POLICY]
    assert whole.reuse_frac == 0.0
    for depth, name in enumerate(NAMES, start=1):
        shape = shapes[name]
        assert shape.weight_bytes == shape.flops_per_row == 2 * (depth * body + head)
        assert shape.kv_bytes_per_token * LOOPS == whole.kv_bytes_per_token * depth
        assert shape.flops_per_context_token * LOOPS == whole.flops_per_context_token * depth
        assert shape.reuse_frac * whole.weight_bytes == pytest.approx(2 * depth * body)
        assert shape.rows_per_draft_token == 1


def test_a_drafter_that_was_refused_runs_no_model() -> None:
    shapes = tiny_engine(tiny_policy(), [build(name, DrafterConfig()) for name in NAMES]).part_shapes()
    assert {shapes[n].rows_per_draft_token for n in NAMES} == {0}
    assert {shapes[n].reuse_frac for n in NAMES} == {0.0}


def test_a_shallow_part_is_timed_on_its_own_loops_alone() -> None:
    policy = tiny_looped_policy(loops=LOOPS, layers=1)
    counting = CountingDecoder(tiny_decoder(policy))
    engine = tiny_engine(policy, [build(name, DrafterConfig()) for name in NAMES], decoder=counting)
    for loops, part in ((1, NAMES[0]), (2, NAMES[1]), (3, NAMES[2]), (LOOPS, POLICY)):
        counting.take()
        assert engine.time_forward(part, rows=2, context_tokens=4, sequences=1) > 0.0
        assert {loop for _, _, loop in counting.take()} == set(range(loops))

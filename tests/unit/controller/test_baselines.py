import pytest

from controller.config import ControllerConfig
from controller.decide import Controller, build_controller
from controller.testing import HISTORY, SMALL_POLICY, SMALL_W4, SimulatedMachine, load_of, traits_of
from controller.types import POLICY

SHAPES = {POLICY: SMALL_POLICY, "w4": SMALL_W4, "history": HISTORY}


def built(*, max_gamma: int = 11, calibrated: bool = False, **settings: object) -> Controller:
    config = ControllerConfig(**settings)  # type: ignore[arg-type]
    calibration = SimulatedMachine(shapes=SHAPES).calibration() if calibrated else None
    return build_controller(config, traits_of(SHAPES, max_gamma=max_gamma), SHAPES, calibration)


def gammas(controller: Controller, batch: int, **load: int) -> set[int]:
    one = load_of(batch, **load)
    plan = controller.decide(one, now_s=0.0)
    return {plan.of(s.key).gamma for s in one.sequences}


def test_ar_never_drafts() -> None:
    controller = built(kind="ar")
    assert all(gammas(controller, b, round_index=b) == {0} for b in range(1, 33))


def test_fixed_always_drafts_its_gamma() -> None:
    controller = built(kind="fixed", gamma=3)
    assert all(gammas(controller, b, round_index=b) == {3} for b in range(1, 33))


def test_fixed_drafts_no_more_than_a_sequence_can_use() -> None:
    controller = built(kind="fixed", gamma=5)
    assert gammas(controller, 1, remaining_tokens=3) == {2}
    assert gammas(controller, 1, remaining_tokens=1) == {0}


def test_fixed_history_drafts_what_is_ready() -> None:
    controller = built(kind="fixed", drafter="history", gamma=4)
    plan = controller.decide(load_of(1, ready={"history": 2}), now_s=0.0)
    assert plan.of(0).gamma == 2
    assert controller.decide(load_of(1, round_index=1), now_s=0.0).assignments == {}


def test_the_threshold_goes_on_once_and_stays_on_until_a_new_rollout() -> None:
    controller = built(kind="threshold", gamma=4, threshold_batch=8)
    batches = [16, 9, 8, 12, 3]
    seen = [gammas(controller, b, round_index=i) for i, b in enumerate(batches)]
    assert seen == [{0}, {0}, {4}, {4}, {4}]
    assert gammas(controller, 16, round_index=9, first_key=1000) == {0}


def test_a_rollout_that_is_still_filling_is_no_tail() -> None:
    controller = built(kind="threshold", gamma=4, threshold_batch=8)
    assert gammas(controller, 2, waiting=30) == {0}
    assert gammas(controller, 20, round_index=1) == {0}
    assert gammas(controller, 8, round_index=2) == {4}


def rollout(controller: Controller, acceptance: float, *, number: int) -> int:
    """Run one rollout of the ladder and return its gamma."""
    machine = SimulatedMachine(
        shapes=SHAPES, hazard=lambda drafter, key, position, round_index: acceptance, seed=number
    )
    used = set()
    for r in range(60):
        load = load_of(4, round_index=1000 * number + r, first_key=1000 * number)
        plan = controller.decide(load, now_s=0.0)
        used |= {plan.of(s.key).gamma for s in load.sequences}
        controller.observe(machine.run(load, plan))
    assert len(used) == 1, "gamma moved inside a rollout"
    return used.pop()


def test_the_ladder_moves_between_rollouts_after_two_equal_votes() -> None:
    controller = built(kind="ladder")
    high = [rollout(controller, 0.999, number=n) for n in range(8)]
    assert high == [5, 5, 7, 7, 9, 9, 11, 11]
    assert [rollout(controller, 0.999, number=n) for n in (8, 9)] == [11, 11]
    assert [rollout(controller, 0.4, number=n) for n in (10, 11, 12, 13, 14)] == [11, 11, 9, 9, 7]


def test_the_ladder_rests_between_its_bounds_and_after_a_broken_row() -> None:
    # 0.97 per token is 0.90 of five draft tokens: between the bounds.
    controller = built(kind="ladder")
    assert [rollout(controller, 0.97, number=n) for n in range(4)] == [5, 5, 5, 5]
    mixed = built(kind="ladder")
    assert [rollout(mixed, a, number=n) for n, a in enumerate((0.999, 0.97, 0.999, 0.97))] == [5, 5, 5, 5]


def test_what_the_engine_cannot_do_is_refused_by_full_path() -> None:
    with pytest.raises(ValueError, match=r"controller\.drafter 'eagle'"):
        built(kind="fixed", drafter="eagle")
    with pytest.raises(ValueError, match=r"controller\.gamma asks for 9"):
        built(kind="fixed", gamma=9, max_gamma=8)
    with pytest.raises(ValueError, match=r"controller\.ladder_gammas asks for 11"):
        built(kind="ladder", max_gamma=8)
    built(kind="ar", drafter="eagle", gamma=99)


def test_baselines_predict_when_calibrated() -> None:
    plan = built(kind="fixed", gamma=2, calibrated=True).decide(load_of(2), now_s=0.0)
    assert plan.predicted_s > 0
    assert built(kind="fixed", gamma=2).decide(load_of(2), now_s=0.0).predicted_s == 0


@pytest.mark.parametrize(
    ("kind", "drafter", "wants"),
    [
        ("ar", "history", False),
        ("fixed", "w4", False),
        ("fixed", "history", True),
        ("ladder", "history", True),
    ],
)
def test_a_baseline_asks_what_is_ready_only_for_a_drafter_that_copies(
    kind: str, drafter: str, wants: bool
) -> None:
    controller = built(kind=kind, drafter=drafter, gamma=2, ladder_gammas=(2, 4))
    assert controller.wants_look_up(load_of(2)) is wants

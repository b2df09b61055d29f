"""The menu of drafter kernels: who is chosen by given timings, who is left out and why, what is kept.

Shapes: R rows, N out features, K in features.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drafters.int4 import kept_menus
from drafters.int4.dynamic_int8 import DynamicInt8Linear
from drafters.int4.kept_menus import forget_all, kept_or_taken
from drafters.int4.linears import KERNELS, Kernel, build_linear
from drafters.int4.menu import ROWS, KernelMenu, LinearShape, menu_of, shapes_of, take_menu
from drafters.int4.menu_linear import MenuLinear
from drafters.int4.rounding import round_to_int8_rows
from drafters.types import DraftError

CPU = torch.device("cpu")
SMALL = (
    LinearShape(out_features=48, in_features=64, bits=4, count=2),
    LinearShape(out_features=64, in_features=64, bits=8, count=1),
)


@dataclass(kw_only=True)
class Weight:
    rows_NK: Tensor
    name: str = "layers.0.qkv"
    panels: None = None

    @property
    def out_features(self) -> int:
        return self.rows_NK.shape[0]

    @property
    def in_features(self) -> int:
        return self.rows_NK.shape[1]

    def rows(self) -> Tensor:
        return self.rows_NK


def weight(n: int, k: int, *, seed: int = 0, name: str = "layers.0.qkv") -> Weight:
    rows = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.05
    return Weight(rows_NK=rows.bfloat16(), name=name)


def by_rows(**seconds: tuple[float | None, ...]) -> dict[Kernel, tuple[float | None, ...]]:
    return dict(seconds)  # type: ignore[arg-type]


FLAT = by_rows(torch=(10.0,) * len(ROWS))


def test_the_fastest_of_its_row_count_is_chosen_and_rows_between_take_the_next_larger_count() -> None:
    menu = menu_of({**FLAT, **by_rows(aten=(1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0))}, {})
    assert [menu.kernel_for(rows) for rows in (1, 3, 8, 9, 16, 64, 200)] == [
        "aten",
        "aten",
        "aten",
        "torch",
        "torch",
        "torch",
        "torch",
    ]
    assert menu.words() == "aten to 8 rows, torch from there on"
    assert menu_of(FLAT, {}).words() == "torch"


def test_a_kernel_that_is_hardly_faster_changes_nothing_and_one_that_was_dropped_is_not_kept() -> None:
    hardly = (9.5, 9.5, 10.4, 10.4, 10.4, 11.5, 11.5)
    assert menu_of({**FLAT, **by_rows(aten=hardly)}, {}).words() == "aten to 16 rows, torch from there on"
    dropped = (1.0, 1.0, None, None, None, None, None)
    assert menu_of({**FLAT, **by_rows(aten=dropped)}, {}).words() == "aten to 2 rows, torch from there on"
    with pytest.raises(ValueError, match="no kernel was timed with 4 rows"):
        menu_of(by_rows(aten=dropped), {})


class Ticks:
    """A clock on which every product takes one second, or what its kernel is said to take."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.5
        return self.now


def test_a_pass_is_the_sum_over_all_linears_whatever_part_of_them_is_timed() -> None:
    shapes = (*SMALL, LinearShape(out_features=8192, in_features=32, bits=8, count=3))
    menu = take_menu(shapes, group=32, dtype=torch.bfloat16, device=CPU, kernels=("torch",), clock=Ticks())
    assert menu.seconds == {"torch": (0.5 * (2 + 1 + 3 * 4),) * len(ROWS)}


def test_every_kernel_is_timed_or_says_why_not_and_threads_stay_as_they_were() -> None:
    before = torch.get_num_threads()
    menu = take_menu(SMALL, group=32, dtype=torch.bfloat16, device=CPU)
    assert set(menu.seconds) | set(menu.why_not) == set(KERNELS)
    assert set(menu.why_not) <= {"nf4", "compiled"}
    assert "unpacks the whole weight" in menu.why_not["nf4"]
    assert torch.get_num_threads() == before
    odd = (LinearShape(out_features=40, in_features=24, bits=4, count=1),)
    refused = take_menu(odd, group=32, dtype=torch.bfloat16, device=CPU, kernels=("aten", "nf4", "torch"))
    assert refused.words() == "torch"
    assert "a linear of 40 x 24 does not fit torch's int4 kernel" in refused.why_not["aten"]
    with pytest.raises(DraftError, match=r"no kernel can run here.*does not fit torch's int4 kernel"):
        take_menu(odd, group=32, dtype=torch.bfloat16, device=CPU, kernels=("aten",))


def test_shapes_are_counted_once_per_loop_the_head_once() -> None:
    weights = [weight(48, 64), weight(48, 64, name="layers.1.qkv"), weight(64, 64, name="head")]
    found = shapes_of(weights, head="head", loops=3)
    assert [(s.out_features, s.bits, s.count) for s in found] == [(48, 4, 6), (64, 8, 1)]


def test_what_is_no_menu_is_refused_and_a_menu_comes_back_whole() -> None:
    menu = menu_of({**FLAT, **by_rows(aten=(1.0, *(None,) * 6))}, {"nf4": "not installed"})
    assert KernelMenu.from_json(menu.to_json()) == menu
    text = menu.to_json()
    no_times = [text.replace("10.0", time) for time in ('"a"', "[]", "-1.0", "NaN", "Infinity")]
    for damaged in ("", "[]", "{}", text.replace("torch", "tarch"), text[:-30], *no_times):
        with pytest.raises(ValueError, match="menu of"):
            KernelMenu.from_json(damaged)


def test_a_menu_is_taken_once_per_machine_and_again_when_damaged_forgotten_or_of_other_shapes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TAILDRAFT_CACHE", str(tmp_path))
    taken: list[object] = []

    def take(shapes: object, **_: object) -> KernelMenu:
        taken.append(shapes)
        return menu_of(FLAT, {})

    monkeypatch.setattr(kept_menus, "take_menu", take)

    def ask(*shapes: LinearShape) -> None:
        assert kept_or_taken(shapes, group=32, dtype=torch.bfloat16, device=CPU).words() == "torch"

    ask(*SMALL)
    ask(*SMALL)
    assert len(taken) == 1
    (file,) = (tmp_path / "calibration").iterdir()
    file.write_text(file.read_text().replace("10.0", '"half a fi"'))
    ask(*SMALL)
    ask(SMALL[0])
    assert len(taken) == 3
    assert len(list((tmp_path / "calibration").iterdir())) == 2
    forget_all()
    ask(*SMALL)
    assert len(taken) == 4
    stranger = replace(kept_menus.processor(), family=0)
    monkeypatch.setattr(kept_menus, "processor", lambda: stranger)
    ask(*SMALL)
    assert len(taken) == 5, "a processor of the same name and features has other speeds"


def test_a_menu_that_can_be_neither_kept_nor_dropped_is_used_and_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TAILDRAFT_CACHE", str(tmp_path))
    monkeypatch.setattr(kept_menus, "take_menu", lambda *_, **__: menu_of(FLAT, {}))
    kept_or_taken(SMALL, group=32, dtype=torch.bfloat16, device=CPU)
    (file,) = (tmp_path / "calibration").iterdir()
    file.unlink()
    file.mkdir()  # nobody may write in its place, whoever runs this
    assert kept_or_taken(SMALL, group=32, dtype=torch.bfloat16, device=CPU).words() == "torch"
    forget_all()
    assert "are not kept" in caplog.text
    assert "cannot be dropped" in caplog.text
    assert list((tmp_path / "calibration").iterdir()) == [file], "and nothing is left beside it"


MENU = menu_of({**FLAT, **by_rows(int8=(20.0, 20.0, 20.0, 1.0, 1.0, 1.0, 1.0))}, {})


def test_a_linear_packs_what_its_rows_ask_for_and_follows_the_policy_in_all_of_it() -> None:
    linear = MenuLinear(weight(48, 64), bits=4, group=32, menu=MENU)
    linear.apply(torch.zeros(4, 64))
    assert set(linear.layouts) == {"torch"}
    assert linear.held_bytes == linear.weight_bytes
    linear.apply(torch.zeros(8, 64))
    assert set(linear.layouts) == {"torch", "int8"}
    assert linear.held_bytes == linear.weight_bytes + linear.layouts["int8"].weight_bytes
    new = weight(48, 64, seed=3)
    linear.rebuild(new)
    for rows, kernel in ((1, "torch"), (64, "int8")):
        x_RK = torch.randn(rows, 64)
        fresh = build_linear(kernel, new, bits=4, group=32)  # type: ignore[arg-type]
        assert torch.equal(linear.apply(x_RK), fresh.apply(x_RK))


def test_a_layout_refused_when_its_rows_come_is_a_draft_error_and_the_first_stays() -> None:
    source = weight(48, 64)
    linear = MenuLinear(source, bits=4, group=32, menu=MENU)
    source.rows_NK[3, 3] = float("nan")
    with pytest.raises(DraftError, match=r"layers\.0\.qkv has a weight that is not finite"):
        linear.apply(torch.zeros(8, 64))
    assert set(linear.layouts) == {"torch"}


TOLERANCE: Mapping[Kernel, float] = {"compiled": 0.012, "aten": 0.006, "nf4": 0.006, "int8": 0.015}
"""Largest error beside the largest output: activations of 8 bits, or of bfloat16."""


@pytest.mark.parametrize("kernel", sorted(TOLERANCE))
def test_every_kernel_multiplies_its_own_codes_out_for_1_to_64_rows(kernel: Kernel) -> None:
    source = weight(96, 128)
    try:
        linear = build_linear(kernel, source, bits=4, group=32)
    except DraftError as error:
        pytest.skip(str(error))
    # What it multiplies by, read back through itself: rows of the identity are exact in 8 bits.
    own_KN = linear.apply(torch.eye(128)).float()
    assert (own_KN.T - source.rows_NK.float()).abs().max() < 0.03
    for rows in (1, 2, 5, 16, 17, 33, 64):
        x_RK = torch.randn(rows, 128, generator=torch.Generator().manual_seed(rows)).bfloat16()
        expected_RN = x_RK.float() @ own_KN
        error = (linear.apply(x_RK).float() - expected_RN).abs().max() / expected_RN.abs().max()
        assert error <= TOLERANCE[kernel]


def test_int8_rounds_weights_as_its_oracle_does_and_moves_no_output_beyond_its_activations_error() -> None:
    source, x_RK = weight(40, 72), torch.randn(9, 72)
    linear = build_linear("int8", source, bits=4, group=32)
    assert isinstance(linear, DynamicInt8Linear)
    oracle = round_to_int8_rows(source.rows_NK)
    assert torch.equal(linear.codes_NK, oracle.codes_NK)
    oracle_NK = oracle.dequantize()
    bound_RN = x_RK.abs().amax(-1, keepdim=True) / 127 * 0.501 * oracle_NK.abs().sum(-1)
    assert bool(((linear.apply(x_RK) - x_RK @ oracle_NK.T).abs() <= bound_RN).all())
    assert linear.apply(x_RK[:0]).shape == (0, 40)


def test_int8_keeps_a_row_that_is_not_finite_or_nothing_to_itself() -> None:
    linear = build_linear("int8", weight(40, 72), bits=4, group=32)
    x_RK = torch.randn(4, 72)
    clean_RN = linear.apply(x_RK)
    for bad in (float("nan"), float("inf"), float("-inf")):
        poisoned_RK = x_RK.clone()
        poisoned_RK[1, 5] = bad
        poisoned_RK[2] = 0
        out_RN = linear.apply(poisoned_RK)
        assert bool(torch.isnan(out_RN[1]).all())
        assert not out_RN[2].any()
        assert torch.equal(out_RN[[0, 3]], clean_RN[[0, 3]])

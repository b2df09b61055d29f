"""Which kernel the linears of ``w4`` run on, by row count: timed on this machine, the fastest wins.

Kernels differ in the bits of drafts, never in texts: verification decides those. The compiled decoder has one
kernel and no menu: of the other layouts tried none paid for its memory at any row count (``CHANGELOG.md``).

Shapes: R rows, N out features, K in features.
"""

import json
import math
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.int4.linears import KERNELS, Bits, Kernel, RebuildableLinear, build_linear
from drafters.types import DraftError, LinearWeight

ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Row counts that are timed. Others take the choice of the next larger one, or of the last."""

GAIN = 1.1
"""How much faster a kernel must be than that of the row count before: another layout takes memory and time to
pack, and timings are no finer than this."""

HOPELESS = 8.0
"""A kernel this much slower than the fastest is not timed at larger row counts either."""

PASSES = 4
"""Timed passes over the kernels, after one that warms up; the fastest counts."""

MOST_COLUMNS = 2048
"""Out features a CPU is timed on; wider linears are taken in proportion."""

FLUSH_BYTES = 64 << 20
"""Most that is written before each timing, as a pass reads all other weights between two uses of one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearShape:
    """Linears of one shape in a policy."""

    out_features: int
    in_features: int
    bits: Bits
    count: int
    """How many of them a pass runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelMenu:
    """The kernels that can run here, what they take, and the choice among them."""

    seconds: Mapping[Kernel, tuple[float | None, ...]]
    """By kernel and ``ROWS``: all linears of one pass; None where it was too slow to be timed."""

    why_not: Mapping[str, str]
    """Kernels that cannot run here, with the reason."""

    choices: tuple[Kernel, ...]
    """By ``ROWS``."""

    def kernel_for(self, rows: int) -> Kernel:
        """Return the kernel for so many rows."""
        return self.choices[min(bisect_left(ROWS, rows), len(ROWS) - 1)]

    def words(self) -> str:
        """Return the choice for people, as in ``aten to 2 rows, torch from there on``."""
        ends = [
            (kernel, rows)
            for kernel, after, rows in zip(self.choices, (*self.choices[1:], None), ROWS, strict=True)
            if kernel != after
        ]
        *parts, (last, _) = ends
        said = [f"{kernel} to {rows} rows" for kernel, rows in parts]
        return ", ".join([*said, f"{last} from there on" if said else last])

    def to_json(self) -> str:
        """Return it as JSON text."""
        return json.dumps({"rows": ROWS, "seconds": dict(self.seconds), "why_not": dict(self.why_not)})

    @classmethod
    def from_json(cls, text: str) -> "KernelMenu":
        """Return what ``to_json`` wrote. Raises ``ValueError`` for anything else."""
        try:
            read = json.loads(text)
            same_rows = tuple(read["rows"]) == ROWS
            seconds = {kernel: tuple(values) for kernel, values in read["seconds"].items()}
            why_not = dict(read["why_not"])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"no menu of kernels: {type(error).__name__}: {error}") from error
        whole = all(len(values) == len(ROWS) for values in seconds.values())
        if not (same_rows and whole and set(seconds) <= set(KERNELS)):
            raise ValueError("a menu of other kernels or row counts")
        if not all(value is None or _is_time(value) for values in seconds.values() for value in values):
            raise ValueError("a menu of times that are none")
        return menu_of(seconds, why_not)


def _is_time(value: object) -> bool:
    """Whether a value read from a file is a number of seconds that a kernel can have taken."""
    return isinstance(value, float | int) and 0 <= value < math.inf


def menu_of(seconds: Mapping[Kernel, tuple[float | None, ...]], why_not: Mapping[str, str]) -> KernelMenu:
    """Return the menu of these timings. Raises ``ValueError`` where a row count has none."""
    choices: list[Kernel] = []
    for index, rows in enumerate(ROWS):
        known = {kernel: values[index] for kernel, values in seconds.items()}
        timed: dict[Kernel, float] = {kernel: s for kernel, s in known.items() if s is not None}
        if not timed:
            raise ValueError(f"no kernel was timed with {rows} rows")
        fastest = min(timed, key=lambda kernel: timed[kernel])
        before = choices[-1] if choices else None
        stays = before in timed and timed[before] < GAIN * timed[fastest]
        choices.append(before if before is not None and stays else fastest)
    return KernelMenu(seconds=seconds, why_not=why_not, choices=tuple(choices))


def shapes_of(weights: Iterable[LinearWeight], *, head: str, loops: int) -> tuple[LinearShape, ...]:
    """Return the shapes of linears of a policy whose body runs ``loops`` times; the one named ``head`` runs
    once and is kept in 8 bits."""
    counts: Counter[tuple[int, int, Bits]] = Counter()
    for weight in weights:
        bits: Bits = 8 if weight.name == head else 4
        counts[weight.out_features, weight.in_features, bits] += 1 if weight.name == head else loops
    return tuple(
        LinearShape(out_features=n, in_features=k, bits=bits, count=count)
        for (n, k, bits), count in counts.items()
    )


@dataclass(kw_only=True, slots=True)
class _Sample:
    """A made-up weight: what a product takes does not depend on its values."""

    name: str
    out_features: int
    in_features: int
    rows_NK: Tensor
    panels: None = None

    def rows(self) -> Tensor:
        return self.rows_NK


def take_menu(
    shapes: Sequence[LinearShape],
    *,
    group: int,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Sequence[Kernel] = tuple(KERNELS),
    clock: Callable[[], float] = time.perf_counter,
) -> KernelMenu:
    """Time ``kernels`` on linears of these shapes. Takes one or two seconds. Raises ``DraftError`` where none
    can run.

    A CPU is timed with one thread: several wait for each other whenever another process takes a core, a time
    slice at each product, and order kernels at random then (bfloat16 linears of SmolLM2 took 13 ms with one
    thread and 1700 with two, beside other work on two cores).
    """
    threads = torch.get_num_threads()
    try:
        if device.type == "cpu":
            torch.set_num_threads(1)
        return _taken(shapes, group=group, dtype=dtype, device=device, kernels=kernels, clock=clock)
    finally:
        torch.set_num_threads(threads)


def _taken(
    shapes: Sequence[LinearShape],
    *,
    group: int,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Sequence[Kernel],
    clock: Callable[[], float],
) -> KernelMenu:
    built: dict[Kernel, list[RebuildableLinear]] = {}
    why_not: dict[str, str] = {}
    for kernel in kernels:
        reason = _left_out(kernel, device)
        try:
            if not reason:
                built[kernel] = _samples(kernel, shapes, group=group, dtype=dtype, device=device)
        except (DraftError, RuntimeError, NotImplementedError) as error:
            reason = str(error)
        if reason:
            why_not[kernel] = reason
    if not built:
        raise DraftError(f"build refused: no kernel can run here: {why_not}")
    return menu_of(_timed(built, shapes, dtype=dtype, device=device, clock=clock), why_not)


def _left_out(kernel: Kernel, device: torch.device) -> str:
    """Return why a kernel is not even tried, if so."""
    if kernel == "nf4" and device.type == "cpu":
        return "bitsandbytes unpacks the whole weight for every product on a CPU"
    return ""


def _samples(
    kernel: Kernel, shapes: Sequence[LinearShape], *, group: int, dtype: torch.dtype, device: torch.device
) -> list[RebuildableLinear]:
    generator = torch.Generator(device=device).manual_seed(0)
    linears = []
    for shape in shapes:
        columns = shape.out_features if device.type != "cpu" else min(shape.out_features, MOST_COLUMNS)
        rows_NK = torch.randn(columns, shape.in_features, generator=generator, dtype=dtype, device=device)
        sample = _Sample(
            name=f"a linear of {shape.out_features} x {shape.in_features}",
            out_features=columns,
            in_features=shape.in_features,
            rows_NK=rows_NK,
        )
        linear = build_linear(kernel, sample, bits=shape.bits, group=group)
        # A device may lack an operator although it packs for it.
        linear.apply(torch.zeros(1, shape.in_features, dtype=dtype, device=device))
        linears.append(linear)
    return linears


def _timed(
    built: Mapping[Kernel, Sequence[RebuildableLinear]],
    shapes: Sequence[LinearShape],
    *,
    dtype: torch.dtype,
    device: torch.device,
    clock: Callable[[], float],
) -> dict[Kernel, tuple[float | None, ...]]:
    pass_bytes = sum(2 * shape.count * shape.out_features * shape.in_features for shape in shapes)
    flush = torch.empty(min(FLUSH_BYTES, pass_bytes), dtype=torch.uint8, device=device)
    seconds: dict[Kernel, list[float | None]] = {kernel: [] for kernel in built}
    running = list(built)
    for rows in ROWS:
        inputs = [torch.randn(rows, shape.in_features, device=device).to(dtype) for shape in shapes]

        def run(kernel: Kernel, inputs: Sequence[Tensor] = inputs) -> float:
            flush.zero_()
            total = 0.0
            for linear, shape, x_RK in zip(built[kernel], shapes, inputs, strict=True):
                _wait(device)
                started = clock()
                linear.apply(x_RK)
                _wait(device)
                total += (clock() - started) * shape.count * shape.out_features / linear.out_features
            return total

        warm = {kernel: run(kernel) for kernel in running}
        running = [kernel for kernel in running if warm[kernel] <= HOPELESS * min(warm.values())]
        passes = [{kernel: run(kernel) for kernel in running} for _ in range(PASSES)]
        for kernel, times in seconds.items():
            times.append(min(each[kernel] for each in passes) if kernel in running else None)
    return {kernel: tuple(times) for kernel, times in seconds.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""Check the torch path on a CUDA device, and what its forwards cost there, within five minutes.

    python scripts/gpu_check.py --out gpu_check.json

Correctness is compared with the CPU on tiny policies; costs are those of a random Llama of 1.2 billion
parameters, so nothing is said of speed-ups. Exit code: 0 when every check that ran passed, 1 when one failed
or raised, 2 when the device is not here. ``--device cpu --tiny`` runs the same code in seconds, which tests
this script and nothing else.

The JSON is written whole before and after every part. Where the process ended within one, that part is the
one ``begun``, and ``exit_code`` is null.
"""

import argparse
import faulthandler
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rollout.bench.device_costs import CostGrid, arms_of, measure, quantized, random_decoder
from rollout.bench.machine import commit, machine, versions
from rollout.errors import ConfigError
from rollout.output_files import writable, write_whole
from rollout.policy.spec import ModelSpec
from rollout.proof.device import CHECKS, DeviceFinding, failed, kernel_state, not_run
from rollout.proof.device_paths import PATH_CHECKS, recorder_on

SCHEMA = 3
ALL_CHECKS = {**CHECKS, **PATH_CHECKS}
LIMIT_S = 300.0
"""The process ends after so long, whatever hangs."""

BEGIN_UNTIL_S = 240.0
"""No part is begun and no further cost measured after so long: what remains is for the last one."""

LLAMA = ModelSpec(
    family="llama",
    vocab_size=128_256,
    hidden_size=2048,
    intermediate_size=8192,
    layers=16,
    query_heads=32,
    kv_heads=8,
    head_dim=64,
    norm_eps=1e-5,
    max_positions=131_072,
    tie_embeddings=True,
    eos_ids=(),
)
"""The shape of a 1.2 billion parameter Llama 3.2."""

TINY = ModelSpec(
    family="llama",
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    layers=2,
    query_heads=4,
    kv_heads=2,
    head_dim=16,
    norm_eps=1e-5,
    max_positions=512,
    tie_embeddings=True,
    eos_ids=(),
)
GROUP = 32
NEVER_RUN = {
    "recorded_lanes": "passes of lanes (drafter wavefront) are not recorded: rows of several loops share one",
    "recorded_prompts": "prompt chunks are not recorded: they are wide, and no two have one shape",
    "flash_attention_4": "there is no path for it: versions 2 and 3 are looked for",
}
"""What a reader may look for and the engine does not have."""


Part = Callable[[], DeviceFinding]


@dataclass(kw_only=True, slots=True)
class Record:
    """What has been found so far, and the file that holds it."""

    out: Path
    device: str
    hardware: str | None
    findings: dict[str, DeviceFinding]
    """Of every part, whether it has begun or not."""

    started_s: float = field(default_factory=time.monotonic)
    origin: Mapping[str, Any] = field(
        default_factory=lambda: {"machine": machine(), "versions": versions(), "commit": commit()}
    )

    def write(self, exit_code: int | None = None) -> None:
        """Replace the file. The exit code is None as long as parts are to come."""
        record = {
            "schema": SCHEMA,
            "device": self.device,
            "hardware": self.hardware,
            "exit_code": exit_code,
            "parts": {name: asdict(finding) for name, finding in self.findings.items()}
            | {name: asdict(not_run(why)) for name, why in NEVER_RUN.items()},
            **self.origin,
            "elapsed_s": time.monotonic() - self.started_s,
        }
        # A fact that JSON does not know is told in words: it must not cost the others.
        write_whole(self.out, json.dumps(record, indent=1, default=str) + "\n")


def examine(parts: Mapping[str, Part], record: Record, *, until_s: float) -> int:
    """Run the parts that begin before ``until_s`` of the monotonic clock and return the exit code.

    A part that raises has failed, and says how. The record is written before and after each.
    """
    for name, part in parts.items():
        if time.monotonic() < until_s:
            record.findings[name] = DeviceFinding(state="begun")
            record.write()
            try:
                record.findings[name] = part()
            except Exception as error:  # noqa: BLE001 - one broken part must not hide what the others find
                record.findings[name] = failed(error)
        else:
            record.findings[name] = not_run("out of time")
        record.write()
        say(name, record.findings[name])
    code = verdict_of(record.findings)
    record.write(code)
    return code


def costs(device: str, *, tiny: bool, until_s: float) -> DeviceFinding:
    """Measure plain, draft and verify forwards of random weights, run as they are and recorded."""
    grid = CostGrid(batches=(1, 2), contexts=(32,), gammas=(1, 3)) if tiny else CostGrid()
    spec = TINY if tiny else LLAMA
    positions = max(grid.contexts) + max(grid.gammas) + 2
    decoder = random_decoder(spec, device=device, dtype=torch.bfloat16, positions=positions)
    drafter, draft_state = None, "ran"
    try:
        drafter = quantized(decoder, group=GROUP)
    except Exception as error:  # noqa: BLE001 - plain forwards have costs without drafts
        draft_state = kernel_state(error)
    recorder = recorder_on(device)
    table = measure(arms_of(decoder, drafter, recorder), grid, until_s=until_s)
    return DeviceFinding(
        state="ran",
        passed=False if table.failed or draft_state.startswith("failed") else None,
        facts={
            "parameters": spec.body_linear_params + spec.head_params,
            "dtype": "bfloat16",
            "draft": draft_state,
            "recorder": recorder.description,
            "points": [asdict(point) for point in table.points],
            "not_run": table.not_run,
            "failed": table.failed,
        },
    )


def say(name: str, finding: DeviceFinding) -> None:
    """Print one line about a part."""
    verdict = {True: "passed", False: "FAILED", None: "reported"}[finding.passed]
    print(f"{name:<22}{verdict if finding.state == 'ran' else finding.state}", flush=True)


def verdict_of(findings: Mapping[str, DeviceFinding]) -> int:
    """Return the exit code: 1 when a check failed, 2 when none was made, else 0."""
    verdicts = [finding.passed for finding in findings.values()]
    if False in verdicts:
        return 1
    return 0 if True in verdicts else 2


def missing(device: str) -> str | None:
    """Return why a device is not here; None where it is."""
    if not device.startswith("cuda"):
        return None
    if not torch.cuda.is_available():
        return "this torch sees no CUDA device"
    count = torch.cuda.device_count()
    return None if (torch.device(device).index or 0) < count else f"of {count} CUDA devices none is {device}"


def hardware_of(device: str) -> str:
    """Return the name of a device that is here."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def main(argv: list[str] | None = None) -> int:
    """Make the checks, write the JSON, return the verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny policy for the costs as well")
    options = parser.parse_args(argv)
    try:
        out = writable(options.out, "--out")
    except ConfigError as error:
        parser.error(str(error))
    until_s = time.monotonic() + BEGIN_UNTIL_S
    device = str(options.device)
    absent = missing(device)
    parts: dict[str, Part] = {name: partial(check, device) for name, check in ALL_CHECKS.items()}
    parts["costs"] = partial(costs, device, tiny=options.tiny, until_s=until_s)
    if absent is not None:
        parts = dict.fromkeys(parts, partial(not_run, absent))
    record = Record(
        out=out,
        device=device,
        hardware=hardware_of(device) if absent is None else None,
        findings=dict.fromkeys(parts, not_run("the process ended before")),
    )
    code = examine(parts, record, until_s=until_s)
    print(f"written: {out} ({time.monotonic() - record.started_s:.0f} s)")
    return code


if __name__ == "__main__":
    # A kernel that hangs cannot be asked to stop. What was found until then is in the file.
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    sys.exit(main())

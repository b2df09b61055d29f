"""Check the torch path on a CUDA device, and what its forwards cost there, within five minutes.

    python scripts/gpu_check.py --out gpu_check.json

Correctness is compared with the CPU on tiny policies; costs are those of a random Llama of 1.2 billion
parameters, so nothing is said of speed-ups. Exit code: 0 when every check that ran passed, 1 when one failed,
2 when the device is not here. ``--device cpu --tiny`` runs the same code in seconds, which tests this script
and nothing else.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from drafters.types import DraftError
from rollout.bench.device_costs import CostGrid, arms_of, measure, quantized, random_decoder
from rollout.bench.machine import commit, machine, versions
from rollout.policy.spec import ModelSpec
from rollout.proof.device import CHECKS, DeviceFinding, not_run
from rollout.proof.device_paths import PATH_CHECKS, recorder_on

SCHEMA = 2
ALL_CHECKS = {**CHECKS, **PATH_CHECKS}
COSTS_UNTIL_S = 240.0
"""No further cost is measured after so long: what remains of five minutes is for the last one and writing."""

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


def correctness(device: str) -> dict[str, DeviceFinding]:
    """Make every check; one that raises has failed, and says how."""
    findings: dict[str, DeviceFinding] = {}
    for name, check in ALL_CHECKS.items():
        try:
            findings[name] = check(device)
        except Exception:  # noqa: BLE001 - one broken part must not hide what the others find
            findings[name] = DeviceFinding(
                state="ran", passed=False, facts={"error": traceback.format_exc(limit=-4)}
            )
        say(name, findings[name])
    return findings


def costs(device: str, *, tiny: bool, until_s: float) -> DeviceFinding:
    """Measure plain, draft and verify forwards of random weights, run as they are and recorded."""
    grid = CostGrid(batches=(1, 2), contexts=(32,), gammas=(1, 3)) if tiny else CostGrid()
    spec = TINY if tiny else LLAMA
    positions = max(grid.contexts) + max(grid.gammas) + 2
    decoder = random_decoder(spec, device=device, dtype=torch.bfloat16, positions=positions)
    drafter, draft_state = None, "ran"
    try:
        drafter = quantized(decoder, group=GROUP)
    except (DraftError, RuntimeError) as error:
        draft_state = f"not run: {error}"
    recorder = recorder_on(device)
    points, left_out = measure(arms_of(decoder, drafter, recorder), grid, until_s=until_s)
    return DeviceFinding(
        state="ran",
        facts={
            "parameters": spec.body_linear_params + spec.head_params,
            "dtype": "bfloat16",
            "draft": draft_state,
            "recorder": recorder.description,
            "points": [asdict(point) for point in points],
            "not_run": left_out,
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


def main(argv: list[str] | None = None) -> int:
    """Make the checks, write the JSON, return the verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny policy for the costs as well")
    options = parser.parse_args(argv)
    started_s = time.monotonic()
    device = str(options.device)
    hardware: str | None = None
    if device.startswith("cuda") and not torch.cuda.is_available():
        findings = dict.fromkeys((*ALL_CHECKS, "costs"), not_run("this torch sees no CUDA device"))
        for name, finding in findings.items():
            say(name, finding)
    else:
        hardware = torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"
        findings = correctness(device)
        try:
            findings["costs"] = costs(device, tiny=options.tiny, until_s=started_s + COSTS_UNTIL_S)
        except RuntimeError as error:  # out of memory among them: correctness still counts
            findings["costs"] = not_run(str(error))
        say("costs", findings["costs"])
    code = verdict_of(findings)
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "device": device,
        "hardware": hardware,
        "exit_code": code,
        "parts": {name: asdict(finding) for name, finding in findings.items()}
        | {name: asdict(not_run(why)) for name, why in NEVER_RUN.items()},
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "elapsed_s": time.monotonic() - started_s,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written: {options.out} ({record['elapsed_s']:.0f} s)")
    return code


if __name__ == "__main__":
    sys.exit(main())

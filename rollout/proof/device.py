"""Whether a device computes what the CPU does, on tiny policies. Each check says that it ran, or why not.

The reference is the torch decoder in float64 on the CPU, one row at a time. Nothing here is about speed.
"""

import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from drafters.config import DrafterConfig
from drafters.int4.linears import Bits, Kernel, build_linear
from drafters.int4.rounding import round_to_int4, round_to_int8_rows, round_to_nf4
from drafters.types import DraftError
from drafters.w4 import W4Drafter
from rollout.engine import noise
from rollout.engine.chooser_torch import TorchChooser
from rollout.engine.native.numerics import is_row_invariant
from rollout.engine.native.rows import RowBatch
from rollout.engine.native.torch_forward.decoder import TorchDecoder, TorchLinear
from rollout.engine.target import TargetRow
from rollout.testing import TinyPolicy, tiny_policy
from rollout.testing_native import MIXED_PARAMS, ar_plan, fixed_plan, requests_for, run_engine, tiny_engine

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "smollm2")
VOCAB = 48

LOGIT_TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 2e-4, torch.bfloat16: 0.25}
"""Logits are of size 2. float32 differs by summation order; bfloat16 keeps 8 bits through every layer."""

INT4_TOLERANCE = 0.02
"""Relative to the largest output: operators compute in bfloat16 or round activations to 8 bits, the oracle
computes in float32."""

INT4_GROUP = 64

NOISE_TOLERANCE = 1e-12
LOGPROB_TOLERANCE = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFinding:
    """What one check found."""

    state: str
    """``ran``; ``failed: `` and the error it raised; ``not run: `` and why; ``begun`` until it has ended."""

    passed: bool | None = None
    """None when it did not run, or only reports."""

    facts: Mapping[str, Any] = field(default_factory=dict)


def not_run(why: str) -> DeviceFinding:
    """Return the finding of a check that could not be made."""
    return DeviceFinding(state=f"not run: {why}")


def failed(error: Exception) -> DeviceFinding:
    """Return the finding of a check that raised, and where it did."""
    where = traceback.format_exception(error, limit=-4)
    return DeviceFinding(state=f"failed: {told(error)}", passed=False, facts={"traceback": "".join(where)})


def told(error: BaseException) -> str:
    """Return an error's type and message."""
    return f"{type(error).__name__}: {error}"


def kernel_state(error: Exception) -> str:
    """Return what a kernel's error comes to: ``not run: `` where its library or operator is not here.

    Else ``failed: ``: what is checked are shapes it takes, so that a refusal is a fault.
    """
    cause = error.__cause__ if isinstance(error, DraftError) else error
    absent = isinstance(cause, ImportError | OSError | NotImplementedError)
    return f"{'not run' if absent else 'failed'}: {told(error)}"


def ran(passed: bool | None, **facts: Any) -> DeviceFinding:
    """Return the finding of a check that was made."""
    return DeviceFinding(state="ran", passed=passed, facts=facts)


def largest(values: Iterable[float]) -> float:
    """Return the largest, NaN where one is NaN: Python's ``max`` may pass that over."""
    return float(torch.tensor(list(values), dtype=torch.float64).max())


def decoder_on(policy: TinyPolicy, device: str, dtype: torch.dtype, *, exact: bool = False) -> TorchDecoder:
    """Return a loaded torch decoder of a tiny policy."""
    made = TorchDecoder(
        policy.spec, cos_PH=policy.cos_PH, sin_PH=policy.sin_PH, dtype=dtype, device=device, exact=exact
    )
    made.load(policy.state)
    return made


def check_logits(device: str) -> DeviceFinding:
    """Prompts, drafts and single rows of several sequences in one batch, then a second one over its keys."""
    worst = dict.fromkeys(LOGIT_TOLERANCE, 0.0)
    for family in FAMILIES:
        policy = tiny_policy(family=family, vocab=VOCAB)
        expected = _two_forwards(decoder_on(policy, "cpu", torch.float64, exact=True))
        for dtype in LOGIT_TOLERANCE:
            found = _two_forwards(decoder_on(policy, device, dtype)).double().cpu()
            worst[dtype] = largest([worst[dtype], float((found - expected).abs().max())])
    passed = all(worst[dtype] <= most for dtype, most in LOGIT_TOLERANCE.items())
    return ran(passed, families=list(FAMILIES), worst={str(d): w for d, w in worst.items()})


def _two_forwards(decoder: TorchDecoder) -> Tensor:
    storage = decoder.new_storage(6)
    prompt = _batch([(0, p) for p in range(19)] + [(1, p) for p in range(5)] + [(2, 0)])
    drafts = _batch([(0, 19), (0, 20), (0, 21), (1, 5), (2, 1), (2, 2)])
    first = decoder.forward(prompt, storage).logits_RV.clone()
    return torch.cat([first, decoder.forward(drafts, storage).logits_RV])


def _batch(rows: list[tuple[int, int]]) -> RowBatch:
    """Return rows of (sequence, position); tables are the CPU's, as an engine's are."""
    count = len(rows)
    return RowBatch(
        token_ids_M=torch.tensor([(7 * s + 5 * p + 3) % VOCAB for s, p in rows], dtype=torch.int32),
        positions_M=torch.tensor([p for _, p in rows], dtype=torch.int32),
        table_M=torch.tensor([s for s, _ in rows], dtype=torch.int32),
        page_table_SP=torch.tensor([[4, 1], [0, 5], [2, 3]], dtype=torch.int32),
        head_rows_R=torch.arange(count, dtype=torch.int32),
    )


def check_noise(device: str) -> DeviceFinding:
    """Hashes must be equal: they decide who wins. Noise may differ as logarithms do."""
    keys = [noise.noise_key(seed, position) for seed in (0, -1, 2**63 - 1) for position in (0, 1, 70_000)]
    tokens_V = torch.arange(0, 150_000, 37)
    here = noise.hash32(keys, tokens_V)
    there = noise.hash32(keys, tokens_V.to(device)).cpu()
    apart = float((noise.gumbel_of_hash(here) - noise.gumbel_of_hash(here.to(device)).cpu()).abs().max())
    equal = torch.equal(here, there)
    return ran(equal and apart <= NOISE_TOLERANCE, hashes_equal=equal, largest_noise_difference=apart)


def check_chooser(device: str) -> DeviceFinding:
    """The same logits must give the same tokens, whatever the parameters, and the same logprobs."""
    generator = torch.Generator().manual_seed(0)
    logits_RV = torch.randn(8 * len(MIXED_PARAMS), VOCAB, generator=generator) * 2
    rows = [
        TargetRow(
            params=MIXED_PARAMS[i % len(MIXED_PARAMS)],
            seed=i,
            position=40 + i,
            prompt_tokens=frozenset({3, 4, 5}),
            output_counts={6: 1, 7: 3},
            banned=(),
        )
        for i in range(logits_RV.shape[0])
    ]
    chooser = TorchChooser()
    here, there = chooser.choose(logits_RV, rows), chooser.choose(logits_RV.to(device), rows)
    differing = sum(a.token != b.token for a, b in zip(here, there, strict=True))
    apart = largest(abs(a.scaled_logprob - b.scaled_logprob) for a, b in zip(here, there, strict=True))
    probs = (chooser.probs(logits_RV, rows) - chooser.probs(logits_RV.to(device), rows).cpu()).abs().max()
    return ran(
        differing == 0 and largest([apart, float(probs)]) <= LOGPROB_TOLERANCE,
        rows=len(rows),
        tokens_that_differ=differing,
        largest_logprob_difference=apart,
        largest_probability_difference=float(probs),
    )


def check_row_invariance(device: str) -> DeviceFinding:
    """Report where rows computed alone keep their bits, as ``numerics=exact`` needs; no fault if not."""
    found = {
        str(dtype): is_row_invariant(decoder_on(tiny_policy(vocab=VOCAB), device, dtype, exact=True))
        for dtype in LOGIT_TOLERANCE
    }
    return ran(None, row_by_row_is_invariant=found)


def check_speculation(device: str) -> DeviceFinding:
    """Speculation must not change a text where rows keep their bits; elsewhere what differs is reported."""
    policy = tiny_policy(family="smollm2", vocab=VOCAB)
    invariant = is_row_invariant(decoder_on(policy, device, torch.float32, exact=True))
    drafted, equal, samples = 0, 0, 0
    for seed in range(3):
        engine = tiny_engine(policy, [oracle_drafter()], dtype=torch.float32, device=device, exact=invariant)
        requests = requests_for(vocab=VOCAB, prompts=4, samples=2, seed=seed, params=MIXED_PARAMS)
        plain = run_engine(engine, requests, ar_plan)
        drafting = run_engine(engine, requests, fixed_plan("w4", 3))
        samples += len(plain)
        equal += sum(plain[key].token_ids == drafting[key].token_ids for key in plain)
        drafted += sum(c.provenance.drafted for c in drafting.values() if c.provenance is not None)
    facts = {"samples": samples, "equal": equal, "drafted_tokens": drafted, "row_invariant": invariant}
    return ran((equal == samples and drafted > 0) if invariant else None, **facts)


def oracle_drafter() -> W4Drafter:
    """Return a drafter on plain torch, which runs wherever torch does."""
    return W4Drafter(DrafterConfig(w4_kernel="torch", w4_group=32))


def check_int4(device: str) -> DeviceFinding:
    """Foreign kernels of quantized linears against the rounded weight multiplied out, at one row and at five.

    torch's int4 and int8 operators, its integer product, and bitsandbytes' normal floats, which has another
    kernel for one row on CUDA.
    """
    facts: dict[str, Any] = {}
    passed: list[bool] = []
    generator = torch.Generator().manual_seed(0)
    rows_NK = (torch.randn(128, 256, generator=generator) * 0.1).bfloat16()
    x_RK = torch.randn(5, 256, generator=generator).bfloat16()
    weight = TorchLinear(name="checked", out_features=128, in_features=256, weight_NK=rows_NK.to(device))
    int8_NK = round_to_int8_rows(rows_NK).dequantize()
    kinds: tuple[tuple[str, Kernel, Bits, Tensor], ...] = (
        ("int4", "aten", 4, round_to_int4(rows_NK, INT4_GROUP).dequantize()),
        ("int8", "aten", 8, int8_NK),
        ("dynamic_int8", "int8", 8, int8_NK),
        ("nf4", "nf4", 4, round_to_nf4(rows_NK, INT4_GROUP)),
    )
    for name, kernel, bits, rounded_NK in kinds:
        expected_RN = x_RK.float() @ rounded_NK.T
        try:
            linear = build_linear(kernel, weight, bits=bits, group=INT4_GROUP)
            found = [linear.apply(x.to(device)).float().cpu() for x in (x_RK[:1], x_RK)]
        except Exception as error:  # noqa: BLE001 - a broken kernel must not hide what others compute
            facts[name] = kernel_state(error)
            if facts[name].startswith("failed"):
                passed.append(False)
            continue
        apart = largest(float((y - expected_RN[: len(y)]).abs().max()) for y in found)
        facts[name] = {"largest_relative_difference": apart / float(expected_RN.abs().max())}
        passed.append(facts[name]["largest_relative_difference"] <= INT4_TOLERANCE)
    if not passed:
        return not_run("; ".join(f"{name}: {why}" for name, why in facts.items()))
    return ran(all(passed), **facts)


CHECKS: Mapping[str, Callable[[str], DeviceFinding]] = {
    "logits": check_logits,
    "noise": check_noise,
    "chooser": check_chooser,
    "row_invariance": check_row_invariance,
    "speculation": check_speculation,
    "int4": check_int4,
}
"""In the order they are made."""

"""Settings of a whole job. Imports nothing heavy; every default is the component's own."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from controller.config import ControllerConfig
from drafters.config import DrafterConfig
from rollout.config import EngineConfig, PolicyConfig, ServiceConfig, TrackerConfig
from rollout.errors import ConfigError
from rollout.ranges import check_settings


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrateConfig:
    """What ``taildraft calibrate`` does beside measuring."""

    out: str | None = None
    """Also write the calibration here, as JSON."""


ProofPart = Literal["law", "coupled", "faults", "equality"]


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyConfig:
    """How much ``taildraft verify`` compares."""

    out: str | None = None
    """Write the verdict and every check here, as JSON; None: ``verify.json`` in the run's folder."""

    cut: bool = False
    """The short version: fewer requests, batches, draft lengths and cases, shorter texts, one host."""

    parts: tuple[ProofPart, ...] = ("law", "coupled", "faults", "equality")
    """``law``: exact enumeration of ``block`` and ``token``; ``coupled``: planted drafts and the noise;
    ``faults``: known-wrong engines that must be caught; ``equality``: this policy under every arm."""

    requests: int = 64
    batches: tuple[int, ...] = (1, 4, 32)
    gammas: tuple[int, ...] = ()
    """Draft tokens. Empty: 1 to 8, or to ``drafter.max_gamma`` if that is less."""

    drafters: tuple[str, ...] = ()
    """Empty: all that ``drafter.names`` lists."""

    hosts: tuple[int, ...] = (1, 2)
    """Services to compare with, by their number of hosts; empty: none."""

    max_tokens: int = 48
    """Most new tokens of a text on average; fewer where the machine would not end within ``limit_s``."""

    limit_s: float = 540.0
    """What the whole is sized for. Nothing is cut off at it."""

    def __post_init__(self) -> None:
        check_settings("verify", self, positive=("limit_s",), requests=1, max_tokens=1)
        for name in ("parts", "batches"):
            if not getattr(self, name):
                raise ConfigError(f"verify.{name} must name something")


EvaluationPart = Literal["chains", "generation", "laws", "sweep"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConfig:
    """What ``taildraft evaluate`` tries on a policy, and for how long."""

    out: str | None = None
    """Write the result here, as JSON; None: ``evaluate.json`` in the run's folder."""

    html: str | None = None
    """Write the page here; None: ``evaluate.html`` in the run's folder."""

    cut: bool = False
    """The short version: fewer texts, draws and trials, one length."""

    parts: tuple[EvaluationPart, ...] = ("chains", "generation", "laws", "sweep")
    """``chains``: states, keys, values and logits of reused drafts against a serial forward of full depth;
    ``generation``: free texts against plain decoding; ``laws``: what is sampled on small vocabularies;
    ``sweep``: speed. The exit code is the verdict of the first three, and of the sweep's equal texts."""

    drafters: tuple[str, ...] = ()
    """Empty: ``shallow_loop_1`` to ``_3`` and ``wavefront`` for a looped policy, ``w4`` and ``history`` for
    any other."""

    gammas: tuple[int, ...] = ()
    """Draft tokens; of ``wavefront`` lanes beyond the first, as far as its pipeline has any. Empty: 1, 2, 4
    and 8, with ``drafter.max_gamma`` in place of those beyond it, and 12 and 16 where it allows."""

    concurrencies: tuple[int, ...] = (1, 8)
    """Of the sweep: sequences in the engine at once."""

    lengths: tuple[int, ...] = (32, 96)
    """Of the sweep: new tokens of every row."""

    rows: int = 8
    """Of the sweep: texts per trial, or the concurrency if that is more. Fewer where time is short."""

    trials: int = 5
    """Of the sweep: interleaved runs of every arm of a cell. Fewer where time is short, and said so."""

    chains: int = 4
    """Fixed chains, and the new tokens of each."""

    chain_tokens: int = 24
    texts: int = 24
    """Of ``generation``, per drafter and gamma."""

    max_tokens: int = 40
    """Most new tokens of such a text on average; fewer where it would take more than a third of the time."""

    draws: int = 2400
    """Of ``laws``: samples per drafter and kind of filter, over all seeds."""

    draw_seeds: int = 3
    """Of ``laws``: run seeds the draws are spread over, the job's own first."""

    temperature: float = 1.0
    """Of the sweep."""

    max_minutes: float = 4.5
    """What the whole is sized for. No trial starts that would end later; nothing is cut off at it."""

    def __post_init__(self) -> None:
        check_settings(
            "evaluate",
            self,
            positive=("max_minutes",),
            rows=1,
            trials=2,
            chains=1,
            chain_tokens=3,
            texts=1,
            max_tokens=2,
            draws=100,
            draw_seeds=1,
        )
        for name in ("parts", "gammas", "concurrencies", "lengths"):
            values = getattr(self, name)
            if len(set(values)) < len(values) or (not values and name != "gammas"):
                raise ConfigError(f"evaluate.{name} must name something, each once, got {list(values)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchConfig:
    """What ``taildraft bench`` measures."""

    workload: Literal["drain", "fixed", "steps", "peers"] = "drain"
    """``drain``: a batch runs empty; ``fixed``: equal lengths at each of ``batches``; ``steps``: what single
    rounds cost beside their bounds; ``peers``: equal lengths through other engines, beside ours."""

    out: str | None = None
    """Write the results here, as JSON; None: ``bench.json`` in the run's folder."""

    html: str | None = None
    """Where ``steps`` draws its tokens per second; None: beside the JSON, its name ending in ``.html``."""

    arms: tuple[str, ...] = ()
    """Empty: all of the workload. ``ar`` must be among them, everything is compared with it; others are
    ``hf``, the names of the drafters (always on, ``gamma`` tokens) and ``auto``; of ``peers`` they are
    ``hf``, ``vllm`` and ``vllm_ngram``."""

    laws: tuple[Literal["natural", "trace"], ...] = ("trace", "natural")
    """Of ``drain``. ``natural``: to the end-of-sequence id; ``trace``: seeded lognormal lengths."""

    grids: tuple[Literal["on", "off"], ...] = ("on", "off")
    """``on``: the policy as it is; ``off``: moved off its 4-bit grid (``policy.offgrid``). ``steps`` and
    ``peers`` take it as it is: what a round costs does not depend on it."""

    questions: Literal["auto", "policy", "general"] = "auto"
    """Of ``drain`` and ``fixed``. ``policy``: those its folder brings as ``prompts.txt``, in turn and up to
    four times each; ``general``: ours, of ``rollout/bench/prompts.py``; ``auto``: the policy's where its
    folder has them. ``steps`` and ``peers`` ask ours."""

    prompts: int = 32
    """Rows of ``drain``, all submitted at once."""

    cap_tokens: int = 1024
    """No row of ``drain`` gets more new tokens than this."""

    trace_median_tokens: float = 80.0
    trace_sigma: float = 1.1
    """Of the logarithm of the length."""

    batches: tuple[int, ...] = ()
    """Of all but ``drain``; empty: the workload's own, ``OWN_BATCHES``."""

    fixed_tokens: int = 128
    """New tokens of every row in ``fixed`` and ``peers``."""

    contexts: tuple[int, ...] = (128, 512, 1024, 2048, 4096)
    """Of ``steps``: tokens of every sequence before its rounds are timed. They are made up, not computed."""

    step_gammas: tuple[int, ...] = (1, 3, 5, 7)
    """Of ``steps``: drafts per sequence, so that each has one more row to verify."""

    max_draft_tokens: int = 4096
    """``steps`` drafts and verifies where the batch has no more context than this in all; plain rounds run
    everywhere."""

    max_verify_rows: int = 256
    """``steps`` verifies no more rows than this at once: far beyond the ridge cost is one line."""

    peers_env: str | None = None
    """The environment ``scripts/peers.sh`` made; None: ``.venv-peers`` in the checkout."""

    gamma: int = 4
    """Draft tokens of the fixed arms of ``drain``, and of those of ``fixed`` that no pilot chooses."""

    pilot_gammas: tuple[int, ...] = (2, 3, 4, 5, 6, 7)
    """``fixed`` tries these for ``w4`` at each batch in a pilot; the best is then measured."""

    min_pairs: int = 3
    max_pairs: int = 40
    """Pairs that count, per ratio. They are added until the 90% interval is narrower than half the margin."""

    margin_frac: float = 0.1
    """Margin of a ratio between arms of our own that has no goal of its own."""

    max_minutes: float = 60.0
    """No repetition starts that would end later, and what is undecided then is said to be; 0: no limit."""

    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_settings(
            "bench",
            self,
            positive=("trace_median_tokens", "trace_sigma", "margin_frac"),
            prompts=1,
            cap_tokens=1,
            fixed_tokens=1,
            gamma=1,
            max_draft_tokens=1,
            max_verify_rows=1,
        )
        for name in ("laws", "grids", "pilot_gammas", "contexts", "step_gammas", "batches"):
            values = getattr(self, name)
            if len(set(values)) < len(values) or not (values or name == "batches"):
                raise ConfigError(f"bench.{name} must name something, each once, got {list(values)}")
        if self.arms and "ar" not in self.arms:
            raise ConfigError(f"bench.arms must include 'ar', got {list(self.arms)}")
        if not 2 <= self.min_pairs <= self.max_pairs:
            raise ConfigError(
                "bench.min_pairs must be >= 2 and bench.max_pairs no smaller, "
                f"got {self.min_pairs} and {self.max_pairs}"
            )

    @property
    def batches_run(self) -> tuple[int, ...]:
        """The batches of this workload."""
        return self.batches or OWN_BATCHES[self.workload]


OWN_BATCHES: Mapping[str, tuple[int, ...]] = {
    "drain": (),
    "fixed": (1, 2, 4, 8, 16, 32),
    "steps": (1, 2, 4, 8, 16, 32, 64),
    "peers": (1, 4, 16, 32),
}
"""What each workload of ``bench`` runs at when ``batches`` names nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportConfig:
    """What ``taildraft report`` reads and writes."""

    runs: tuple[str, ...] = ()
    """Run folders; empty: the newest under ``outputs``."""

    out: str | None = None
    """The HTML file; None: ``report.html`` in the (first) run folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """Everything one command needs. Its parts are checked where they are defined."""

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    controller: ControllerConfig = field(default_factory=ControllerConfig)
    service: ServiceConfig = field(default_factory=ServiceConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    task: Mapping[str, Any] = field(default_factory=dict)
    """Checked by the trainer bridge, which defines it; likewise ``trainer``."""

    trainer: Mapping[str, Any] = field(default_factory=dict)
    calibrate: CalibrateConfig = field(default_factory=CalibrateConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    seed: int = 0
    """Of the whole job: every sample's seed follows from it."""

    output_dir: str | None = None
    """The run's folder. None: a fresh one under ``outputs``; an existing run's folder: it is resumed.
    Jobs always see the folder that was opened, as an absolute path."""

    run_id: str | None = None
    """Names the run at every tracker. None: the folder's own."""

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must be in 0 .. 2**63 - 1, got {self.seed}")

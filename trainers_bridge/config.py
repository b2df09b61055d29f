"""Settings of a training run: the trainer and its task. Imports nothing heavy."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rollout.errors import ConfigError
from rollout.ranges import check_settings
from trainers_bridge.contract import training_params

MAX_NEW_TOKENS = 96
"""Longest completion a training run asks for. The trainer pads every sample of a pass to the longest one,
so a single long completion sets the cost of the whole step's backward pass."""

Operation = Literal["multiply", "add", "subtract"]

ExerciseKind = Literal["sum", "reverse", "sort", "count", "remainder", "story"]
ExerciseSplit = Literal["train", "held_out"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskConfig:
    """What the policy is asked to learn."""

    kind: Literal["arithmetic", "exercises"] = "arithmetic"
    """``arithmetic`` for policies that know English, ``exercises`` for the small looped one."""

    operations: tuple[Operation, ...] = ("multiply",)
    smallest: int = 2
    largest: int = 9
    """Operands are drawn from ``smallest`` to ``largest``, both included."""

    prompts: int = 512
    """Questions generated; a run longer than this sees some again."""

    min_words: int = 8
    """Words a full-marks reply has, answer included: without a floor the shortest reply is the bare number,
    and nothing is explained any more."""

    exercises: tuple[ExerciseKind, ...] = ("sum", "reverse", "sort", "count", "remainder", "story")
    """Of ``kind=exercises``: what is asked, in turn. The other settings but ``prompts`` are arithmetic's."""

    split: ExerciseSplit = "train"
    """Of ``kind=exercises``: the questions the looped policy was trained on, or those kept from it."""

    def __post_init__(self) -> None:
        if not self.operations:
            raise ConfigError("task.operations must name at least one operation")
        if not self.exercises:
            raise ConfigError("task.exercises must name at least one exercise")
        check_settings("task", self, prompts=1)
        if self.smallest > self.largest:
            raise ConfigError(f"task.smallest must be <= task.largest ({self.largest}), got {self.smallest}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerConfig:
    """How the policy is trained, and what the rollouts of a step look like."""

    kind: Literal["trl"] = "trl"
    steps: int = 32
    prompts_per_step: int = 4
    num_generations: int = 4
    """Samples of each prompt; their rewards are compared with each other."""

    learning_rate: float = 3e-5
    warmup_steps: int = 0
    max_grad_norm: float = 1.0
    beta: float = 0.0
    """Weight of the KL term against the starting policy; above 0 a second copy of the model is kept."""

    reward_scale: Literal["group", "batch", "none"] = "group"
    """What a sample's lead over its group's mean is divided by: the deviation of its group's rewards, that of
    the whole step's, or nothing. ``group`` makes as much of a group whose samples differ in form alone as of
    one in which some are right and some wrong; ``batch`` does not."""

    max_new_tokens: int = 96
    temperature: float = 1.0
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Further sampling parameters, by the names of ``SamplingParams``."""

    allow_filters: bool = False
    """Allow top_p, top_k and min_p. The trainer scores the full vocabulary, so the text is then drawn from
    another distribution than the one it differentiates; the kept mass is logged."""

    trainable_layers: int = 0
    """Train only this many of the last layers and the final norm; 0 trains everything. The backward pass
    stops below them, which is where most of a step's time goes."""

    loop_distillation_weight: float = 0.0
    """Of looped policies: weight of mean KL(last loop || earlier loop), over prompts and completions, in each
    forward and backward pass beside the trainer's own loss. It keeps shallow loops good drafters while the
    deepest one learns; 0: off."""

    samples_per_pass: int = 0
    """Samples in one forward and backward pass: memory, not speed, on a CPU; 0: a whole step's."""

    mismatch_samples: int = 2
    """Completions per step whose logprobs the trainer's model recomputes, to log how far rollout and
    trainer lie apart; 0 switches the check off."""

    weights_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of pushed weights. ``auto``: what the engine stores, so that nothing is sent to be rounded away."""

    weights_rounding: Literal["nearest", "stochastic"] = "stochastic"
    """Of float32 weights pushed as bfloat16. A step moves most weights by less than bfloat16 resolves:
    rounded to nearest, rollouts keep coming from an old policy; stochastically, from one that moves along."""

    max_minutes: float = 0.0
    """Stop after the step in which this much time has passed; 0: no limit."""

    threads: int = 0
    """Threads of the trainer's own maths; 0: torch's choice."""

    seed: int | None = None
    """Of the trainer and the order of prompts; None: the job's."""

    checkpoint_steps: int = 0
    """Steps between checkpoints, of which the last is kept; without one a run cannot be resumed."""

    save_policy: bool = False
    """Write the trained policy beside the run's numbers, as a Hugging Face folder."""

    def __post_init__(self) -> None:
        check_settings(
            "trainer",
            self,
            positive=("learning_rate", "temperature", "max_grad_norm"),
            steps=1,
            prompts_per_step=1,
            num_generations=2,
        )
        if not 1 <= self.max_new_tokens <= MAX_NEW_TOKENS:
            raise ConfigError(
                f"trainer.max_new_tokens must be in 1..{MAX_NEW_TOKENS}, got {self.max_new_tokens}"
            )
        if self.samples_per_pass and self.samples_per_step % self.samples_per_pass:
            raise ConfigError(
                f"trainer.samples_per_pass must divide the {self.samples_per_step} samples of a step, "
                f"got {self.samples_per_pass}"
            )
        training_params(self)

    @property
    def samples_per_step(self) -> int:
        """Completions one trainer step learns from."""
        return self.prompts_per_step * self.num_generations

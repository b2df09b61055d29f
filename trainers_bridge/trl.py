"""TRL's ``GRPOTrainer`` on our rollouts. The only file that imports TRL; the trainer itself stays TRL's.

``make_rollout_func`` is all a user's own TRL script needs; ``run`` is what ``taildraft run`` calls.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

# TRL warns about ``rollout_func`` on every trainer unless told beforehand that this is known.
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PrinterCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer

from rollout.bench.machine import commit, machine, versions
from rollout.errors import ConfigError
from rollout.job_config import JobConfig
from rollout.policy.source import load_policy
from rollout.policy.weights import HEAD
from rollout.progress import Progress, say
from rollout.settings import load_config
from rollout.tracking.jsonl import read_jsonl
from rollout.tracking.recorder import COMPLETIONS, ROUNDS
from rollout.tracking.tracker import Tracker
from trainers_bridge.allocator import keep_freed_memory
from trainers_bridge.config import TaskConfig, TrainerConfig
from trainers_bridge.contract import IncompleteRolloutError, RolloutClient
from trainers_bridge.looped.agreement import loop_overlaps
from trainers_bridge.looped.configuration import DISTILLATION_WEIGHT
from trainers_bridge.looped.model import OuroForCausalLM
from trainers_bridge.rollouts import TrainerRollouts
from trainers_bridge.summary import DraftTally, StepResult, summarize
from trainers_bridge.tasks.registry import Task, build_task
from trainers_bridge.watch import STEPS, StepWatch

log = logging.getLogger(__name__)

SUMMARY_FILE = "summary.json"
TRAINER_FOLDER = "trainer"
"""Within the run's folder: the trainer's own files, its checkpoints among them."""


def make_rollout_func(
    client: RolloutClient,
    tokenizer: Any,
    config: TrainerConfig,
    tracker: Tracker,
    *,
    run_seed: int = 0,
    folder: Path | None = None,
) -> TrainerRollouts:
    """Return a ``rollout_func`` for ``GRPOTrainer``. Raises for sampling the trainer cannot reproduce.

    It applies the chat template itself, pushes weights whenever ``global_step`` moved, and hands over exact
    ids with ``scaled`` logprobs. ``policy_version``, ``finish_reason``, ``kept_logmass``, ``drafted_tokens``
    and ``accepted_tokens`` reach the reward functions, one per sample. One per trainer and process.
    With ``folder`` it also writes ``controller-HOST.jsonl`` there, which ``controller.replay`` replays.
    """
    return TrainerRollouts(
        client=client,
        tokenizer=tokenizer,
        config=config,
        tracker=tracker,
        run_seed=run_seed,
        folder=folder,
    )


def run(job: JobConfig, client: RolloutClient, tracker: Tracker) -> int:
    """Train the job's policy on its task with ``client``'s rollouts; 0 when all went well.

    Writes a ``steps`` record per step, and ``summary.json`` in the run's folder. Whether the reward rose
    is a result, not a condition of success: the summary says it.
    """
    keep_freed_memory()
    config, task = settings_of(job)
    folder = _run_folder(job)
    earlier = earlier_run(folder)
    with Progress(f"loading the trainer's copy of {job.policy.source}"):
        model, tokenizer = load_trainee(job)
    freeze(model, config.trainable_layers)
    teach_loops(model, config.loop_distillation_weight)
    rollouts = TrainerRollouts(
        client=client,
        tokenizer=tokenizer,
        config=config,
        tracker=tracker,
        run_seed=job.seed,
        first_call=earlier.calls,
        first_round=earlier.rounds,
        folder=folder,
        probe=loop_overlaps,
    )
    with Progress("training", total=config.steps, done=len(earlier.steps)) as progress:
        watch = StepWatch(rollouts, config=config, tracker=tracker, progress=progress)
        watch.steps += earlier.steps
        trainer = build_trainer(
            model=model,
            tokenizer=tokenizer,
            task=task,
            config=config,
            rollouts=rollouts,
            folder=folder,
            watch=watch,
        )
        started_s = time.perf_counter()
        trainer.train(resume_from_checkpoint=earlier.checkpoint)
        total_s = time.perf_counter() - started_s
    if watch.stopped_by == "steps" and len(watch.steps) != config.steps:
        raise IncompleteRolloutError(f"the trainer ended after {len(watch.steps)} of {config.steps} steps")
    if config.save_policy:
        trainer.save_model(str(folder / "policy"))
    summary = summarize(watch.steps, stopped_by=watch.stopped_by, total_s=total_s)
    conditions = {"machine": machine(), "versions": versions(), "commit": commit()}
    written = json.dumps({**summary, "conditions": conditions}, indent=1)
    (folder / SUMMARY_FILE).write_text(written + "\n")
    for line in told(summary):
        say(line)
    return 0


def settings_of(job: JobConfig) -> tuple[TrainerConfig, Task]:
    """Return the checked trainer settings, every ``auto`` and default resolved, and the task."""
    config = load_config(job.trainer, TrainerConfig, path="trainer")
    seed = job.seed if config.seed is None else config.seed
    dtype = job.engine.dtype
    if config.weights_dtype == "auto":
        if dtype == "float64":
            raise ConfigError("engine.dtype: a float64 engine cannot take a float32 trainer's weights")
        config = replace(config, weights_dtype=dtype)
        log.info("trainer.weights_dtype: auto -> %s", dtype)
    config = replace(config, seed=seed)
    asked = load_config(job.task, TaskConfig, path="task")
    if asked.prompts < config.prompts_per_step:
        least = config.prompts_per_step
        raise ConfigError(f"task.prompts must be >= trainer.prompts_per_step ({least}), got {asked.prompts}")
    return config, build_task(asked, seed=seed)


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlierRun:
    """What a run that is resumed had done when its last checkpoint was written; all empty for a new one."""

    checkpoint: str | None = None
    steps: tuple[StepResult, ...] = ()
    calls: int = 0
    """Rollouts journalled, also those after the checkpoint: their numbers are not used again."""

    rounds: int = 0


def earlier_run(folder: Path) -> EarlierRun:
    """Return what ``folder`` already holds. Raises ``ConfigError`` for steps without a checkpoint."""
    found = get_last_checkpoint(str(folder / TRAINER_FOLDER)) if (folder / TRAINER_FOLDER).is_dir() else None
    by_step = {line["step"]: line for line in read_jsonl(folder, STEPS)}
    if found is None:
        if by_step:
            raise ConfigError(
                f"output_dir: {folder} holds {len(by_step)} trainer steps but no checkpoint to resume from; "
                "choose another folder, or set trainer.checkpoint_steps before the first start"
            )
        return EarlierRun()
    last = int(found.rpartition("-")[2])
    steps = tuple(_step_result(line) for step, line in sorted(by_step.items()) if step <= last)
    return EarlierRun(
        checkpoint=found,
        steps=steps,
        calls=1 + max((line["rollout_step"] for line in read_jsonl(folder, COMPLETIONS)), default=-1),
        rounds=sum(1 for _ in read_jsonl(folder, ROUNDS)),
    )


def _step_result(line: Mapping[str, Any]) -> StepResult:
    """Return the step that a line of the journal tells of."""
    tallies = {name: DraftTally(**tally) for name, tally in line["by_drafter"].items()}
    names = [f.name for f in fields(StepResult)]
    return StepResult(
        **{**{n: line[n] for n in names}, "rewards": tuple(line["rewards"]), "by_drafter": tallies}
    )


def load_trainee(job: JobConfig) -> tuple[Any, Any]:
    """Return the trainer's float32 model and tokenizer, with the very weights the hosts start from."""
    policy = load_policy(job.policy)
    if policy.tokenizer is None:
        raise ConfigError(
            f"policy.source={job.policy.source!r} has no tokenizer, so no task can be put to it"
        )
    model = AutoModelForCausalLM.from_pretrained(policy.folder, dtype=torch.float32)
    if job.policy.offgrid:
        absent, unknown = model.load_state_dict(policy.state, strict=False)
        untied = [n for n in absent if not (n == HEAD and policy.spec.tie_embeddings)]
        if untied or unknown:
            raise ConfigError(f"policy.source: weights do not fit the model: {[*untied, *unknown]}")
    return model, policy.tokenizer


def freeze(model: Any, trainable_layers: int) -> None:
    """Leave only the last ``trainable_layers`` layers and the final norm trainable; 0 leaves all."""
    if trainable_layers == 0:
        return
    body = model.base_model
    layers = body.layers
    if trainable_layers > len(layers):
        raise ConfigError(f"trainer.trainable_layers: the policy has {len(layers)}, got {trainable_layers}")
    model.requires_grad_(False)
    for part in (*layers[-trainable_layers:], body.norm):
        part.requires_grad_(True)


def teach_loops(model: Any, weight: float) -> None:
    """Let the deepest loop of a looped policy teach the others while it is trained; 0 does nothing."""
    if weight == 0.0:
        return
    if not isinstance(model, OuroForCausalLM):
        kind = getattr(model.config, "model_type", type(model).__name__)
        raise ConfigError(f"trainer.loop_distillation_weight: a {kind} policy has no loops to teach")
    setattr(model.config, DISTILLATION_WEIGHT, weight)


def build_trainer(
    *,
    model: Any,
    tokenizer: Any,
    task: Task,
    config: TrainerConfig,
    rollouts: TrainerRollouts,
    folder: Path,
    watch: StepWatch,
) -> Any:
    """Return a ``GRPOTrainer`` that draws its samples from ``rollouts`` and reports to ``watch``."""
    if config.threads:
        torch.set_num_threads(config.threads)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[watch.rewards(reward_function(task))],
        args=trainer_args(config, folder=folder),
        train_dataset=Dataset.from_list(task.rows()),
        processing_class=tokenizer,
        rollout_func=rollouts,
        callbacks=[watch],
    )
    trainer.remove_callback(PrinterCallback)  # it prints every number; ours go to the tracker
    return trainer


def trainer_args(config: TrainerConfig, *, folder: Path) -> Any:
    """Return TRL's arguments: its own sampling neutral, its own logging off, one generation per step."""
    samples_per_pass = config.samples_per_pass or config.samples_per_step
    cuda = torch.cuda.is_available()
    return GRPOConfig(
        output_dir=str(folder / TRAINER_FOLDER),
        use_cpu=not cuda,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=samples_per_pass,
        gradient_accumulation_steps=config.samples_per_step // samples_per_pass,
        num_generations=config.num_generations,
        max_completion_length=config.max_new_tokens,
        max_steps=config.steps,
        learning_rate=config.learning_rate,
        lr_scheduler_type="constant_with_warmup" if config.warmup_steps else "constant",
        warmup_steps=config.warmup_steps,
        max_grad_norm=config.max_grad_norm,
        beta=config.beta,
        scale_rewards=config.reward_scale,
        temperature=config.temperature,
        seed=(config.seed or 0) % 2**32,  # numpy's generator takes no more
        report_to="none",
        save_strategy="steps" if config.checkpoint_steps else "no",
        save_steps=config.checkpoint_steps or config.steps,
        save_total_limit=1,
        logging_steps=1,
        disable_tqdm=True,
    )


def reward_function(task: Task) -> Callable[..., list[float]]:
    """Return ``task``'s reward as TRL calls it: columns in, one reward per sample out."""

    def reward(
        prompts: Sequence[Any], completions: Sequence[Any], finish_reason: Sequence[str], **columns: Any
    ) -> list[float]:
        names = [n for n in row_names if n in columns]
        return [
            task.reward(
                text_of(completion), ended=finish_reason[i] == "stop", **{n: columns[n][i] for n in names}
            )
            for i, completion in enumerate(completions)
        ]

    row_names = [n for n in task.rows()[0] if n != "prompt"]
    return reward


def text_of(completion: Any) -> str:
    """Return a completion's text, whether TRL wrapped it in a message or not."""
    return completion if isinstance(completion, str) else str(completion[0]["content"])


def told(summary: dict[str, Any]) -> list[str]:
    """Return the summary in words."""
    seconds, reward = summary["seconds"], summary["reward"]
    lines = [
        f"trained {summary['steps']} steps in {seconds['total']:.0f} s (ended by {summary['stopped_by']}): "
        f"rollouts {seconds['generate']:.0f} s, weight pushes {seconds['weight_sync']:.0f} s, "
        f"checks {seconds['mismatch']:.0f} s, trainer {seconds['optimize']:.0f} s"
    ]
    if summary["accept_rate"] is not None:
        lines.append(f"drafts: {summary['drafted_tokens']} offered, {summary['accept_rate']:.1%} accepted")
    if reward["improved"] is None:
        return [*lines, f"reward: no verdict, {reward['reason']}"]
    first, last = reward["first_quarter"], reward["last_quarter"]
    verdict = "rose" if reward["improved"] else "did not rise"
    return [
        *lines,
        f"reward {verdict} by the measure of {reward['needed_standard_errors']:g} standard errors: "
        f"first quarter {first['mean']:.3f} +- {first['standard_error']:.3f}, "
        f"last {last['mean']:.3f} +- {last['standard_error']:.3f}",
    ]


def _run_folder(job: JobConfig) -> Path:
    if job.output_dir is None:
        raise ValueError("open the run's folder before training")
    return Path(job.output_dir)

"""Trains the looped policy from nothing: every loop's loss, the deepest loop teaching the others, AdamW.

A run is a pure function of its settings, the number of threads and the torch build. It can stop after any
step and go on later: the weights come out the same.
"""

import logging
import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from rollout.policy.ouro_config import OuroConfig
from rollout.progress import Progress
from trainers_bridge.looped.batches import batch_of
from trainers_bridge.looped.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from trainers_bridge.looped.model import OuroForCausalLM
from trainers_bridge.looped.tokenizer import END_ID, PAD_ID, VOCABULARY

log = logging.getLogger(__name__)

CHECKPOINT = "checkpoint.pt"
CHECKPOINT_EVERY_S = 60.0
"""Of work lost at worst when the process dies; writing one takes a fraction of a second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Size of the policy. The engine's kernels want hidden size and head dimension in multiples of 16."""

    hidden_size: int = 192
    intermediate_size: int = 512
    layers: int = 2
    heads: int = 3
    loops: int = 4
    max_positions: int = 512
    rope_theta: float = 10000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Pretraining:
    """Everything a run's weights depend on, beside the torch build."""

    shape: Shape = field(default_factory=Shape)
    seed: int = 0
    threads: int = 1
    """Part of what the weights depend on. One: beside another job two were three times slower than one."""

    steps: int = 1800
    batch_tokens: int = 768
    learning_rate: float = 4e-3
    warmup_steps: int = 40
    weight_decay: float = 0.05
    max_grad_norm: float = 1.0
    loop_weights: tuple[float, ...] = (0.1, 0.1, 0.2, 0.6)
    """Of the loops' cross entropies. The deepest counts most, so that depth is used; the shallow ones count,
    so that they can draft."""

    distillation_weight: float = 0.3
    shallow_until_frac: float = 0.4
    """Share of the steps that run ``shallow_loops`` only: cheaper, and the same objective cut short."""

    shallow_loops: int = 2

    def __post_init__(self) -> None:
        if len(self.loop_weights) != self.shape.loops:
            raise ValueError(f"loop_weights has {len(self.loop_weights)} values for {self.shape.loops} loops")

    def loops_at(self, step: int) -> int:
        """Return how many loops a step runs."""
        return self.shallow_loops if step < self.shallow_until_frac * self.steps else self.shape.loops

    def learning_rate_at(self, step: int) -> float:
        """Return a step's learning rate: up in a line, then down half a cosine to a twentieth."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What a call of ``pretrain`` came to."""

    model: OuroForCausalLM
    step: int
    """Steps done, in all sessions together."""

    tokens: int
    seconds: float
    finished: bool


def new_policy(settings: Pretraining) -> OuroForCausalLM:
    """Return the policy with random float32 weights; same seed, same weights."""
    shape = settings.shape
    config = OuroConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        max_position_embeddings=shape.max_positions,
        rope_theta=shape.rope_theta,
        total_ut_steps=shape.loops,
        loop_loss_weights=list(settings.loop_weights),
        loop_distillation_weight=settings.distillation_weight,
        bos_token_id=END_ID,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
    )
    model = OuroForCausalLM(config)
    generator = torch.Generator().manual_seed(settings.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                # A loop starts from a state of unit size: normed after the first loop, the embedding before.
                deviation = 1.0 if name == "model.embed_tokens.weight" else parameter.shape[1] ** -0.5 / 2
                parameter.normal_(std=deviation, generator=generator)
    return model


def optimizer_of(model: OuroForCausalLM, settings: Pretraining) -> torch.optim.Optimizer:
    """Return AdamW; norms, the gate's bias and the embedding do not decay."""
    decayed = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed" in n]
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.98), eps=1e-9, fused=True)


def pretrain(settings: Pretraining, folder: Path, *, stop_after_s: float | None = None) -> Trained:
    """Train, or go on where ``folder``'s checkpoint left off; stop after ``stop_after_s`` of this call.

    Raises ``CheckpointError`` when the checkpoint is of other settings or damaged.
    """
    torch.set_num_threads(settings.threads)
    model = new_policy(settings)
    optimizer = optimizer_of(model, settings)
    plain = plain_settings(settings)
    earlier = read_checkpoint(folder / CHECKPOINT, settings=plain)
    step, tokens, spent_s = 0, 0, 0.0
    if earlier is not None:
        model.load_state_dict(earlier.model)
        optimizer.load_state_dict(earlier.optimizer)
        step, tokens, spent_s = earlier.step, earlier.tokens, earlier.seconds
        log.info("looped policy: going on after step %d", step)
    started_s = saved_s = time.monotonic()

    def save() -> None:
        write_checkpoint(
            folder / CHECKPOINT,
            Checkpoint(
                settings=plain,
                model=model.state_dict(),
                optimizer=optimizer.state_dict(),
                step=step,
                tokens=tokens,
                seconds=spent_s + time.monotonic() - started_s,
            ),
        )

    model.train()
    with Progress("training the looped policy", total=settings.steps, done=step) as progress:
        while step < settings.steps:
            if stop_after_s is not None and time.monotonic() - started_s >= stop_after_s:
                break
            taken = train_step(model, optimizer, settings, step)
            step, tokens = step + 1, tokens + taken.tokens
            progress.advance(note=f"cross entropy by loop {' '.join(f'{v:.3f}' for v in taken.losses)}")
            if time.monotonic() - saved_s >= CHECKPOINT_EVERY_S:
                save()
                saved_s = time.monotonic()
        save()
    return Trained(
        model=model.eval(),
        step=step,
        tokens=tokens,
        seconds=spent_s + time.monotonic() - started_s,
        finished=step == settings.steps,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTaken:
    """What one step saw."""

    losses: tuple[float, ...]
    """Cross entropy of every loop that ran, before the step."""

    tokens: int


def train_step(
    model: OuroForCausalLM, optimizer: torch.optim.Optimizer, settings: Pretraining, step: int
) -> StepTaken:
    """Take one step; its batch, learning rate and depth follow from ``step``."""
    batch = batch_of(seed=settings.seed, step=step, tokens=settings.batch_tokens)
    output = model(
        input_ids=batch.input_ids_BT, labels=batch.labels_BT, loops=settings.loops_at(step), train_gates=True
    )
    for group in optimizer.param_groups:
        group["lr"] = settings.learning_rate_at(step)
    optimizer.zero_grad()
    (output.loss + output.gate_loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
    optimizer.step()
    return StepTaken(losses=tuple(output.loop_losses.tolist()), tokens=batch.tokens)


def plain_settings(settings: Pretraining) -> dict[str, Any]:
    """Return the settings as plain data, as checkpoint and record keep them."""
    plain = asdict(settings)
    plain["loop_weights"] = list(settings.loop_weights)
    return plain

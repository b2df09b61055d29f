"""Training batches as a pure function of (seed, step): a resumed run sees what an uninterrupted one saw.

Examples are made in pools, sorted by length within a pool and cut into batches of about equally many
tokens, so that little of a batch is padding. Padding follows the text: causal attention never sees it.

Shapes: B sequences, T tokens of the longest.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256

import torch
from torch import Tensor

from trainers_bridge.config import ExerciseSplit
from trainers_bridge.looped.loss import IGNORED
from trainers_bridge.looped.tokenizer import END_ID, PAD_ID, encode, prompt_ids
from trainers_bridge.tasks.exercises import Exercise, exercises

POOL_STEPS = 32
"""Batches made together. More would pad less still, and make a resumed run wait longer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What one training step reads."""

    input_ids_BT: Tensor
    labels_BT: Tensor
    """Unshifted; only replies and their end are scored: questions are random and cannot be predicted."""

    tokens: int
    """Without padding."""


def batch_of(*, seed: int, step: int, tokens: int) -> Batch:
    """Return the batch of ``step``, of at most ``tokens`` tokens, padding included."""
    return _pool(seed, step // POOL_STEPS, tokens)[step % POOL_STEPS]


@lru_cache(maxsize=2)
def _pool(seed: int, pool: int, tokens: int) -> tuple[Batch, ...]:
    """Make a pool: enough examples for its batches, those of like length together, in a random order."""
    source = exercises(seed=f"{seed}/{pool}", split="train")
    picked: list[Exercise] = []
    cut: list[list[Exercise]] = []
    while len(cut) < POOL_STEPS:
        picked += [next(source) for _ in range(256)]
        cut = _cut(sorted(picked, key=_length), tokens)
    random.Random(f"batches/{seed}/{pool}").shuffle(cut)
    return tuple(collate(part) for part in cut[:POOL_STEPS])


def _length(exercise: Exercise) -> int:
    """Tokens of question, reply and end."""
    return len(exercise.question) + len(exercise.reply) + 2


def _cut(by_length: Sequence[Exercise], tokens: int) -> list[list[Exercise]]:
    """Cut examples, shortest first, into batches whose padded size stays within ``tokens``."""
    cut: list[list[Exercise]] = [[]]
    for exercise in by_length:
        if cut[-1] and _length(exercise) * (len(cut[-1]) + 1) > tokens:
            cut.append([])
        cut[-1].append(exercise)
    return cut


def collate(part: Sequence[Exercise]) -> Batch:
    """Return examples as one batch, padded behind."""
    rows, scored = zip(*(_row(exercise) for exercise in part), strict=True)
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), PAD_ID)
    labels = torch.full((len(rows), longest), IGNORED)
    for index, (row, start) in enumerate(zip(rows, scored, strict=True)):
        ids[index, : len(row)] = torch.tensor(row)
        labels[index, start : len(row)] = ids[index, start : len(row)]
    return Batch(input_ids_BT=ids, labels_BT=labels, tokens=sum(map(len, rows)))


def _row(exercise: Exercise) -> tuple[list[int], int]:
    """Return an example's ids and where its reply begins."""
    prompt = prompt_ids(exercise.question)
    return [*prompt, *encode(exercise.reply), END_ID], len(prompt)


def data_digest(*, seed: int, tokens: int, steps: int = POOL_STEPS) -> str:
    """Return the SHA-256 of the first ``steps`` batches: tells whether the generator still makes them."""
    digest = sha256()
    for step in range(steps):
        batch = batch_of(seed=seed, step=step, tokens=tokens)
        digest.update(batch.input_ids_BT.numpy().tobytes() + batch.labels_BT.numpy().tobytes())
    return digest.hexdigest()


def held_out(*, seed: int, count: int, split: ExerciseSplit = "held_out") -> list[Exercise]:
    """Return ``count`` different exercises that no training batch holds, the kinds in turn."""
    return list(_distinct(exercises(seed=f"{seed}/evaluation", split=split), count))


def _distinct(source: Iterator[Exercise], count: int) -> Iterator[Exercise]:
    """Yield the first ``count`` whose questions differ; a short question can come up twice."""
    seen: set[str] = set()
    for exercise in source:
        if exercise.question not in seen:
            seen.add(exercise.question)
            yield exercise
            if len(seen) == count:
                return

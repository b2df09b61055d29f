"""What every test gets: one torch thread, and log levels as they were.

Tiny tensors gain nothing from a second thread, and two threads on a busy machine lose a lot.
"""

import logging
from collections.abc import Iterator

import pytest
import torch

from rollout.guard import PACKAGES

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def log_levels_stay() -> Iterator[None]:
    """A command that runs inside a test sets our loggers' levels for its whole process."""
    loggers = [logging.getLogger(name) for name in PACKAGES]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)

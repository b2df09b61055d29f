"""What every test gets: one torch thread, log levels as they were, and a quick garbage collector.

Tiny tensors gain nothing from a second thread, and two threads on a busy machine lose a lot.

Imports leave half a million objects behind that stay. The collector would walk them again and again, a tenth
of the unit tests' time: it rests while tests are collected and leaves out what was made until then.
"""

import gc
import logging
from collections.abc import Iterator

import pytest
import torch

from rollout.guard import PACKAGES

torch.set_num_threads(1)
gc.disable()  # until all tests are collected


@pytest.fixture(autouse=True)
def log_levels_stay() -> Iterator[None]:
    """A command that runs inside a test sets our loggers' levels for its whole process.

    Only a level that changed is set: each setting empties the caches of every logger there is.
    """
    loggers = [logging.getLogger(name) for name in PACKAGES]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        if logger.level != level:
            logger.setLevel(level)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()

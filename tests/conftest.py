"""What every test gets: one torch thread, log levels as they were, and a pytest that costs little.

Tiny tensors gain nothing from a second thread, and two threads on a busy machine lose a lot.

Imports leave half a million objects behind that stay. The collector would walk them again and again, a tenth
of the unit tests' time: it rests while tests are collected and leaves out what was made until then.
"""

import gc
import logging
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import torch

from rollout.guard import PACKAGES

torch.set_num_threads(1)
gc.disable()  # until all tests are collected


@pytest.fixture(autouse=True)
def torch_threads_stay() -> Iterator[None]:
    """An engine that is built inside a test sets torch's threads for its whole process.

    Where the second core is busy, tests that then compute tiny tensors on two threads take ten times as long.
    """
    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


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


class LogsWhereAsked:
    """Catches log records for the tests that ask for ``caplog``, and for no others.

    pytest enters every logger that does not propagate, of which torch makes some sixty, twice in each of a
    test's three phases: a tenth of the unit tests' time. Without it a warning still goes to standard error,
    which a failure shows.
    """

    def __init__(self, plugin: Any) -> None:
        self._plugin = plugin

    def _phase(self, item: pytest.Item, phase: str) -> Generator[None, Any, Any]:
        if "caplog" in getattr(item, "fixturenames", ()):
            return (yield from getattr(self._plugin, phase)(item))
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        return (yield from self._phase(item, "pytest_runtest_setup"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        return (yield from self._phase(item, "pytest_runtest_call"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        return (yield from self._phase(item, "pytest_runtest_teardown"))


def pytest_collection_finish(session: pytest.Session) -> None:
    plugins = session.config.pluginmanager
    if (plugin := plugins.unregister(name="logging-plugin")) is not None:
        plugins.register(LogsWhereAsked(plugin))
    gc.freeze()
    gc.enable()

"""A rollout client without Ray, for tests: a real engine, driven in the calling thread."""

import time
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from controller.types import RoundLoad, RoundPlan
from rollout.engine.protocol import Engine
from rollout.policy.weights import manifest
from rollout.service.records import RoundRecord
from rollout.types import Completion, Request


class EngineClient:
    """Implements ``RolloutClient`` over one engine. Keeps what it was asked, for tests to look at."""

    def __init__(self, engine: Engine, plan: Callable[[RoundLoad], RoundPlan]) -> None:
        self._engine, self._plan = engine, plan
        self._records: list[RoundRecord] = []
        self.requests: list[list[Request]] = []
        """Of every ``generate``."""

        self.completions: list[Completion] = []
        self.versions: list[int] = []
        """Of every push."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Run the engine until every request has ended; return the completions in the order asked."""
        self.requests.append(list(requests))
        done: dict[tuple[str, int], Completion] = {}
        for request in requests:
            self._engine.add(request)
        while self._engine.busy:
            load = self._engine.load()
            plan = self._plan(load)
            outcome = self._engine.run_round(plan)
            self._records.append(
                RoundRecord(host="here", at_s=time.monotonic(), load=load, plan=plan, facts=outcome.facts)
            )
            done.update({(c.prompt_uid, c.sample_index): c for c in outcome.completions})
        completions = [done[request.key] for request in requests]
        self.completions += completions
        return completions

    def update_weights(self, state_dict: Mapping[str, Tensor], version: int) -> int:
        """Switch the engine's weights between calls; return the live version."""
        self.versions.append(version)
        self._engine.begin_update(manifest(state_dict, version), in_flight="drain")
        self._engine.stage(state_dict.items())
        return self._engine.commit_update()

    def stats(self) -> dict[str, float]:
        """Return the engine's gauges as those of a host."""
        return {f"host/here/{name}": value for name, value in self._engine.gauges().items()}

    def take_records(self) -> list[RoundRecord]:
        """Return the rounds since the last call."""
        taken, self._records = self._records, []
        return taken

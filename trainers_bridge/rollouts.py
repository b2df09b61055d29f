"""A trainer step's rollouts: prompts in, exact ids and ``scaled`` logprobs out, moved weights pushed first.

Written to what TRL's ``GRPOTrainer`` really asks of a ``rollout_func``: prompts arrive raw and already
repeated once per generation, and as many samples as prompts go back, in order. Nothing is re-tokenised:
the ids handed over are the ids that were sampled, end-of-sequence included.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from rollout.errors import ConfigError
from rollout.seeds import sample_seed
from rollout.tracking.recorder import RolloutRecorder
from rollout.tracking.reduce import AcceptanceCounts, slowest_build_s
from rollout.tracking.tracker import Tracker
from rollout.types import Completion, Request, SamplingParams
from trainers_bridge.config import TrainerConfig
from trainers_bridge.contract import (
    PolicyPushError,
    RolloutClient,
    UnreproducibleSamplingError,
    check_answered,
    check_handed,
    handed_logprobs,
    training_params,
)
from trainers_bridge.mismatch import compare, trainer_logprobs
from trainers_bridge.weights import check_pushable, policy_state

log = logging.getLogger(__name__)

DTYPES = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16}
"""Of pushed weights. Unresolved ``auto`` sends float32, which every engine takes."""


@dataclass(kw_only=True, slots=True)
class StepClock:
    """Seconds spent on rollouts since the last trainer step was logged."""

    generate_s: float = 0.0
    weight_sync_s: float = 0.0
    mismatch_s: float = 0.0
    gauges: dict[str, float] = field(default_factory=dict)
    """Of the last rollout, on the trainer's clock."""

    acceptance: list[Mapping[str, AcceptanceCounts]] = field(default_factory=list)
    """By drafter, of each rollout."""

    def take(self) -> "StepClock":
        """Return what was gathered and start anew."""
        taken = replace(self)
        self.generate_s = self.weight_sync_s = self.mismatch_s = 0.0
        self.gauges, self.acceptance = {}, []
        return taken


Probe = Callable[..., Mapping[str, float]]
"""Looks at the trainer's model beside the mismatch check, on the same samples and under the names that
``trainer_logprobs`` has for them, and returns loggable values."""


class TrainerRollouts:
    """Callable as a ``rollout_func``. Holds the version it last pushed; one per training run and process."""

    def __init__(
        self,
        *,
        client: RolloutClient,
        tokenizer: Any,
        config: TrainerConfig,
        tracker: Tracker,
        run_seed: int = 0,
        first_call: int = 0,
        first_round: int = 0,
        folder: Path | None = None,
        probe: Probe | None = None,
    ) -> None:
        self.params: SamplingParams = training_params(config)
        self.clock = StepClock()
        self.policy_version: int | None = None
        """Of the last push; None before the first."""

        self._client, self._tokenizer, self._config = client, tokenizer, config
        self._recorder = RolloutRecorder(tracker, first_round=first_round, folder=folder)
        self._run_seed, self._probe = run_seed, probe
        self._pushed_step: int | None = None
        self._calls = first_call
        self._samples_of: Counter[str] = Counter()
        """Samples asked for since the step began, by prompt."""

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Return the samples of ``prompts``, one each and in order, under the trainer's current weights."""
        check_trainer_args(trainer.args, self._config, self.params)
        self._push_if_moved(trainer)
        prompt_ids = [prompt_token_ids(self._tokenizer, prompt) for prompt in prompts]
        requests = self._requests(prompt_ids, trainer)
        started_s = time.perf_counter()
        completions = self._client.generate(requests)
        took_s = time.perf_counter() - started_s
        check_answered(requests, completions)
        output = handed_output(prompt_ids, completions)
        self._account(trainer, completions, output, took_s=took_s)
        return output

    def _push_if_moved(self, trainer: Any) -> None:
        step = int(trainer.state.global_step)
        if step == self._pushed_step:
            return
        check_pushable(trainer)
        version = step + 1  # the service starts at the version it loaded, and a version only ever grows
        if trainer.accelerator.is_main_process:
            started_s = time.perf_counter()
            model = trainer.accelerator.unwrap_model(trainer.model)
            stochastic = self._config.weights_rounding == "stochastic"
            seed = sample_seed(
                run_seed=self._run_seed, trainer_step=step, prompt_uid="weights", sample_index=0
            )
            state = policy_state(
                model,
                dtype=DTYPES[self._config.weights_dtype],
                stochastic_seed=seed if stochastic else None,
            )
            live = self._client.update_weights(state, version)
            if isinstance(live, int) and live != version:
                raise PolicyPushError(f"pushed version {version}, but the service runs version {live}")
            took_s = time.perf_counter() - started_s
            self.clock.weight_sync_s += took_s
            build_s = slowest_build_s(self._client.stats())
            self._recorder.update(version=version, update_s=took_s, drafter_build_s=build_s)
        trainer.accelerator.wait_for_everyone()
        self._pushed_step, self.policy_version = step, version
        self._samples_of.clear()

    def _requests(self, prompt_ids: Sequence[Sequence[int]], trainer: Any) -> list[Request]:
        requests = []
        ranks, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
        for ids in prompt_ids:
            uid = prompt_uid(ids)
            # The uid is the prompt's own over steps, so that its earlier rollouts can be found; the index
            # keeps a step's samples of it apart, also when the trainer's ranks share a group.
            index = self._samples_of[uid] * ranks + rank
            self._samples_of[uid] += 1
            seed = sample_seed(
                run_seed=self._run_seed,
                trainer_step=int(trainer.state.global_step),
                prompt_uid=uid,
                sample_index=index,
            )
            requests.append(
                Request(
                    prompt_uid=uid,
                    sample_index=index,
                    prompt_ids=tuple(ids),
                    params=self.params,
                    seed=seed,
                )
            )
        return requests

    def _account(
        self, trainer: Any, completions: Sequence[Completion], output: Mapping[str, Any], *, took_s: float
    ) -> None:
        self.clock.generate_s += took_s
        self._check_versions(completions)
        self._recorder.rounds(self._client.take_records())
        self._recorder.completions(completions, rollout_step=self._calls)
        dropped = sum(v for k, v in self._client.stats().items() if k.endswith("/records_dropped"))
        more = {**kept_mass_gauges(completions), "service/round_records_dropped": dropped}
        self.clock.acceptance.append(self._recorder.acceptance_by_drafter)
        rollout = self._recorder.step(self._calls, wall_s=took_s, more=more)
        self.clock.gauges = self._mismatch_gauges(trainer, output)
        mode = "train" if trainer.model.training else "eval"
        for name, value in {**rollout, **self.clock.gauges}.items():
            trainer._metrics[mode][name].append(value)
        self._calls += 1

    def _check_versions(self, completions: Sequence[Completion]) -> None:
        wrong = {s.policy_version for c in completions for s in c.tokens.sources} - {self.policy_version}
        if wrong:
            raise PolicyPushError(
                f"samples of policy version {sorted(wrong)} came back where {self.policy_version} is live"
            )

    def _mismatch_gauges(self, trainer: Any, output: Mapping[str, Any]) -> dict[str, float]:
        wanted = min(self._config.mismatch_samples, len(output["completion_ids"]))
        if wanted == 0:
            return {}
        started_s = time.perf_counter()
        # Spread over the batch, so that over steps every group is looked at.
        total = len(output["completion_ids"])
        chosen = sorted({(i * total // wanted + self._calls) % total for i in range(wanted)})
        model = trainer.accelerator.unwrap_model(trainer.model)
        looked_at: dict[str, Any] = {
            "prompt_ids": [output["prompt_ids"][i] for i in chosen],
            "completion_ids": [output["completion_ids"][i] for i in chosen],
            "temperature": self.params.temperature,
        }
        with trainer.accelerator.autocast():
            own = trainer_logprobs(model, **looked_at)
            probed = {} if self._probe is None else self._probe(model, **looked_at)
        found = compare([output["logprobs"][i] for i in chosen], own)
        self.clock.mismatch_s += time.perf_counter() - started_s
        return {**found.gauges(), **probed}


def prompt_token_ids(tokenizer: Any, prompt: Any) -> list[int]:
    """Return the ids of a raw prompt: a text as it is, messages through the chat template."""
    if isinstance(prompt, str):
        return [int(i) for i in tokenizer(prompt)["input_ids"]]
    encoded = tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, tokenize=True, return_dict=True
    )
    return [int(i) for i in encoded["input_ids"]]


def prompt_uid(prompt_ids: Sequence[int]) -> str:
    """Return the name of a prompt: the same for the same ids, at every step and on every rank."""
    return blake2b(repr(list(prompt_ids)).encode(), digest_size=8).hexdigest()


def handed_output(prompt_ids: Sequence[Sequence[int]], completions: Sequence[Completion]) -> dict[str, Any]:
    """Return what the trainer gets. Keys beyond its own three reach the reward functions, one per sample."""
    output: dict[str, Any] = {
        "prompt_ids": [list(ids) for ids in prompt_ids],
        "completion_ids": [list(c.token_ids) for c in completions],
        "logprobs": [handed_logprobs(c) for c in completions],
        "policy_version": [c.tokens[-1].policy_version for c in completions],
        "finish_reason": [c.finish_reason for c in completions],
        "kept_logmass": [sum(c.tokens.kept_logmasses) / len(c.tokens) for c in completions],
        "drafted_tokens": [c.provenance.drafted if c.provenance else 0 for c in completions],
        "accepted_tokens": [c.provenance.accepted if c.provenance else 0 for c in completions],
    }
    check_handed(
        samples=len(prompt_ids), completion_ids=output["completion_ids"], logprobs=output["logprobs"]
    )
    return output


def kept_mass_gauges(completions: Sequence[Completion]) -> dict[str, float]:
    """Return how much of the distribution the filters kept, pooled over tokens; 1 without filters."""
    kept = [math.exp(mass) for c in completions for mass in c.tokens.kept_logmasses]
    return {"rollout/kept_mass_mean": sum(kept) / len(kept), "rollout/kept_mass_min": min(kept)}


def check_trainer_args(args: Any, config: TrainerConfig, params: SamplingParams) -> None:
    """Raise where the trainer's own sampling settings say something else than the rollouts do.

    The trainer divides logits by its own temperature, so another one there is another convention. Its
    filters and penalties would not be applied to these rollouts at all, so none may be set.
    """
    if float(args.temperature) != params.temperature:
        raise UnreproducibleSamplingError(
            f"temperature: trainer scores at {args.temperature}, rollouts are drawn at {params.temperature}"
        )
    own = {
        "top_p": (getattr(args, "top_p", None), (None, 1.0, params.top_p)),
        "top_k": (getattr(args, "top_k", None), (None, 0, params.top_k)),
        "min_p": (getattr(args, "min_p", None), (None, 0.0, params.min_p)),
        "repetition_penalty": (getattr(args, "repetition_penalty", None), (None, 1.0)),
        "generation_kwargs": (getattr(args, "generation_kwargs", None) or None, (None,)),
    }
    wrong = [f"{name}={value!r}" for name, (value, fine) in own.items() if value not in fine]
    if wrong:
        raise UnreproducibleSamplingError(
            f"{', '.join(wrong)} in the trainer's arguments does not reach these rollouts; "
            "set trainer.sampling instead"
        )
    limit = getattr(args, "max_completion_length", None)
    if limit is not None and limit != config.max_new_tokens:
        raise ConfigError(
            f"trainer.max_new_tokens is {config.max_new_tokens}, the trainer's max_completion_length {limit}"
        )

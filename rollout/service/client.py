"""The trainer's side: a plain, blocking object in front of a service somewhere in the cluster."""

import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

import ray
from ray.exceptions import RayActorError, RayTaskError
from torch import Tensor

from controller.types import InFlight
from rollout.config import ServiceConfig
from rollout.engine.protocol import Emission
from rollout.errors import ConfigError, RequestError, RolloutError, ServiceGoneError
from rollout.fields import count, items, shown, token_ids, whole
from rollout.policy.weights import manifest
from rollout.seeds import sample_seed
from rollout.service import cluster
from rollout.service.actors import NAMESPACE, create_service, plain_error
from rollout.service.callers import CallerRef
from rollout.service.door import prompt_uid, sampling_params
from rollout.service.factory import HostSpec
from rollout.service.live import Key
from rollout.service.payload import pack
from rollout.service.records import RoundRecord, ServiceHealth
from rollout.service.service import RolloutService
from rollout.types import Completion, Request, SamplingParams

log = logging.getLogger(__name__)

_GONE = "the rollout service was closed or its process died; start another, or connect to one that runs"


class RolloutClient:
    """Talks to one ``RolloutService``. Every call blocks until it is done; errors have their own types."""

    def __init__(self, service: Any, *, run_seed: int = 0, owner: bool = False) -> None:
        self._service, self.run_seed, self._owner = service, run_seed, owner
        self._caller: CallerRef | None = None

    @classmethod
    def start(
        cls, spec: HostSpec, config: ServiceConfig | None = None, *, run_seed: int = 0
    ) -> "RolloutClient":
        """Connect to Ray (see ``cluster.connect``), start a service and its hosts, and wait for them."""
        config = config if config is not None else ServiceConfig()
        cluster.connect(config)
        try:
            service = create_service(RolloutService, spec, config, run_seed=run_seed)
        except ValueError as error:
            raise ConfigError(f"service.name: {config.name!r} is taken in this cluster: {error}") from error
        client = cls(service, run_seed=run_seed, owner=True)
        try:
            client._control("start")
        except BaseException:
            ray.kill(service)
            raise
        return client

    @classmethod
    def connect(
        cls, *, address: str | None = "auto", name: str = ServiceConfig().name, run_seed: int = 0
    ) -> "RolloutClient":
        """Find a running service by its name. Raises ``ConfigError`` when there is none."""
        cluster.connect(ServiceConfig(ray_address=address))
        try:
            service = ray.get_actor(name, namespace=NAMESPACE)
        except ValueError as error:
            raise ConfigError(f"service.name: no service {name!r} in this cluster") from error
        return cls(service, run_seed=run_seed)

    # ---- generation -------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request | Mapping[str, Any]]) -> list[Completion]:
        """Return one completion per request, in order, each ended exactly once. A bad one fails alone.

        A mapping without ``prompt_uid`` is named by its prompt (``naming.Namer``). An interrupt aborts what
        has not ended, so that it can be asked for again at once; the death of this process does so too,
        within seconds.
        """
        call = uuid.uuid4().hex
        try:
            return cast(
                list[Completion], self._call("generate", "generate", list(requests), call, self._own())
            )
        except KeyboardInterrupt:
            self._end_call(call)
            raise

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        n: int = 1,
        trainer_step: int = 0,
        prompt_uids: Sequence[str] | None = None,
        deadline_s: float | None = None,
    ) -> list[Completion]:
        """Return ``n`` completions of each prompt, prompt by prompt, with seeds that follow from the run's.

        Without ``prompt_uids`` a prompt is named by its ids; equal prompts of one call, or of calls that
        run at once, get further samples of the same name, never the same noise.
        """
        return self.generate(
            self.requests(
                prompts,
                params,
                n=n,
                trainer_step=trainer_step,
                prompt_uids=prompt_uids,
                deadline_s=deadline_s,
            )
        )

    def requests(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        n: int = 1,
        trainer_step: int = 0,
        prompt_uids: Sequence[str] | None = None,
        deadline_s: float | None = None,
    ) -> list[Request | Mapping[str, Any]]:
        """Return what ``sample`` sends: requests, or without ``prompt_uids`` items for the service to name.

        Only the service knows which samples of a prompt are alive in other calls. A prompt or name that is
        none goes out as it came, and the service's door refuses it alone. Raises a ``RequestError`` for what
        concerns them all.
        """
        chosen = sampling_params(params)
        if whole("n", n) < 1:
            raise RequestError(f"n must be >= 1, got {shown(n)}")
        step = count("trainer_step", trainer_step)
        if prompt_uids is None:
            shared = {
                "params": chosen,
                "trainer_step": step,
                "run_seed": self.run_seed,
                "deadline_s": deadline_s,
            }
            return [{"prompt_ids": _plain_ids(p), **shared} for p in prompts for _ in range(n)]
        names = items("prompt_uids", prompt_uids)
        if len(names) != len(prompts):
            raise RequestError(f"prompt_uids has {len(names)} names for {len(prompts)} prompts")
        send = partial(Request, params=chosen, deadline_s=deadline_s)
        taken: dict[str, int] = {}
        requests: list[Request | Mapping[str, Any]] = []
        for name, prompt in zip(names, prompts, strict=True):
            try:
                ids, uid = token_ids("prompt_ids", prompt), prompt_uid(name)
            except RequestError:
                uid = cast(str, name)
                requests += [
                    send(prompt_uid=uid, sample_index=i, prompt_ids=cast(Any, prompt), seed=0)
                    for i in range(n)
                ]
                continue
            first = taken.get(uid, 0)
            taken[uid] = first + n
            for index in range(first, first + n):
                seed = sample_seed(
                    run_seed=self.run_seed, trainer_step=step, prompt_uid=uid, sample_index=index
                )
                requests.append(send(prompt_uid=uid, sample_index=index, prompt_ids=ids, seed=seed))
        return requests

    def stream(self, requests: Sequence[Request | Mapping[str, Any]]) -> Iterator[Emission | Completion]:
        """Yield tokens as they are committed, and each request's completion once, after its last token.

        Closing the iterator early, or an interrupt, aborts what has not ended: it can be asked for again at
        once.
        """
        call = uuid.uuid4().hex
        method = self._service.generate_stream.options(concurrency_group="generate", num_returns="streaming")
        references = method.remote(list(requests), call, self._own())
        try:
            for reference in references:
                yield from _get(reference)
        except (GeneratorExit, KeyboardInterrupt):
            ray.cancel(references)
            self._end_call(call)
            raise
        except RayActorError as error:
            raise ServiceGoneError(_GONE) from error

    # ---- weights ----------------------------------------------------------------------------------

    def update_weights(
        self, state_dict: Mapping[str, Tensor], version: int, *, in_flight: InFlight = "drain"
    ) -> int:
        """Switch all hosts to ``state_dict`` as ``version``, whole or not at all; return the live version.

        The weights are put into the object store once, whatever the number of hosts. Raises
        ``WeightUpdateError``, naming every tensor at fault.
        """
        announced = manifest(state_dict, version)
        reference = ray.put(pack(state_dict))
        # In a list: the service passes the reference on and must not fetch the weights itself.
        return cast(int, self._control("update_weights", announced, [reference], in_flight))

    # ---- control ----------------------------------------------------------------------------------

    def abort(self, keys: Sequence[Key] | None = None, reason: str = "aborted by the caller") -> int:
        """End requests now (None: all), with what they have; return how many were alive. Idempotent."""
        return cast(int, self._control("abort", keys, reason))

    def pause(self) -> None:
        """Stop all rounds at their boundaries; requests keep what they have."""
        self._control("pause")

    def resume(self) -> None:
        """Undo ``pause``."""
        self._control("resume")

    def sleep(self) -> None:
        """Free the KV memory of idle hosts. Raises ``UnsupportedError``."""
        self._control("sleep")

    def wake(self) -> None:
        """Undo ``sleep``."""
        self._control("wake")

    def stats(self) -> dict[str, float]:
        """Return loggable numbers."""
        return cast(dict[str, float], self._control("stats"))

    def health(self) -> ServiceHealth:
        """Return who serves."""
        return cast(ServiceHealth, self._control("health"))

    def take_records(self) -> list[RoundRecord]:
        """Return the rounds run since the last call, in the order they ran on each host."""
        return cast(list[RoundRecord], self._control("take_records"))

    def close(self) -> None:
        """End the service if this client started it; otherwise only let go of it."""
        if not self._owner:
            return
        try:
            self._control("close")
        except RolloutError as error:
            log.warning("the service was not there to be closed: %s", error)
        ray.kill(self._service)

    def __enter__(self) -> "RolloutClient":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_caller": None}  # it stands for this process

    def _end_call(self, call: str) -> None:
        """Return once nothing of a call is alive. Cancelling it in Ray only asks for that, at some time."""
        if not ray.is_initialized():
            return  # the interpreter ends; the service notices that by itself
        with suppress(RolloutError):  # a service that is gone has nothing alive either
            self._control("end_call", call)

    def _own(self) -> CallerRef:
        """Return what tells the service, by its end, that this process is gone."""
        if self._caller is None:
            self._caller = [self._service.hold.options(concurrency_group="hold").remote()]
        return self._caller

    def _control(self, method: str, *args: object) -> Any:
        return self._call("control", method, *args)

    def _call(self, group: str, method: str, *args: object) -> Any:
        return _get(getattr(self._service, method).options(concurrency_group=group).remote(*args))


def _get(reference: Any) -> Any:
    try:
        return ray.get(reference)
    except KeyboardInterrupt:
        ray.cancel(reference)  # an interrupted caller leaves nothing running behind
        raise
    except RayTaskError as error:
        raise plain_error(error) from None
    except RayActorError as error:
        raise ServiceGoneError(_GONE) from error


def _plain_ids(prompt: Any) -> Any:
    """Return a prompt as plain integers, or as it came when it is none."""
    try:
        return token_ids("prompt_ids", prompt)
    except RequestError:
        return prompt

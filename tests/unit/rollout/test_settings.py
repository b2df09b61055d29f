"""Settings are loaded by full path: what does not fit is refused, and the message says what would."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from controller.config import ControllerConfig
from drafters.config import DrafterConfig
from rollout.config import EngineConfig, PolicyConfig, ServiceConfig, TrackerConfig
from rollout.errors import ConfigError
from rollout.job_config import (
    BenchConfig,
    CalibrateConfig,
    EvaluateConfig,
    JobConfig,
    ReportConfig,
    VerifyConfig,
)
from rollout.jobs.compose import compose_plain
from rollout.jobs.door import check_trainer
from rollout.settings import load_config, to_plain
from trainers_bridge.config import TaskConfig, TrainerConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    mode: Literal["a", "b"] = "a"
    limit: int | None = None
    share: float = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    name: str
    inner: Inner = field(default_factory=Inner)
    ladder: tuple[int, ...] = (1, 2)
    pair: tuple[str, int] = ("x", 1)
    bias: Mapping[int, float] = field(default_factory=dict)
    anything: Mapping[str, Any] = field(default_factory=dict)
    rows: int | Literal["auto"] = "auto"
    flag: bool = False
    folder: Path | None = None

    def __post_init__(self) -> None:
        if not self.ladder:
            raise ValueError("ladder must not be empty")


def test_every_supported_type_loads_from_plain_data() -> None:
    loaded = load_config(
        {
            "name": "n",
            "inner": {"mode": "b", "limit": 3, "share": 1},
            "ladder": [4, 5],
            "pair": ["y", 2],
            "bias": {7: 1},
            "anything": {"deep": {"er": [1]}},
            "rows": 9,
            "flag": True,
            "folder": "here",
        },
        Outer,
    )
    assert loaded == Outer(
        name="n",
        inner=Inner(mode="b", limit=3, share=1.0),
        ladder=(4, 5),
        pair=("y", 2),
        bias={7: 1.0},
        anything={"deep": {"er": [1]}},
        rows=9,
        flag=True,
        folder=Path("here"),
    )
    assert isinstance(loaded.inner.share, float)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"name": "n", "inner": {"mod": "a"}},
            "job.inner.mod: unknown setting; known here: mode, limit, share",
        ),
        ({"name": "n", "inner": {"mod": "a"}}, "did you mean job.inner.mode?"),
        ({"name": "n", "inner": {"mode": "c"}}, "job.inner.mode: expected one of 'a', 'b', got 'c'"),
        ({"name": "n", "inner": {"limit": "3"}}, "job.inner.limit: expected a whole number, got '3'"),
        ({"name": "n", "inner": {"limit": True}}, "job.inner.limit: expected a whole number, got True"),
        ({"name": "n", "inner": {"share": "x"}}, "job.inner.share: expected a number, got 'x'"),
        ({"name": "n", "inner": 3}, "job.inner: expected settings by name, got 3"),
        ({"name": "n", "ladder": 3}, "job.ladder: expected a list, got 3"),
        ({"name": "n", "ladder": "12"}, "job.ladder: expected a list, got '12'"),
        ({"name": "n", "ladder": [1, "b"]}, "job.ladder[1]: expected a whole number, got 'b'"),
        ({"name": "n", "pair": ["x"]}, "job.pair: expected 2 values, got 1"),
        ({"name": "n", "bias": {"a": 1.0}}, "job.bias (name 'a'): expected a whole number"),
        ({"name": "n", "rows": "many"}, "job.rows: expected a whole number or 'auto', got 'many'"),
        ({"name": "n", "flag": 1}, "job.flag: expected true or false, got 1"),
        ({"name": 123}, "job.name: expected a string, got 123; quote it"),
        ({"name": "n", "ladder": []}, "job: ladder must not be empty"),
        ({}, "job.name: no value given"),
    ],
)
def test_a_wrong_value_is_refused_by_its_full_path(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(values, Outer, path="job")
    assert message in str(refused.value)


def test_a_message_that_names_its_path_is_not_prefixed_twice() -> None:
    with pytest.raises(ConfigError, match=r"^engine\.max_batch must be >= 1, got 0$"):
        load_config({"max_batch": 0}, EngineConfig, path="engine")


SECTIONS: dict[str, type] = {
    "policy": PolicyConfig,
    "engine": EngineConfig,
    "service": ServiceConfig,
    "tracker": TrackerConfig,
    "drafter": DrafterConfig,
    "controller": ControllerConfig,
    "calibrate": CalibrateConfig,
    "verify": VerifyConfig,
    "bench": BenchConfig,
    "evaluate": EvaluateConfig,
    "report": ReportConfig,
    "task": TaskConfig,
    "trainer": TrainerConfig,
}


def test_every_section_of_a_job_is_among_those_tried() -> None:
    assert {f.name for f in fields(JobConfig)} - {"seed", "output_dir", "run_id"} == set(SECTIONS)


@pytest.mark.parametrize("section", SECTIONS)
def test_no_number_of_any_settings_may_be_nan_endless_negative_or_a_truth_value(section: str) -> None:
    """Also where a dataclass is made directly, past the loader that checks types."""
    for f in fields(SECTIONS[section]):
        kinds = {f.type, *get_args(f.type)}
        wrong: list[Any] = []
        if kinds & {int, float}:
            whole = float not in kinds and f.type != tuple[int, ...]
            wrong = [math.nan, math.inf, -math.inf, -1, True, "1", *([1.5] if whole else [])]
        for value in wrong:
            odd = (value,) if f.type == tuple[int, ...] else value
            with pytest.raises((ConfigError, ValueError), match=rf"\b{section}\.{f.name}\b"):
                SECTIONS[section](**{f.name: odd})


@pytest.mark.parametrize("section", [*SECTIONS])
def test_no_choice_or_switch_of_any_settings_is_anything_else(section: str) -> None:
    for f in fields(SECTIONS[section]):
        if f.type is bool or get_origin(f.type) is Literal:
            with pytest.raises((ConfigError, ValueError), match=rf"^{section}\.{f.name}\b"):
                SECTIONS[section](**{f.name: "nonsense"})


@pytest.fixture(scope="module")
def composed() -> DictConfig:
    """The settings of ``taildraft run``, composed once: that takes far longer than all checks of them."""
    return OmegaConf.create(compose_plain("run", []))


@pytest.mark.parametrize(
    "override",
    [
        *("service.object_store_bytes=1", "service.host_gpus=1.5", "service.name=''", "service.host_cpus=-1"),
        *(
            "policy.source=''",
            "engine.device=''",
            "engine.kv_bytes=1",
            "service.flush_s=nan",
            "bench.gamma=0",
        ),
        *("drafter.names=[w4,w4]", "drafter.failure_limit=0", "tracker.project=''", "verify.limit_s=0"),
        *("trainer.learning_rate=0", "trainer.num_generations=1", "task.prompts=0", "seed=-1"),
        *("verify.hosts=[0]", "bench.trace_sigma=nan", "bench.max_minutes=inf"),
    ],
)
def test_a_setting_that_means_nothing_is_refused_by_its_full_path(
    override: str, composed: DictConfig
) -> None:
    parsed = OverridesParser.create().parse_override(override)
    node = composed.copy()
    OmegaConf.update(node, parsed.key_or_group, parsed.value())
    with pytest.raises(ConfigError) as refused:
        check_trainer(load_config(node, JobConfig))
    assert str(refused.value).startswith(override.partition("=")[0])


def test_an_omegaconf_node_is_resolved_before_it_is_checked() -> None:
    node = OmegaConf.create({"name": "${inner.mode}", "inner": {"mode": "b"}})
    assert load_config(node, Outer).name == "b"  # type: ignore[arg-type]
    broken = OmegaConf.create({"name": "${nowhere}"})
    with pytest.raises(ConfigError, match="name"):
        load_config(broken, Outer)  # type: ignore[arg-type]


@pytest.mark.parametrize("cls", [PolicyConfig, EngineConfig, ServiceConfig, TrackerConfig, DrafterConfig])
def test_settings_survive_the_way_to_plain_data_and_back(cls: type) -> None:
    assert load_config(to_plain(cls()), cls) == cls()


def test_an_unsupported_type_is_our_fault_not_the_callers() -> None:
    @dataclass(frozen=True)
    class Odd:
        when: complex = 1j

    with pytest.raises(TypeError, match="when"):
        load_config({"when": 2}, Odd)

from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from controller.config import KINDS, ControllerConfig

CONF = Path(__file__).parents[3] / "conf" / "controller"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_yaml_that_only_picks_known_settings(kind: str) -> None:
    told = yaml.safe_load((CONF / f"{kind}.yaml").read_text())
    # The ladder's also says how long drafts must be offered.
    assert set(told) <= {"controller", "drafter"} or "controller" not in told
    config = ControllerConfig(**told.get("controller", told))
    assert config.kind == kind


def test_no_yaml_is_without_a_kind() -> None:
    assert sorted(p.stem for p in CONF.glob("*.yaml")) == sorted(KINDS)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("kind", "magic"),
        ("drafter", ""),
        ("drafter", "ar"),
        ("gamma", 0),
        ("gamma", 2.5),
        ("gamma", True),
        ("gamma", "4"),
        ("gammas", ()),
        ("gammas", (2, 1)),
        ("gammas", (0, 1)),
        ("gammas", (1.5, 2)),
        ("ladder_gammas", (5, 5)),
        ("ladder_raise_frac", 0.5),
        ("ladder_patience_rollouts", 0),
        ("threshold_batch", 0),
        ("margin_frac", float("nan")),
        ("margin_frac", -0.1),
        ("hysteresis_frac", 0.5),
        ("tail_weight", 1.5),
        ("probe_interval_rounds", 0),
        ("explore_budget_frac", 1.1),
        ("think_budget_frac", 0.0),
        ("prior_acceptance", 1.0),
        ("prior_tokens", 0.0),
        ("cost_quantile", 0.0),
        ("cost_window_rounds", 0),
        ("version_discount", -0.1),
        ("watchdog_cooldown_s", float("inf")),
    ],
)
def test_a_wrong_value_is_refused_by_its_full_path(setting: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"controller.{setting}"):
        ControllerConfig(**{setting: value})  # type: ignore[arg-type]


def test_a_config_survives_plain_data() -> None:
    config = ControllerConfig(gammas=(1, 2, 4), margin_frac=0.05)
    data = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(config).items()}
    assert ControllerConfig(**data) == config

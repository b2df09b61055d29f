"""A policy folder that is damaged or says what cannot be: one line that names the file or the setting."""

import json
import shutil
from pathlib import Path

import pytest

from rollout.config import PolicyConfig
from rollout.errors import ConfigError, UnsupportedError
from rollout.policy.source import load_policy
from rollout.testing import save_tiny_folder


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("sound")
    save_tiny_folder(path, "ouro")
    return path


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    copied = tmp_path / "policy"
    shutil.copytree(sound, copied)
    return copied


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors"]
)
@pytest.mark.parametrize("content", [b"", b"{", b"[]"], ids=["empty", "cut off", "a list"])
def test_a_file_that_cannot_be_read_is_named(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(
        ConfigError, match=rf"^policy\.source: .*{name} cannot be read \(.*; mend it or copy it anew$"
    ):
        load_policy(PolicyConfig(source=str(folder)))


def test_weights_that_were_half_copied_are_named(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        load_policy(PolicyConfig(source=str(folder)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vocab_size", 0),
        ("hidden_size", 0),
        ("intermediate_size", -1),
        ("num_hidden_layers", 0),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 0),
        ("max_position_embeddings", -5),
        ("rms_norm_eps", -1.0),
        ("total_ut_steps", 0),
        ("total_ut_steps", 100_000),
        ("num_hidden_layers", 10**9),
        ("early_exit_threshold", "x"),
    ],
)
def test_a_size_that_is_none_is_refused_by_name(folder: Path, name: str, value: object) -> None:
    _set(folder, **{name: value})
    with pytest.raises(UnsupportedError, match=rf"ouro config: .*{name}={value!r}"):
        load_policy(PolicyConfig(source=str(folder)))


def test_a_rotation_of_no_base_is_refused(folder: Path) -> None:
    _set(folder, rope_parameters={"rope_type": "default", "rope_theta": 0})
    with pytest.raises(UnsupportedError, match=r"rope_theta=0 is no number above 0"):
        load_policy(PolicyConfig(source=str(folder)))


def test_planes_of_more_layers_than_there_are_weights_for_are_refused(folder: Path) -> None:
    _set(folder, num_hidden_layers=3)
    with pytest.raises(UnsupportedError, match=r"model\.layers\.2\.self_attn\.q_proj\.weight is missing"):
        load_policy(PolicyConfig(source=str(folder)))


def _set(folder: Path, **settings: object) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **settings}))

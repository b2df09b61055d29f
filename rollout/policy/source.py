"""A policy out of its folder: a Hugging Face config, safetensors and (where there is one) a tokenizer.

What is read is checked against what the engine computes before anything runs.
"""

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollout.config import PolicyConfig
from rollout.errors import ConfigError, UnsupportedError
from rollout.policy.families import check_family, eos_ids_of, load_spec
from rollout.policy.offgrid import offgrid
from rollout.policy.place import resolve, weight_files
from rollout.policy.spec import ModelSpec
from rollout.policy.stored import SelectedTensors, StoredTensors
from rollout.policy.weights import EMBEDDING, HEAD, checksum, expected_tensors, is_finite

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """A policy as loaded from a folder."""

    spec: ModelSpec
    config: "PretrainedConfig"
    tokenizer: "PreTrainedTokenizerBase | None"
    """None where the folder has none: then there are no texts and no stop strings."""

    state: Mapping[str, Tensor]
    """By Hugging Face name, on the CPU, complete and finite; a tied policy has no ``lm_head.weight``.

    A tensor is read from its file whenever it is asked for, unless the policy was moved off its grid."""

    eos_ids: tuple[int, ...]
    """As in ``spec``: of the generation config, else of the config."""

    checksum: str
    """Of ``state``; two hosts with the same one serve the same weights."""

    folder: Path


def load_policy(config: PolicyConfig, *, dtype: torch.dtype = torch.bfloat16) -> Policy:
    """Return the policy with its weights in ``dtype``.

    Raises ``ConfigError`` where the source cannot be read and ``UnsupportedError`` where the engine
    cannot compute what it holds.
    """
    started = time.monotonic()
    folder = resolve(config)
    hf_config = read_config(folder)
    spec = load_spec(hf_config)
    spec = replace(spec, eos_ids=_generation_eos(folder) or spec.eos_ids)
    state = _read_state(folder, spec, dtype)
    if config.offgrid:
        state = offgrid(state, seed=config.offgrid_seed)
    policy = Policy(
        spec=spec,
        config=hf_config,
        tokenizer=_read_tokenizer(folder, hf_config, spec),
        state=state,
        eos_ids=spec.eos_ids,
        checksum=checksum(state),
        folder=folder,
    )
    log.info(
        "policy: %s, %s with %d layers%s, %s%s, weights %s (%.1f s)",
        config.source,
        spec.family,
        spec.layers,
        f" run {spec.loops} times" if spec.loops > 1 else "",
        str(dtype).removeprefix("torch."),
        f", off-grid with seed {config.offgrid_seed}" if config.offgrid else "",
        policy.checksum[:12],
        time.monotonic() - started,
    )
    return policy


def read_config(folder: Path) -> "PretrainedConfig":
    """Return a folder's config, also of families that transformers knows only as remote code."""
    from transformers import AutoConfig, PretrainedConfig

    with _reading(folder / "config.json"):
        settings, _ = PretrainedConfig.get_config_dict(folder)
        family = settings.get("model_type")
    check_family(family)
    with _reading(folder / "config.json"):
        if family == "ouro":
            from rollout.policy.ouro_config import OuroConfig

            return OuroConfig.from_pretrained(folder)
        return AutoConfig.from_pretrained(folder)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn whatever a library raises over a damaged file into a ``ConfigError`` that names the file."""
    try:
        yield
    except Exception as error:
        what = " ".join(str(error).split()) or "no reason given"
        raise ConfigError(
            f"policy.source: {path} cannot be read ({type(error).__name__}: {what[:200]}); "
            "mend it or copy it anew"
        ) from error


def _generation_eos(folder: Path) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    if not path.is_file():
        return ()
    with _reading(path):
        return eos_ids_of(json.loads(path.read_text()).get("eos_token_id"))


def _read_tokenizer(
    folder: Path, config: "PretrainedConfig", spec: ModelSpec
) -> "PreTrainedTokenizerBase | None":
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        log.warning("policy: %s has no tokenizer; completions will have no text", folder)
        return None
    # With the config, so that no folder makes transformers look for remote code.
    with _reading(folder / "tokenizer.json"):
        tokenizer = AutoTokenizer.from_pretrained(folder, config=config)
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in spec.eos_ids:
        log.warning(
            "policy: the tokenizer's end %r (%d) is not among the ids generation ends at: %s",
            tokenizer.eos_token,
            tokenizer.eos_token_id,
            spec.eos_ids,
        )
    return tokenizer


def _stored(folder: Path) -> StoredTensors:
    files = weight_files(folder)
    for file in files:
        with _reading(file):  # each alone, so that the right one is named
            StoredTensors([file])
    return StoredTensors(files)


def _read_state(folder: Path, spec: ModelSpec, dtype: torch.dtype) -> Mapping[str, Tensor]:
    """Check all weights; what is missing, unknown, mis-shaped or not finite is refused by name."""
    stored = _stored(folder)
    expected = expected_tensors(spec)
    problems = [f"{name} is missing" for name in expected if name not in stored]
    narrowed = 0
    for name, tensor in stored.items():
        narrowed += tensor.dtype.itemsize > dtype.itemsize
        if name == HEAD and spec.tie_embeddings:
            if not torch.equal(tensor, stored.get(EMBEDDING, tensor)):
                problems.append(f"{HEAD} differs from {EMBEDDING} in a policy that ties them")
        elif name.endswith("rotary_emb.inv_freq"):
            # Old checkpoints saved this table; it follows from the config.
            continue
        elif name not in expected:
            problems.append(f"{name} is not a tensor of this policy")
        elif tuple(tensor.shape) != expected[name]:
            problems.append(f"{name} has shape {tuple(tensor.shape)}, expected {expected[name]}")
        elif not is_finite(tensor.to(dtype)):
            problems.append(f"{name} holds NaN or infinity")
    if problems:
        raise UnsupportedError(f"{folder}: {'; '.join(problems)}")
    if narrowed:
        log.info("policy: %d tensors rounded to %s", narrowed, str(dtype).removeprefix("torch."))
    return SelectedTensors(stored, list(expected), dtype)

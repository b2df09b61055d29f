"""What tells processors apart, read off texts that Linux gives, and what kernels are built with."""

import re
from pathlib import Path

import pytest

import drafters.int4
import drafters.kernels
import rollout.engine.native.compiled_forward.kernels as forward_kernels
from drafters.kernels import processor as module
from drafters.kernels.build import INSTRUCTION_SETS, instruction_sets
from drafters.kernels.processor import cache_bytes, processor_of
from rollout.engine.native.compiled_forward.kernels import abi

ZEN1 = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 23
model\t\t: 1
model name\t: AMD EPYC
stepping\t: 2
flags\t\t: fma avx2 sse2

processor\t: 1
model name\t: another
"""


def test_an_x86_processor_is_its_first_ones_name_and_numbers() -> None:
    found = processor_of(ZEN1)
    assert (found.name, found.family, found.model, found.stepping) == ("AMD EPYC", 23, 1, 2)
    assert found.features == ("avx2", "fma", "sse2")
    assert found.words == "AMD EPYC, family 23 model 1"


def test_an_arm_processor_is_told_by_its_implementer_and_part() -> None:
    text = "processor : 0\nFeatures : fp asimd\nCPU implementer : 0x41\nCPU part : 0xd0c\nCPU revision : 1\n"
    found = processor_of(text)
    assert (found.family, found.model, found.stepping) == (0x41, 0xD0C, 1)
    assert found.features == ("asimd", "fp")
    assert found.words.endswith(", family 65 model 3340")


def test_what_is_not_told_is_none_and_left_out_of_words() -> None:
    found = processor_of("model name : some\nstepping : unknown\n")
    assert (found.family, found.model, found.stepping, found.features) == (None, None, None, ())
    assert found.words == "some"
    assert processor_of("").name


def test_two_generations_of_one_name_and_the_same_features_differ() -> None:
    zen3 = ZEN1.replace("family\t: 23", "family\t: 25")
    assert processor_of(ZEN1).identity != processor_of(zen3).identity
    assert (
        processor_of(ZEN1).identity != processor_of(ZEN1.replace("stepping\t: 2", "stepping\t: 1")).identity
    )
    assert processor_of(ZEN1).identity == processor_of(ZEN1).identity


def test_cache_sizes_are_those_of_caches_for_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = [("Data", "1", "32K"), ("Instruction", "1", "64K"), ("Unified", "3", "8M"), ("Unified", "4", "?")]
    for number, values in enumerate(told):
        index = tmp_path / f"index{number}"
        index.mkdir()
        for name, value in zip(("type", "level", "size"), values, strict=True):
            (index / name).write_text(f"{value}\n")
    (tmp_path / "index9").mkdir()
    monkeypatch.setattr(module, "_CACHES", tmp_path)
    assert cache_bytes() == {1: 32 << 10, 3: 8 << 20}
    monkeypatch.setattr(module, "_CACHES", tmp_path / "none")
    assert cache_bytes() == {}


def test_every_instruction_set_that_a_kernel_asks_for_is_known() -> None:
    folders = [Path(str(m.__file__)).parent for m in (drafters.int4, drafters.kernels, forward_kernels)]
    sources = [p for folder in folders for p in folder.iterdir() if p.suffix in (".cpp", ".h")]
    asked = {name for p in sources for name in re.findall(r"__((?:AVX|FMA|AMX|ARM)\w*?)__", p.read_text())}
    assert {name.lower() for name in asked} == set(INSTRUCTION_SETS)


@pytest.mark.skipif(abi.unavailable() is not None, reason=str(abi.unavailable()))
def test_the_sets_that_are_told_are_those_of_the_built_kernels() -> None:
    sets = set(instruction_sets())
    expected = "avx512" if "avx512f" in sets else "avx2" if {"avx2", "fma"} <= sets else "generic"
    assert abi.library().taildraft_isa().decode() == expected

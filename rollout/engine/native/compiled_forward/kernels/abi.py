"""The C interface of ``forward.cpp``: its structs field by field, and the library that speaks it."""

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path

import drafters.int4
from drafters.kernels.build import KernelBuildError, load
from rollout.engine import chooser_call

SOURCE = Path(__file__).parent / "forward.cpp"

STATUS = {
    1: "a token id lies outside the vocabulary",
    2: "a position lies outside the rotary tables",
    3: "a row names a page table or a page that does not exist",
    4: "a head row lies outside the batch",
    5: "out of memory",
    6: "the process was forked after the decoder was made: its threads stayed behind",
    7: "a loop lies outside those of the policy",
    8: "layers lie outside those of the policy, are some of several loops, or lack the head's last one",
}
"""What a status other than 0 means; ``Status`` in ``abi.h``."""


CALLER_STATUS = frozenset({1, 2, 3, 4, 7, 8})
"""Those that a wrong batch causes."""


WORK = ("passes", "head_rows")
"""``forward::Work``, in its order; rows by loop come after these."""


PHASES = ("linears", "attention", "head", "rest")
"""``phases::Phase``, in its order."""


class LinearStruct(ctypes.Structure):
    """``forward::Linear``."""

    _fields_ = [
        ("bits", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("data", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
    ]


class LayerStruct(ctypes.Structure):
    """``forward::Layer``."""

    _fields_ = [
        ("qkv", LinearStruct),
        ("o", LinearStruct),
        ("gate_up", LinearStruct),
        ("down", LinearStruct),
        ("input_norm", c_void_p),
        ("post_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("attention_out_norm", c_void_p),
        ("mlp_out_norm", c_void_p),
    ]


class ModelStruct(ctypes.Structure):
    """``forward::Model``."""

    _fields_ = [
        ("vocab", c_int32),
        ("hidden", c_int32),
        ("layers", c_int32),
        ("query_heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("max_positions", c_int32),
        ("window", c_int32),
        ("loops", c_int32),
        ("recurrent_norm", c_int32),
        ("tied_panels", c_int32),
        ("eps", c_float),
        ("embedding", c_void_p),
        ("cosine", c_void_p),
        ("sine", c_void_p),
        ("final_norm", c_void_p),
        ("layer", POINTER(LayerStruct)),
        ("head", LinearStruct),
        ("screen", LinearStruct),
        ("work", c_void_p),
    ]


class CallStruct(ctypes.Structure):
    """``forward::Call``."""

    _fields_ = [
        ("rows", c_int32),
        ("head_rows", c_int32),
        ("tables", c_int32),
        ("table_pages", c_int32),
        ("loop_begin", c_int32),
        ("loop_end", c_int32),
        ("layer_begin", c_int32),
        ("layer_end", c_int32),
        ("screened", c_int32),
        ("heads_only", c_int32),
        ("row_loop", c_void_p),
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("table", c_void_p),
        ("page_table", c_void_p),
        ("head_index", c_void_p),
        ("kv", c_void_p),
        ("kv_pages", c_int64),
        ("hidden", c_void_p),
        ("logits", c_void_p),
        ("layer_taps", POINTER(c_void_p)),
        ("loop_taps", POINTER(c_void_p)),
        ("embed_tap", c_void_p),
        ("final_tap", c_void_p),
        ("phase_s", c_void_p),
    ]


class ChoosingStruct(ctypes.Structure):
    """``choosing::Call``."""

    _fields_ = [
        ("forward", CallStruct),
        ("choose", chooser_call.CallStruct),
        ("port", chooser_call.PortStruct),
        ("depths", c_void_p),
        ("numbers", c_void_p),
        ("states", c_void_p),
        ("plain", c_void_p),
        ("choose_s", c_double),
    ]


class PlainStruct(ctypes.Structure):
    """``plain::Columns``."""

    _fields_ = [
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("contexts", c_void_p),
        ("ends", c_void_p),
        ("held", c_void_p),
        ("stops", c_void_p),
        ("watched", c_void_p),
        ("over", c_void_p),
        ("stops_each", c_int32),
        ("overs", c_int32),
        ("full", c_int32),
    ]


class ChainStruct(ctypes.Structure):
    """``chain::Call``."""

    _fields_ = [
        ("forward", CallStruct),
        ("choose", chooser_call.CallStruct),
        ("port", chooser_call.PortStruct),
        ("gammas", c_void_p),
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("next", c_void_p),
        ("finite", c_void_p),
        ("phase_s", c_void_p),
        ("choose_s", c_double),
        ("shortlist", c_int32),
        ("keep_states", c_int32),
        ("forwards", c_int32),
        ("passes", c_int32),
    ]


def library(defines: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Return the built and typed library. ``defines`` chooses a back end. Raises ``KernelBuildError``."""
    loaded = load(SOURCE, (Path(drafters.int4.__file__).parent,), defines)
    signatures: dict[str, tuple[object, list[object]]] = {
        "taildraft_isa": (c_char_p, []),
        "taildraft_team_new": (c_void_p, [c_int]),
        "taildraft_team_free": (None, [c_void_p]),
        "taildraft_decoder_new": (c_void_p, [POINTER(ModelStruct), c_void_p]),
        "taildraft_decoder_free": (None, [c_void_p]),
        "taildraft_forward": (c_int, [c_void_p, POINTER(CallStruct)]),
        "taildraft_forward_from": (c_int, [c_void_p, POINTER(CallStruct), c_void_p, c_void_p, c_void_p]),
        "taildraft_forward_choosing": (c_int, [c_void_p, POINTER(ChoosingStruct)]),
        "taildraft_chain": (c_int, [c_void_p, POINTER(ChainStruct)]),
        "taildraft_lanes": (c_int, [c_void_p, c_void_p]),
        "taildraft_pack": (c_int, [c_void_p, c_void_p, c_int, c_int, c_void_p, c_int, c_int]),
        "taildraft_advise": (None, [c_void_p, c_size_t]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def check(status: int) -> None:
    """Raise ``ValueError`` for what a wrong batch causes, ``RuntimeError`` for any other failure."""
    if status in CALLER_STATUS:
        raise ValueError(STATUS[status])
    if status:
        raise RuntimeError(STATUS[status])


def unavailable() -> str | None:
    """Return why the kernels cannot be built here, or None when they can (and now are)."""
    try:
        library()
    except KernelBuildError as error:
        return str(error)
    except OSError as error:
        return f"the built kernels do not load: {error}"
    return None

"""The shape of a decoder: all an engine needs to know of a model's config, and nothing of its weights."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """One dense decoder of the Llama family, or one looped block of it."""

    family: str
    """``llama``, ``qwen2``, ``qwen3``, ``mistral`` or ``ouro``."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    tie_embeddings: bool
    eos_ids: tuple[int, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm per head on queries and keys (Qwen3)."""

    sliding_window: int | None = None
    """A row at position p reads keys p - sliding_window + 1 to p, its own included; None: 0 to p."""

    loops: int = 1
    """Passes of the shared block; 1 for an ordinary decoder."""

    sandwich_norms: bool = False
    """A second norm on what attention and the MLP return, before it joins the residual stream (Ouro)."""

    recurrent_norm: bool = False
    """The final norm closes every loop: its output is what the next loop, the gate and the head read (Ouro).
    False: it stands before the head alone."""

    exit_gate: bool = False
    """A linear of one output and a bias on the state after each loop (Ouro). It is reported, never obeyed:
    every token runs all loops."""

    @property
    def planes(self) -> int:
        """KV planes: one per (loop, layer), ``loop * layers + layer``."""
        return self.loops * self.layers

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.query_heads // self.kv_heads

    @property
    def qkv_features(self) -> int:
        """Out features of the fused query, key and value linear."""
        return (self.query_heads + 2 * self.kv_heads) * self.head_dim

    @property
    def body_linear_params(self) -> int:
        """Weights of all body linears of one loop."""
        attention = self.qkv_features + self.query_heads * self.head_dim
        return self.layers * self.hidden_size * (attention + 3 * self.intermediate_size)

    @property
    def head_params(self) -> int:
        """Weights of the head."""
        return self.vocab_size * self.hidden_size

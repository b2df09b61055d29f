"""The config of published Ouro folders, for a transformers that does not know the family.

Published folders bring remote code for an older transformers; their ``config.json`` alone is read here.
What of it is computed, and what is refused, is decided in ``families.py``.
"""

from typing import Any, ClassVar

from transformers import PretrainedConfig

MODEL_TYPE = "ouro"


class OuroConfig(PretrainedConfig):  # type: ignore[misc]
    """Fields and defaults as published with Ouro-1.4B; others of a file are kept as attributes."""

    model_type = MODEL_TYPE
    auto_map: ClassVar[dict[str, str]] = {}
    """Trainers that load a second copy ask every config they do not know for it. No field: never written."""

    vocab_size: int = 49152
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 65536
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = None
    default_theta = 1_000_000.0
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 0
    pad_token_id: int | None = None
    total_ut_steps: int = 4
    """Passes of the shared block."""

    early_exit_threshold: float | None = 1.0
    """Summed exit probability at which a token leaves; from 1 on all tokens run all passes."""

    early_exit_step: int | None = None
    """A pass after which all tokens leave."""

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)

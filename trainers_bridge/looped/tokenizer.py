"""One token per printable ASCII character: small enough for a tiny head, and no text of ours is unknown."""

import string
from functools import cache
from typing import Any

END, PAD, UNKNOWN = "<end>", "<pad>", "<unk>"
END_ID, PAD_ID, UNKNOWN_ID = 0, 1, 2
"""0 ends a text, as in the published Ouro checkpoints."""

CHARACTERS = "\n" + " " + string.digits + string.ascii_letters + string.punctuation

VOCABULARY = 112
"""Ids of the policy: the least multiple of 16, a panel of the engine's kernels, that holds all characters."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% else %}{{ '\n' }}{% endif %}{% endfor %}"
)
"""A line per message; the reply follows the last one, and ends with the end token."""


def build_tokenizer(*, max_tokens: int) -> Any:
    """Return the fast tokenizer, with its chat template; a saved folder needs no code of ours to load."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [END, PAD, UNKNOWN, *CHARACTERS]
    names += [f"<unused{index}>" for index in range(VOCABULARY - len(names))]
    inner = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=UNKNOWN))
    # "Any character" written out: the plain dot would leave newlines joined to their neighbours.
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        model_max_length=max_tokens,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@cache
def _ids() -> dict[str, int]:
    return {character: UNKNOWN_ID + 1 + i for i, character in enumerate(CHARACTERS)}


def encode(text: str) -> list[int]:
    """Return a text's ids, as the tokenizer gives them, a hundred times sooner."""
    ids = _ids()
    return [ids.get(character, UNKNOWN_ID) for character in text]


def prompt_ids(question: str) -> list[int]:
    """Return what stands before the reply to ``question``: the chat template of its one message."""
    return encode(question + "\n")


def decode(token_ids: list[int]) -> str:
    """Return the text of ids, special and unused ones left out."""
    first = UNKNOWN_ID + 1
    return "".join(CHARACTERS[i - first] for i in token_ids if first <= i < first + len(CHARACTERS))

"""Names for prompts that come without one: by content, so that the same prompt has the same noise again."""

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b

from rollout.errors import RequestError
from rollout.fields import token_ids
from rollout.service.live import Key


def uid_of(prompt: Sequence[int]) -> str:
    """Return the name of a prompt that has no other: the same ids, the same name, in every step."""
    text = ",".join(str(int(token)) for token in prompt)
    return blake2b(text.encode(), digest_size=8).hexdigest()


class Namer:
    """Names the unnamed items of one call.

    Equal prompts become further samples of one name. A sample that is alive in another call is passed over:
    calls that run at once are all served, each with noise of its own. The same batch asked for again gets the
    same names, and so the same text, once the first has ended.
    """

    def __init__(self, alive: Callable[[Key], bool]) -> None:
        self._alive = alive
        self._next: dict[str, int] = {}

    def named(self, item: object) -> object:
        """Return the item with a name; as it came when it has one or its prompt is none."""
        if not isinstance(item, Mapping) or "prompt_uid" in item or "prompt_ids" not in item:
            return item
        try:
            ids = token_ids("prompt_ids", item["prompt_ids"])
        except RequestError:
            return item
        uid = uid_of(ids)
        sample = item["sample_index"] if "sample_index" in item else self._free_sample(uid)
        return {**item, "prompt_uid": uid, "sample_index": sample, "prompt_ids": ids}

    def _free_sample(self, uid: str) -> int:
        index = self._next.get(uid, 0)
        while self._alive((uid, index)):
            index += 1
        self._next[uid] = index + 1
        return index

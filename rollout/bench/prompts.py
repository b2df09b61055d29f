"""What the benchmark asks: thirty-two varied requests of our own, through the policy's chat template."""

from typing import TYPE_CHECKING

from rollout.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPTS = (
    "What is the capital of Norway, and what is it known for?",
    "Add 48 and 75, then divide the result by 3. Show each step.",
    "List seven things to pack for a rainy weekend in the hills.",
    "Write a Python function that returns the largest even number in a list.",
    "Tell a short story about a lighthouse keeper who finds a message in a bottle.",
    "Explain to a ten year old why the sky is blue during the day and red in the evening.",
    "My laptop gets hot and the fan is loud even when I only read mail. What should I check first?",
    "Rewrite this sentence in a polite tone: Send me the report now, you are already late.",
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey? Explain how you worked it out.",
    "Write a poem of eight lines about an old bicycle.",
    "What are the main differences between a frog and a toad?",
    "Give me a recipe for lentil soup for four people, with amounts and steps.",
    "Summarize in two sentences: The town built a new bridge last year. It cost more than planned, but "
    "traffic is lighter, shops by the river report more visitors, and the old bridge is only for walking.",
    "Write a SQL query for the ten customers who spent the most in 2023, from tables customers and orders.",
    "I have an interview for a job in a garden center tomorrow. Which questions should I expect?",
    "Translate into French: Where is the nearest pharmacy, and is it open on Sunday?",
    "Name five inventions from before 1800 and say in one line why each mattered.",
    "A rectangle is 3 cm longer than it is wide and has an area of 70 square cm. Find its sides.",
    "Continue this story: The door of the bakery was open at four in the morning, and nobody was inside.",
    "What is the difference between weather and climate? Give an example of each.",
    "Write an email to my landlord asking to repair the dripping kitchen tap, and suggest two dates.",
    "Explain what a hash table is, when it is slow, and how that can be avoided.",
    "Plan a one day trip to a city by the sea for two adults and a child who likes ships.",
    "Count from 1 to 40, but replace every multiple of four by the word clap.",
    "Is it better to learn the piano or the guitar first? Give reasons for both and then your opinion.",
    "Write the dialogue of a customer who wants to return shoes and a shop assistant who has to say no.",
    "Sort these words by the alphabet and say what each means: ember, anchor, quill, marrow, dune.",
    "How does a refrigerator make things cold? Describe the parts and what happens in each of them.",
    "Write a shell script that copies all text files newer than a week into a folder named recent.",
    "Give three arguments for and three against closing the center of a town to cars.",
    "Describe the life of a salmon from egg to its last journey, as if told by the river.",
    "Tom has twice as many marbles as Ann. Together they have 45, and Ben takes a third of Tom's. "
    "How many does Tom keep? Then make up a similar problem and solve it.",
)
"""Questions, arithmetic, lists, code, stories, letters: short and long answers, easy and hard to guess."""


def prompt_ids(tokenizer: "PreTrainedTokenizerBase | None", count: int) -> list[tuple[int, ...]]:
    """Return the ids of the first ``count`` prompts, ready for an answer. Raises ``ConfigError``."""
    if count > len(PROMPTS):
        raise ConfigError(f"bench: {count} sequences wanted, and there are {len(PROMPTS)} prompts")
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise ConfigError("bench: policy.source has no tokenizer with a chat template, and prompts need one")
    return [encoded(tokenizer, text) for text in PROMPTS[:count]]


def encoded(tokenizer: "PreTrainedTokenizerBase", text: str) -> tuple[int, ...]:
    """Return the ids of one question: through the chat template, where the tokenizer has one."""
    if not getattr(tokenizer, "chat_template", None):
        return tuple(tokenizer.encode(text))
    return tuple(
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
    )


def long_prompts(
    tokenizer: "PreTrainedTokenizerBase | None", count: int, tokens: int, *, vocab_size: int
) -> list[tuple[int, ...]]:
    """Return ``count`` prompts of exactly ``tokens`` ids, each another text from its first id on.

    They are the prompts of ``PROMPTS`` in turn, beginning at another one each. A shorter one is the beginning
    of a longer one of the same row, so that the pages of the one serve the other. Raises ``ConfigError``.
    """
    texts = prompt_ids(tokenizer, len(PROMPTS))
    prompts = []
    for row in range(count):
        ids = [row % vocab_size]  # no two rows may share a page: together they would read it once
        turn = row
        while len(ids) < tokens:
            ids.extend(texts[turn % len(texts)])
            turn += 1
        prompts.append(tuple(ids[:tokens]))
    return prompts

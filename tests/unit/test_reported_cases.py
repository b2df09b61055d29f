"""The failures users reported of other rollout systems, as what is claimed here; each is some test's claim.

A test that covers one names its id in its docstring, or in a comment beside its name.
"""

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
CASE = re.compile(r"\bA\d{1,2}\b")

CLAIMS = {
    "A1": "an end token inside a verified block ends the text there",
    "A2": "a stop string cuts ids, logprobs and text alike, streamed or not",
    "A3": "room for drafts never leaks into the limit a caller sees",
    "A4": "a bad item fails alone, at the door",
    "A5": "a draft is judged by the distribution it was really drawn from",
    "A6": "a rejected draft is replaced from the residual, and resuming from the target is caught",
    "A7": "exact numerics differ nowhere, fast ones at near ties only",
    "A8": "logits that are not finite end their request at once",
    "A9": "rules that count tokens count committed ones",
    "A10": "verification and plain decoding share one target distribution",
    "A11": "noise belongs to a sample, not to a batch row or a process",
    "A12": "every logprob is the target distribution's own",
    "A13": "a logprob says what it means, and a trainer gets the one it recomputes",
    "A14": "nothing drifts over a long uptime",
    "A15": "a drafter misses no key or value of the committed text",
    "A16": "no prompt page is matched before it is written",
    "A17": "no draft outlives its round",
    "A18": "nothing is drafted for a prompt that is partly computed",
    "A19": "a caller's name for a request is not the engine's",
    "A20": "an abort in any state gives everything back",
    "A21": "ids no policy row stands for are never drafted",
    "A22": "speculation is as good as ever after a spell without it",
    "A23": "what a controller learnt belongs to one engine and version",
    "A24": "caches do not cross policy versions",
    "A25": "an update is whole or refused",
    "A26": "a drafter is of the policy version it drafts for",
    "A27": "tied weights stay tied in every copy",
    "A28": "updates land between rounds, and each token names its version",
    "A29": "adapters and packed weights are refused rather than pushed",
    "A30": "updates move nothing in memory that others point to",
    "A31": "one endless sample delays nobody else",
    "A32": "control never waits for generation",
    "A33": "a restarted host serves nothing before the current weights",
    "A34": "one result per sample, however often it was sent",
    "A35": "no old weights stay alive",
    "A36": "exact ids are handed to a trainer, never text",
    "A37": "ragged tails of weights are rounded like the rest",
    "A38": "scales stay finite, or the drafter is off and says so",
    "A41": "a tap is the state after the layer and loop its name says, which must exist",
    "A43": "every launch has a folder and an identity of its own",
    "A44": "settings cross a process border as plain data",
    "A45": "quoting on the command line gives exactly the string",
    "A46": "no row is lost when a clock steps back",
    "A47": "one process owns a run, whatever is forked or killed",
    "A48": "every loop has keys and values of its own, computed in parts as at once",
}


@cache
def named_cases() -> dict[str, list[str]]:
    """Return the tests that name each id."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        if not CASE.search(source):
            continue
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            first = node.body[0]
            head = lines[node.lineno - 1 : first.lineno - 1] + (ast.get_docstring(node) or "").splitlines()
            for case in CASE.findall("\n".join(head)):
                found.setdefault(case, []).append(f"{path.relative_to(TESTS)}::{node.name}")
    return found


def test_every_reported_failure_is_some_tests_claim() -> None:
    named = named_cases()
    assert [f"{case}: {claim}" for case, claim in CLAIMS.items() if case not in named] == []


def test_no_test_names_a_case_without_a_claim() -> None:
    assert set(named_cases()) <= set(CLAIMS)

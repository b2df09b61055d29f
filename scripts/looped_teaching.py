"""Trains the looped policy on, with and without the loops' auxiliary loss, to see what drafting has of it.

    python scripts/looped_teaching.py --out looped_teaching.json

Some minutes on one core: 200 steps of supervised training on the exercises for each weight of the
distillation and each seed. The JSON tells, before and after, every depth's cross entropy on held-out replies,
its agreement with the full depth and what the engine keeps of its drafts.

Exit code 0: written; 2: refused, with the reason.
"""

import sys

from trainers_bridge.looped.teaching import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

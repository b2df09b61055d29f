"""Sets training runs of the looped policy side by side, in one JSON.

    taildraft run experiment=looped trainer.save_policy=true output_dir=ON
    taildraft run experiment=looped controller=ar output_dir=PLAIN
    python scripts/looped_grpo.py taught=ON plain=PLAIN --out looped_grpo.json

Rewards, acceptance of every drafter and agreement of the loops by step; held-out answers and acceptance by
depth, before and after; and in how many steps, from the start, the first run sampled the ids of each other.

Exit code 0: written; 2: refused, with the reason.
"""

import sys

from trainers_bridge.looped.grpo_record import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

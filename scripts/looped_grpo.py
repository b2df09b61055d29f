"""Sets training runs of the looped policy side by side, in one JSON.

    taildraft run experiment=looped trainer.save_policy=true output_dir=ON
    taildraft run experiment=looped controller=ar trainer.steps=12 output_dir=PLAIN
    python scripts/looped_grpo.py auto=ON plain=PLAIN --out looped_grpo.json

Of every run: commit, version, drafter and controller settings, rewards, acceptance of every drafter by step
and by policy version, agreement of the loops by step, and what the policy can do on held-out questions before
and after, depth by depth, greedily and in a sample each. And in how many steps, from the start, the first run
sampled the ids of each other.

Exit code 0: written; 2: refused, with the reason.
"""

import sys

from trainers_bridge.looped.grpo_record import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Trains the small looped policy that ships in ``policies/looped`` and writes its folder and record.

    python scripts/train_looped.py                       # the shipped settings, into policies/looped
    python scripts/train_looped.py --steps 60 --out DIR  # a short try, somewhere else

Two cores and the default settings take less than ten minutes on a CPU. A run that is stopped
(``--max-minutes``, Ctrl-C, a lost machine) goes on where it was when the same command is given again.
``training.json`` in the folder says what was run and what came out: cross entropy and accuracy by depth on
questions that were never trained on. Same settings, threads, torch build and machine: same weights.

Exit code 0: the folder is written and a deeper loop is better than a shallow one; 1: it is written and that
does not hold; 2: refused, with the reason; 3: stopped before the last step.
"""

import sys

from trainers_bridge.looped.making import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""One torch thread: tiny tensors gain nothing from two, and two threads on a busy machine lose a lot."""

import torch

torch.set_num_threads(1)

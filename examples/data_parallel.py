"""Run it with: python examples/data_parallel.py

A small network learns to guess the next letter of the help texts that come with Python, once on
one device and once on two with `ddpopt.DataParallel`. Both are the CPU here; with GPUs write
`DataParallel(model, ["cuda:0", "cuda:1"])`. It is the same training, up to rounding.
"""

import copy
from pydoc_data.topics import topics

import torch
from torch import nn

from ddpopt import DataParallel

CONTEXT = 8
NUM_STEPS = 60
BATCH = 256

TEXT = "\n".join(topics[name] for name in sorted(topics))[:50_000]
LETTERS = sorted(set(TEXT))


class NextLetter(nn.Module):
    """From the numbers of eight letters to a score for each letter that may follow."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(len(LETTERS), 16)
        self.hidden = nn.Linear(CONTEXT * 16, 128)
        self.scores = nn.Linear(128, len(LETTERS))

    def forward(self, letters):
        return self.scores(self.hidden(self.embedding(letters).flatten(1)).relu())


def batches():
    """Yield contexts and the letters that follow them, the same ones in each training."""
    numbers = torch.tensor([LETTERS.index(letter) for letter in TEXT])
    windows = numbers.unfold(0, CONTEXT + 1, 1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(NUM_STEPS):
        rows = windows[torch.randint(len(windows), (BATCH,), generator=generator)]
        yield rows[:, :CONTEXT], rows[:, CONTEXT]


def train(name, model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step, (letters, following) in enumerate(batches()):
        # The loss is computed from the joined outputs, outside of the replicas.
        loss = nn.functional.cross_entropy(model(letters), following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == NUM_STEPS - 1:
            print(f"{name}, step {step}: loss {loss.item():.4f}", flush=True)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


if __name__ == "__main__":
    torch.manual_seed(0)
    model = NextLetter()
    alone = train("one device", copy.deepcopy(model))
    parallel = train("two devices", DataParallel(model, ["cpu", "cpu"]))
    print(f"parameters differ by at most {(alone - parallel).abs().max():.1e}")

"""Run it with: python examples/minimal.py

The scenario of DistributedDataParallel's own documentation (a 10 x 10 linear layer, MSE, SGD,
batches of 20, two processes) plus one line: `torch.compile(ddp, backend="ddpopt")`.
"""

import gc

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

WORLD_SIZE = 2
NUM_STEPS = 5


class Toy(nn.Module):
    """A class of ours: Dynamo skips frames of torch.nn, so a bare nn.Linear would not compile."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(10, 10)

    def forward(self, inputs):
        return self.linear(inputs)


def train(rank):
    torch.manual_seed(rank)  # other weights and data on each rank: DDP has to make them agree

    ddp = DDP(Toy())
    compiled = torch.compile(ddp, backend="ddpopt")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    inputs, targets = torch.randn(20, 10), torch.randn(20, 10)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(compiled(inputs), targets)
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)

    weights = torch.cat([parameter.detach().flatten() for parameter in ddp.parameters()])
    everyone = [torch.empty_like(weights) for _ in range(WORLD_SIZE)]
    dist.all_gather(everyone, weights)
    assert all(torch.equal(weights, other) for other in everyone), "the ranks have diverged"
    if rank == 0:
        print(f"all {WORLD_SIZE} ranks hold the same {weights.numel()} parameters", flush=True)


def run(rank, port):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    train(rank)
    gc.collect()  # DDP and what was compiled have to go before their group: see docs/faq.md
    dist.destroy_process_group()


if __name__ == "__main__":
    # Port 0 lets the system choose a free one; the parent keeps it open until training ends.
    rendezvous = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(run, args=(rendezvous.port,), nprocs=WORLD_SIZE)

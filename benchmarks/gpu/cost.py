"""Lines about what compiling costs; what running costs is beside the overlap, in `overlap.py`."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from benchmarks.cost.compiling import Cost, in_process
from benchmarks.gpu.findings import Findings


def measure_compiling(
    findings: Findings, device: str, *, model: str, peers: Sequence[str], cap_mb: float
) -> None:
    """Compile with an empty and a filled cache; peers beside each other, so look at CPU time."""

    def compile_twice(peer: str) -> tuple[Cost, Cost]:
        with tempfile.TemporaryDirectory() as cache:
            cold, warm = (in_process(model, peer, cap_mb, device, cache) for _ in range(2))
        return cold, warm

    rows = []
    with ThreadPoolExecutor(len(peers)) as pool:
        costs = {peer: pool.submit(compile_twice, peer) for peer in peers}
    for peer, future in costs.items():
        if findings.check(peer, lambda future=future: future.result() and None):  # type: ignore[misc]
            cold, warm = future.result()
            findings.found.figures[peer] = {"cold": cold._asdict(), "warm": warm._asdict()}
            seconds = (cold.cpu_s, cold.wall_s, warm.cpu_s, warm.wall_s)
            rows.append([peer, *(f"{value:.1f}" for value in seconds), f"{warm.hits}"])
    header = ["peer", "cold CPU s", "cold s", "warm CPU s", "warm s", "graphs from the cache"]
    findings.table(f"{model}, first step", header, rows)

"""Read a profile's trace: what ran beside what, and how long the device had nothing to do.

On a GPU the spinning kernels of the emulated network, NCCL's kernels and copies between host and
device are communication, and all other kernels computation, wherever they ran. On the CPU,
aten's operators are computation; when buckets were on the network, the network itself has noted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slow_link import Interval

_COMMUNICATION = re.compile(r"spin_kernel|nccl|Memcpy (HtoD|DtoH)", re.IGNORECASE)
# Matrix products and convolutions, as operators and as the kernels of CUDA's libraries and Triton.
_PRODUCT = re.compile(
    r"mm$|_mm_|bmm|convolution|gemm|cutlass|xmma|nvjet|wgrad|dgrad", re.IGNORECASE
)
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


class Span(NamedTuple):
    start_us: float
    stop_us: float


class Summary(NamedTuple):
    """What a profile shows, of all its steps; milliseconds.

    `hidden_ms` is the time in which communication and computation ran at once, `gaps_ms` that in
    which neither did, from the first to the last of them. `num_beside` of the `num_products` matrix
    products and convolutions began while buckets were on the network.
    """

    communication_ms: float
    computation_ms: float
    hidden_ms: float
    gaps_ms: float
    num_streams: int
    num_products: int
    num_beside: int


def summarise(path: Path, sent: Sequence[Interval]) -> Summary:
    """Return what ran beside what; `sent` is when buckets were on the network, on the CPU."""
    data = json.loads(path.read_text())
    events = [event for event in data["traceEvents"] if event.get("ph") == "X"]
    named = _spans(events, _ON_GPU)
    if named:
        communication = union(span for name, span in named if _COMMUNICATION.search(name))
        named = [(name, span) for name, span in named if not _COMMUNICATION.search(name)]
    else:
        origin = int(data["baseTimeNanoseconds"])
        # Other operators, autograd's for example, may wait as well.
        named = [span for span in _spans(events, ("cpu_op",)) if span[0].startswith("aten::")]
        communication = union(Span((a - origin) / 1e3, (b - origin) / 1e3) for a, b in sent)
    computation = union(span for _, span in named)
    products = [span for name, span in named if _PRODUCT.search(name)]
    both = union([*communication, *computation])
    whole_us = both[-1].stop_us - both[0].start_us if both else 0.0
    return Summary(
        communication_ms=length_us(communication) / 1e3,
        computation_ms=length_us(computation) / 1e3,
        hidden_ms=(length_us(communication) + length_us(computation) - length_us(both)) / 1e3,
        gaps_ms=(whole_us - length_us(both)) / 1e3,
        num_streams=len({e["args"]["stream"] for e in events if e.get("cat") == "kernel"}),
        num_products=len(products),
        num_beside=sum(_is_within(product.start_us, communication) for product in products),
    )


def _is_within(moment_us: float, spans: Iterable[Span]) -> bool:
    return any(span.start_us < moment_us < span.stop_us for span in spans)


def _spans(events: Sequence[Any], categories: Sequence[str]) -> list[tuple[str, Span]]:
    return [
        (event["name"], Span(event["ts"], event["ts"] + event.get("dur", 0.0)))
        for event in events
        if event.get("cat") in categories
    ]


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the same time in spans that do not touch, in order."""
    joined: list[Span] = []
    for span in sorted(spans):
        if joined and span.start_us <= joined[-1].stop_us:
            joined[-1] = Span(joined[-1].start_us, max(joined[-1].stop_us, span.stop_us))
        else:
            joined.append(span)
    return joined


def length_us(spans: Iterable[Span]) -> float:
    return sum(span.stop_us - span.start_us for span in spans)

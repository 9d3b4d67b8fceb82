"""Draw a graph: as text in Graphviz' language DOT, and as SVG where Graphviz is installed.

It touches no file; `dump.py` says what is drawn and where it goes.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import subprocess
from collections.abc import Collection, Mapping

import torch
from torch import fx

from ddpopt import _logs, _torch
from ddpopt.split.nodes import describe, is_call

_TIMEOUT_S = 20
_MOST_NODES = 400  # of a drawing: a larger one takes minutes, and nobody can read it
_PARAMETER, _BOUNDARY, _CALL = "#ffe9a8", "#dddddd", "#ffffff"  # how nodes are filled


def to_dot(gm: fx.GraphModule, section_of: Mapping[str, str], parameters: Collection[str]) -> str:
    """Return a graph in DOT: each node with its name, target and shape.

    `section_of` gives the section of a node by the node's name; those of a section are drawn in
    one box. `parameters` are names of nodes, which are marked.
    """
    ids = {node: f"n{index}" for index, node in enumerate(gm.graph.nodes)}
    lines = [
        "digraph {",
        '  node [shape=box, style="filled", fontname="monospace", fontsize=10];',
        '  graph [fontname="monospace", labeljust="l"];',
    ]
    for node, text in zip(gm.graph.nodes, describe(gm.graph.nodes), strict=True):
        is_parameter = node.name in parameters
        label = [text.name, "(parameter)" if is_parameter else "", text.target, text.shape]
        color = _PARAMETER if is_parameter else _CALL if is_call(node) else _BOUNDARY
        shown = _quote("\n".join(filter(None, label)))
        lines.append(f"  {ids[node]} [label={shown}, fillcolor={_quote(color)}];")
    for index, section in enumerate(dict.fromkeys(section_of.values())):
        members = " ".join(
            f"{ids[node]};" for node in gm.graph.nodes if section_of.get(node.name) == section
        )
        lines.append(f"  subgraph cluster_{index} {{ label={_quote(section)}; {members} }}")
    lines += [f"  {ids[source]} -> {ids[node]};" for node in ids for source in node.all_input_nodes]
    return "\n".join([*lines, "}", ""])


def _quote(text: str) -> str:
    """Return a DOT string that shows `text` as it is."""
    # Graphviz ends a string only at a quote, but reads backslashes as escapes, and entities.
    escaped = text.replace("&", "&amp;").replace("\\", "\\\\")
    escaped = escaped.replace('"', '\\"').replace("\n", "\\n")
    return f'"{"".join(c for c in escaped if c.isprintable())}"'


def find_parameters(gm: fx.GraphModule, original: fx.GraphModule) -> set[str]:
    """Return the names of the nodes of `gm` that bring parameters in.

    `original` is the graph that Dynamo made, of whose backward `gm` may be.
    """
    found = {node.name for node in gm.graph.nodes if _is_parameter(gm, node)}
    given = list(original.graph.find_nodes(op="placeholder"))
    for node, index in _torch.argument_placeholders(gm).items():
        if index < len(given) and _is_parameter(original, given[index]):
            found.add(node.name)
    return found


def _is_parameter(gm: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "get_attr":
        with contextlib.suppress(AttributeError):  # it is a buffer, or a constant
            return isinstance(gm.get_parameter(str(node.target)), torch.nn.Parameter)
    value = node.meta.get("example_value")
    return node.op == "placeholder" and isinstance(value, torch.nn.Parameter)


def draw_svg(dot: str, num_nodes: int) -> str:
    """Return the drawing of a graph in DOT as SVG, "" unless Graphviz can make it in time."""
    program = _graphviz()
    if program is None or num_nodes > _MOST_NODES:
        return ""
    try:
        done = subprocess.run(
            [program, "-Tsvg"],
            input=dot.encode(),
            timeout=_TIMEOUT_S,
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as error:
        _logs.info("Graphviz made no drawing: %s", error)
        return ""
    return done.stdout.decode(errors="replace")


@functools.cache  # so that it is said once
def _graphviz() -> str | None:
    program = shutil.which("dot")
    if program is None:
        _logs.warning(
            "graphs are dumped without SVG drawings, because the program 'dot' of Graphviz is not "
            "installed here; where it is, 'dot -Tsvg original.dot -o original.svg' draws one"
        )
    return program

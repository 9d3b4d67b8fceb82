"""Graphs in DOT: what is in them, what is marked, and that names stay text."""

from __future__ import annotations

import re
import shutil
import subprocess
from xml.etree import ElementTree

import pytest
import torch
from torch import fx, nn

from ddpopt.split.dump import find_parameters, to_dot

SVG_TAGS = {"svg", "g", "title", "polygon", "text", "path"}
NODE = re.compile(r'^  (n\d+) \[label="((?:[^"\\]|\\.)*)", fillcolor="(#\w+)"\];$', re.MULTILINE)
EDGE = re.compile(r"^  (n\d+) -> (n\d+);$", re.MULTILINE)
CLUSTER = re.compile(
    r'^  subgraph cluster_\d+ \{ label="((?:[^"\\]|\\.)*)"; ((?:n\d+; ?)*) ?\}$', re.MULTILINE
)


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("bias", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x * self.weight + self.bias)


@pytest.fixture
def gm() -> fx.GraphModule:
    """x, weight -> mul; bias -> add -> relu, with shapes as Dynamo notes them."""
    traced = fx.symbolic_trace(_Scaled())
    for node in traced.graph.nodes:
        if node.op != "output":
            node.meta["example_value"] = torch.ones(2, 3)
    return traced


def _nodes(dot: str) -> dict[str, str]:
    """Return labels by id."""
    return {match[1]: match[2] for match in NODE.finditer(dot)}


def test_each_node_is_there_with_name_target_and_shape(gm: fx.GraphModule) -> None:
    """And there is an edge for each use of a value."""
    dot = to_dot(gm, {}, set())
    labels = _nodes(dot)
    assert len(labels) == len(list(gm.graph.nodes))
    (mul,) = [node for node, label in labels.items() if label.startswith("mul\\n")]
    assert "_operator.mul" in labels[mul]
    assert "float32[2, 3]" in labels[mul]
    used = {labels[a].split("\\n")[0] for a, b in EDGE.findall(dot) if b == mul}
    assert used == {"x", "weight"}


def test_the_nodes_of_a_section_are_in_one_cluster(gm: fx.GraphModule) -> None:
    """Named as given; nodes without a section are in none."""
    dot = to_dot(gm, {"mul": "section 0", "add": "section 1", "relu": "section 1"}, set())
    labels = _nodes(dot)
    clusters = {
        label: [labels[i].split("\\n")[0] for i in re.findall(r"n\d+", members)]
        for label, members in CLUSTER.findall(dot)
    }
    assert clusters == {"section 0": ["mul"], "section 1": ["add", "relu"]}


def test_parameters_are_marked_and_buffers_are_not(gm: fx.GraphModule) -> None:
    """Of a graph that holds them as attributes."""
    found = find_parameters(gm, gm)
    assert found == {"weight"}
    marked = [label for label in _nodes(to_dot(gm, {}, found)).values() if "(parameter)" in label]
    assert [label.split("\\n")[0] for label in marked] == ["weight"]


def test_quotes_backslashes_and_line_ends_are_shown_and_do_nothing(gm: fx.GraphModule) -> None:
    """A name cannot end its string, nor be read as an escape of Graphviz'."""
    name = 'a "quoted" \\N name\nof\x00two lines"]; evil [label="'
    dot = to_dot(gm, {"mul": name}, set())
    assert len(_nodes(dot)) == len(list(gm.graph.nodes))
    ((label, _),) = CLUSTER.findall(dot)
    assert label == 'a \\"quoted\\" \\\\N name\\noftwo lines\\"]; evil [label=\\"'


def _draw(dot: str) -> str:
    """Return Graphviz' drawing as SVG."""
    done = subprocess.run(["dot", "-Tsvg"], input=dot, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_graphviz_itself_reads_what_is_written(gm: fx.GraphModule) -> None:
    """Odd names included."""
    dot = to_dot(gm, {"mul": 'a "b" \\N <c> & d\n'}, find_parameters(gm, gm))
    svg = _draw(dot)
    assert svg.count('class="node"') == len(list(gm.graph.nodes))
    assert "a &quot;b&quot; \\N &lt;c&gt; &amp; d" in svg.replace("&#160;", " ")


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_names_that_look_like_markup_stay_text_in_the_drawing(gm: fx.GraphModule) -> None:
    """Of nodes and of sections: they end no string of DOT, and are no element of SVG."""
    evil = '</text><script>alert(1)</script>"]; n0 [URL="javascript:alert(1)"]; <b>&lt;</b> \x1b[2J'
    for node in gm.graph.nodes:
        node._rename("a")
        node.name = evil
    svg = _draw(to_dot(gm, {evil: evil}, set()))
    elements = list(ElementTree.fromstring(svg).iter())
    assert {element.tag.rpartition("}")[2] for element in elements} <= SVG_TAGS
    texts = [element.text for element in elements if element.tag.endswith("}text")]
    shown = evil.replace("\x1b", "")
    assert sum((text or "").replace("\xa0", " ") == shown for text in texts) > 1

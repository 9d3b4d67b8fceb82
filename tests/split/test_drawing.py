"""Graphs as DOT and SVG: what is in them, what is marked, and what happens without Graphviz."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import fx, nn

from ddpopt.split import drawing
from ddpopt.split.drawing import draw_svg, find_parameters, to_dot

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


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that is all of PATH, for programs that stand in for Graphviz'."""
    monkeypatch.setenv("PATH", str(tmp_path))
    drawing._graphviz.cache_clear()
    yield tmp_path
    drawing._graphviz.cache_clear()


def _install_dot(folder: Path, script: str) -> None:
    program = folder / "dot"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


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


def test_graphviz_reads_the_graph_and_returns_the_drawing(path: Path) -> None:
    """It is given no name of a file, and what it draws is returned."""
    _install_dot(path, 'echo "$@"; exec /bin/cat')
    assert draw_svg("digraph {}\n", num_nodes=3) == "-Tsvg\ndigraph {}\n"
    assert [file.name for file in path.iterdir()] == ["dot"]


def test_a_graph_that_is_too_large_is_not_drawn(path: Path) -> None:
    """It would take minutes."""
    _install_dot(path, "echo drawn")
    assert draw_svg("digraph {}", num_nodes=100_000) == ""


@pytest.mark.parametrize("script", ["echo half; exit 1", "echo half; exec /bin/sleep 60"])
def test_a_drawing_that_fails_or_takes_too_long_is_left_out(
    path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    """Nothing is raised, and half of a drawing is none."""
    monkeypatch.setattr(drawing, "_TIMEOUT_S", 0.5)
    _install_dot(path, script)
    assert draw_svg("digraph {}", num_nodes=3) == ""


def test_without_graphviz_one_line_says_how_to_draw(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """However many graphs there are."""
    for _ in range(3):
        assert draw_svg("digraph {}", num_nodes=3) == ""
    lines = [r.getMessage() for r in caplog.records if "Graphviz" in r.getMessage()]
    assert len(lines) == 1
    assert "dot -Tsvg original.dot -o original.svg" in lines[0]


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_graphviz_itself_reads_what_is_written(gm: fx.GraphModule) -> None:
    """Odd names included."""
    drawing._graphviz.cache_clear()
    dot = to_dot(gm, {"mul": 'a "b" \\N <c> & d\n'}, find_parameters(gm, gm))
    svg = draw_svg(dot, num_nodes=3)
    assert svg.count('class="node"') == len(list(gm.graph.nodes))
    assert "a &quot;b&quot; \\N &lt;c&gt; &amp; d" in svg.replace("&#160;", " ")


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_names_that_look_like_markup_stay_text_in_the_drawing(gm: fx.GraphModule) -> None:
    """Of nodes and of sections: they end no string of DOT, and are no element of SVG."""
    evil = '</text><script>alert(1)</script>"]; n0 [URL="javascript:alert(1)"]; <b>&lt;</b> \x1b[2J'
    for node in gm.graph.nodes:
        node._rename("a")
        node.name = evil
    drawing._graphviz.cache_clear()
    svg = draw_svg(to_dot(gm, {evil: evil}, set()), num_nodes=3)
    elements = list(ElementTree.fromstring(svg).iter())
    assert {element.tag.rpartition("}")[2] for element in elements} <= SVG_TAGS
    texts = [element.text for element in elements if element.tag.endswith("}text")]
    shown = evil.replace("\x1b", "")
    assert sum((text or "").replace("\xa0", " ") == shown for text in texts) > 1

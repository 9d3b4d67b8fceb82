"""The page of an explanation: its text, and the document that a real browser makes of it."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.errors import Reason
from ddpopt.inspection.page import render_page
from tests.support.beside import compiled
from tests.support.browser import browse, needs_browser

HOSTILE = '</script><!--<img src=x onerror="document.title=1"><b>{{policy}}\u2028'
MARKUP = "</script><img src=x onerror='alert(1)'><!--\"&amp;\x1b[2J\n\u202e"
VOID = {"meta", "link", "input", "img", "br", "hr"}

# Of a transformer block, in the order in which gradients arrive.
BLOCK = ("mlp.c_proj.weight", "mlp.c_fc.weight", "ln_2.bias", "ln_2.weight", "attn.c_attn.weight")
NODES = (
    ("view", "aten.view.default", "f32[4096, 512]"),
    ("mm", "aten.mm.default", "f32[4096, 2048]"),
    ("tanh", "aten.tanh.default", "f32[8, 512, 2048]"),
    ("getitem", "operator.getitem", ""),
)


def _section(index: int, num_nodes: int, **members: Any) -> dict[str, Any]:
    kinds = itertools.cycle(NODES)
    nodes = [
        {
            "name": f"{name}_{index * num_nodes + i}",
            "target": target,
            "shape": shape,
            "source": f"train_gpt.py:{40 + i % 60}, in forward: x = x + self.mlp(self.ln_2(x))",
        }
        for i, (name, target, shape) in enumerate(itertools.islice(kinds, num_nodes))
    ]
    own = {"index": index, "num_nodes": num_nodes, "first_node": nodes[0]["name"], "nodes": nodes}
    return {"parameters": [], "completes": [], **own, **members}


def _graph(name: str, *sections: dict[str, Any], fallback: Any = None) -> dict[str, Any]:
    return {
        "name": name,
        "inner": "inductor",
        "num_nodes": sum(section["num_nodes"] for section in sections),
        "split": "backward",
        "is_shared": False,
        "headline": f"graph {name}: {len(sections)} backward sections",
        "fallback": fallback,
        "backward_fallback": None,
        "sections": list(sections),
    }


def _whole_graph(
    name: str, reason: Reason, *, detail: str = "", num_nodes: int = 1
) -> dict[str, Any]:
    fallback = {"name": reason.name, "text": reason.value, "detail": detail}
    return _graph(name, _section(0, num_nodes), fallback=fallback)


def _times(ready_s: Sequence[float]) -> list[dict[str, float]]:
    """One allreduce after the other, of 40 ms each."""
    times, free = [], 0.0
    for ready in ready_s:
        launched, free = max(ready, free), max(ready, free) + 0.04
        times.append({"ready_s": ready, "launched_s": launched, "finished_s": free})
    return times


def example(num_blocks: int = 4, num_nodes: int = 8) -> dict[str, Any]:
    """A GPT whose backward is cut at each block, `num_nodes` nodes a section, as if recorded.

    Its first bucket is the head, its last two are embeddings and share a section.
    """
    blocks = [[f"transformer.h.{k}.{name}" for name in BLOCK] for k in reversed(range(num_blocks))]
    names = [["lm_head.weight"], *blocks, ["transformer.wpe.weight"], ["transformer.wte.weight"]]
    section_of = [*range(num_blocks + 2), num_blocks + 1]
    members = [[b for b, s in enumerate(section_of) if s == k] for k in range(num_blocks + 2)]
    stops = [0.03 + 0.024 * k for k in range(num_blocks + 2)]
    slower = [stop * 1.03 for stop in stops]
    predicted, measured = (_times([at[s] for s in section_of]) for at in (stops, slower))
    sections = [
        _section(k, num_nodes, parameters=[name for b in of for name in names[b]], completes=of)
        for k, of in enumerate(members)
    ]
    common = {"forward_s": 0.3, "communication_s": 0.04 * len(names)}
    ends = {"backward_s": measured[-1]["finished_s"], "exposed_s": 0.06}
    others = {"between_s": 0.02, "alone_s": 0.5, "iteration_s": 0.6, "bound_s": 0.5}
    return {
        "format": "ddpopt explanation 1",
        "versions": {"ddpopt": "0.1.0", "torch": "2.13.0"},
        "model": "GPT",
        "tuning": "",
        "hints": [],
        "graphs": [_graph("4/0", *sections)],
        "buckets": [
            {
                "index": k,
                "num_bytes": 12_000_000,
                "planned": group,
                "actual": group,
                "graphs": ["4/0"],
                "completed_by": f"4/0 section {section_of[k]}",
                "shares_section_with": [b for b in members[section_of[k]] if b != k],
                "launched_after": section_of[k] + 1,
                "is_as_planned": True,
                "predicted": predicted[k],
                "measured": measured[k],
            }
            for k, group in enumerate(names)
        ],
        "predicted": {"basis": "computation: measured", **common, **ends, **others},
        "measured": {
            "num_steps": 5,
            **common,
            **ends,
            "sections": [
                {"graph": "4/0", "section": k, "kind": "backward", "start_s": start, "stop_s": stop}
                for k, (start, stop) in enumerate(itertools.pairwise([0.0, *slower]))
            ],
        },
    }


class Element(NamedTuple):
    tag: str
    attributes: Mapping[str, str | None]
    texts: list[str]

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Document(HTMLParser):
    """The elements of a document, each with the text inside of it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[Element] = []
        self._open: list[Element] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, dict(attrs), []))
        if tag not in VOID:
            self._open.append(self.elements[-1])

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop().tag != tag:
            pass

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.texts.append(data)

    def find(self, tag: str, *classes: str, **attributes: str) -> list[Element]:
        """Elements with all of these classes and attributes (`data_x` for `data-x`)."""
        wanted = {name.replace("_", "-"): value for name, value in attributes.items()}
        return [
            element
            for element in self.elements
            if element.tag == tag
            and {*classes} <= {*(element.attributes.get("class") or "").split()}
            and all(element.attributes.get(name) == value for name, value in wanted.items())
        ]


def _open(folder: Path, content: Mapping[str, Any], fragment: str, *flags: str) -> str:
    """Open the page and return what the browser prints."""
    path = folder / "page.html"
    path.write_text(render_page(content), encoding="utf-8")
    return browse(f"{path.as_uri()}{fragment}", folder, *flags)


def _browse(folder: Path, content: Mapping[str, Any], fragment: str = "") -> Document:
    """Return the document that the page's script made, which must have met no error."""
    document = Document(_open(folder, content, fragment, "--window-size=1400,1000", "--dump-dom"))
    attributes = document.elements[0].attributes
    assert "data-error" not in attributes, attributes["data-error"]
    assert attributes["data-ready"] == "true"
    return document


def _hostile() -> dict[str, Any]:
    """An explanation in which each name and sentence looks like markup."""
    content = example(1, 2)
    graph = content["graphs"][0]
    content["graphs"] = [graph, _whole_graph(HOSTILE, Reason.SPLIT_FAILED, detail=HOSTILE)]
    content.update(model=HOSTILE, tuning=HOSTILE, hints=[HOSTILE], versions={HOSTILE: HOSTILE})
    graph.update(headline=HOSTILE, inner=HOSTILE)
    for section in graph["sections"]:
        section.update(first_node=HOSTILE, parameters=[HOSTILE])
        section["nodes"] = [dict.fromkeys(node, HOSTILE) for node in section["nodes"]]
    for bucket in content["buckets"]:
        bucket.update(planned=[HOSTILE], actual=["other"], is_as_planned=False)
    return content


@pytest.mark.quick
def test_the_page_refers_to_nothing_outside_of_it() -> None:
    """The one address is the name of SVG, which browsers do not load."""
    page = render_page(example())
    assert set(re.findall(r"\w+://[^\"'\s]*", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|\bsrc=|<link|fetch\(|XMLHttpRequest|import\(", page)


def test_the_policy_forbids_every_load_and_every_script_but_the_pages_own() -> None:
    """The policy has the hashes of the page's script and its style."""
    page = render_page(example())
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="(.*)"', page)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "{{" not in page


def test_the_data_of_a_page_are_those_of_the_explanation() -> None:
    """Equal, whatever characters are in them."""
    for content in (example(), _hostile()):
        (data,) = re.findall(r'id="explanation">(.*?)</script>', render_page(content), re.DOTALL)
        assert json.loads(data) == content


def test_names_cannot_end_the_element_that_holds_the_data() -> None:
    """Names cannot open a comment or look like a placeholder of the template, either."""
    page, tame = render_page(_hostile()), render_page(example())
    for text in ("</script", "<!--", "<img", "\u2028"):
        assert page.count(text) == tame.count(text)


class _Model(torch.nn.Module):
    """Names of its modules and parameters are hostile, as far as torch allows: without a dot."""

    def __init__(self) -> None:
        super().__init__()
        for k in range(3):
            layer = torch.nn.ParameterDict({MARKUP: torch.randn(64, 64)})
            self.add_module(f"{k}{MARKUP}", layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = torch.relu(x @ layer[MARKUP])
        return x


def test_names_of_a_models_own_parameters_stay_text(one_rank: None, tmp_path: Path) -> None:
    """Names of a model, modules and parameters stay text from `torch.compile` to the saved page."""
    ddp = DistributedDataParallel(type(MARKUP, (_Model,), {})(), bucket_cap_mb=0.01)
    run = compiled(ddp)
    for _ in range(4):
        run(torch.randn(2, 64)).sum().backward()
    explanation = ddpopt.explain(ddp)
    assert [len(plan.sections) for plan in explanation.cuts] == [3]
    explanation.save(tmp_path / "model.html")
    document = Document((tmp_path / "model.html").read_text())
    assert not document.find("img")
    assert not any(name.startswith("on") for e in document.elements for name in e.attributes)
    data, script = document.find("script")
    assert data.attributes == {"type": "application/json", "id": "explanation"}
    assert not script.attributes
    content = json.loads(data.text)
    assert content["model"] == MARKUP
    names = [name for section in content["graphs"][0]["sections"] for name in section["parameters"]]
    assert sorted(names) == [f"{k}{MARKUP}.{MARKUP}" for k in range(3)]


def test_the_script_never_parses_markup() -> None:
    """The script makes each element by its name, and puts text in as text."""
    page = render_page(example())
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", page)


def test_times_that_json_has_no_word_for_are_an_error() -> None:
    """Otherwise no browser could read the page."""
    content = example()
    content["measured"]["backward_s"] = float("nan")
    with pytest.raises(ValueError, match="JSON"):
        render_page(content)


def test_the_page_knows_which_fallbacks_cost_overlap() -> None:
    """The page shows those as alerts."""
    (names,) = re.findall(r"OVERLAP_LOST = new Set\((\[.*?\])\)", render_page(example()))
    assert set(json.loads(names)) == {
        reason.name for reason in Reason if not (reason.is_expected or reason.is_of_backward)
    }


@needs_browser
def test_a_browser_shows_every_bucket_section_and_time(tmp_path: Path) -> None:
    """The timelines, the lanes, the table and the graphs have them."""
    document = _browse(tmp_path, example())
    assert [e.text for e in document.find("h1")] == ["GPT"]
    assert len(document.find("tr", data_bucket="6")) == 1
    assert len(document.find("g", "mark", data_bucket="6")) == 2  # measured and predicted
    assert len(document.find("rect", "work")) == 6 + 1  # sections, and backward as a whole
    assert len(document.find("rect", "exposed")) == 2
    assert len(document.find("path", "line")) == 7
    assert len(document.find("details", "section")) == 6
    (last,) = document.find("tr", data_bucket="6")
    assert "transformer.wte.weight" in last.text
    assert "4/0 section 5" in last.text
    measured = example()["buckets"][6]["measured"]["finished_s"]
    assert f"{measured * 1000:.0f}" in last.text


@needs_browser
def test_what_tuning_decided_is_sentences_and_tables(tmp_path: Path) -> None:
    """The tables keep their columns."""
    tables = "  now  best  ms\n   12     8  backward\n\n  0.1  ms to start"
    tuning = f"buckets change, 4 to 35\n\n{tables}\nmeasured: 15% shorter"
    document = _browse(tmp_path, {**example(), "tuning": tuning})
    sentences = [e.text for e in document.find("p")][:2]
    assert sentences == ["Buckets change, 4 to 35", "Measured: 15% shorter"]
    assert [e.text for e in document.find("pre", "mono")][:1] == [tables]


@needs_browser
def test_names_stay_text_in_a_browser(tmp_path: Path) -> None:
    """No element and no script comes of them, wherever they are shown."""
    document = _browse(tmp_path, _hostile(), "#search=onerror")
    assert not document.find("img")
    assert not any("onerror" in element.attributes for element in document.elements)
    assert [e.text for e in document.find("h1")] == [HOSTILE]
    assert HOSTILE in {e.text for e in document.find("code")}
    assert len(document.find("script")) == 2
    assert document.find("mark")


@needs_browser
def test_a_bucket_named_in_the_address_is_selected_everywhere(tmp_path: Path) -> None:
    """The bucket is so in both timelines, the lanes and the table, as is its section."""
    document = _browse(tmp_path, example(), "#select=bucket-6")
    selected = document.find("g", "mark", "selected", data_bucket="6")
    assert len(selected) == 2
    assert all(element.attributes["aria-pressed"] == "true" for element in selected)
    for tag in ("tr", "button", "path"):
        indices = {e.attributes.get("data-bucket") for e in document.find(tag, "selected")}
        assert indices - {None} == {"6"}
    assert document.find("details", "section", "selected", data_section="4/0 section 5")
    (bar,) = document.find("aside", "chosen")
    assert "hidden" not in bar.attributes
    assert bar.text.startswith("Bucket 6")


@needs_browser
def test_a_search_counts_matches_in_each_section_and_opens_the_first(tmp_path: Path) -> None:
    """The search looks in nodes' names, targets, shapes and sources, and in parameters' names."""
    document = _browse(tmp_path, example(), "#search=LN_2.weight")
    badges = [e.text for e in document.find("span", "tag", "found")]
    assert badges[1:] == ["0 matches", *["1 match"] * 4, "0 matches"]
    document = _browse(tmp_path, example(num_nodes=20), "#search=aten.tanh")
    assert document.find("span", "tag", "found")[0].text == "30 matches"
    rows = document.find("div", "node", "mono")
    assert [row.text.split("aten")[0] for row in rows][:2] == ["3tanh_2", "7tanh_6"]
    (opened,) = [e for e in document.find("details", "section") if "open" in e.attributes]
    assert opened.attributes["data-section"] == "4/0 section 0"


@needs_browser
def test_fallbacks_stand_in_the_header_with_their_remedies(tmp_path: Path) -> None:
    """A fallback stands there once for all graphs that have it, lost overlap first."""
    content = example(1)
    content["graphs"] += [_whole_graph(f"{k}/0", Reason.NO_GRAD) for k in (5, 6)]
    content["graphs"] += [_whole_graph("7/0", Reason.NO_LEGAL_CUT, detail="at node cat_3")]
    lost, expected = _browse(tmp_path, content).find("section", "callout")
    assert "alert" in str(lost.attributes["class"])
    assert lost.text.startswith("Graph 7/0 is compiled whole")
    assert "Move it into a smaller part of the forward" in lost.text
    assert "at node cat_3" in lost.text
    assert expected.text.startswith("Graphs 5/0, 6/0 are compiled whole")


@needs_browser
def test_a_model_of_which_nothing_is_known_yet_has_a_page(tmp_path: Path) -> None:
    """The page says what is missing."""
    content = {**example(), "graphs": [], "buckets": [], "predicted": None, "measured": None}
    document = _browse(tmp_path, {**content, "hints": ["Run a step first."]})
    (hints,) = document.find("section", "callout")
    assert "Run a step first." in hints.text
    assert not document.find("svg")


@needs_browser
def test_what_was_not_recorded_is_left_out(tmp_path: Path) -> None:
    """Finishes, exposed time, the measured side as a whole, and nodes are not recorded here."""
    content = example(1)
    for bucket in content["buckets"]:
        bucket.update(predicted=None, is_as_planned=None, launched_after=None)
        bucket["measured"]["finished_s"] = None
    content["predicted"] = None
    content["measured"].update(exposed_s=None, communication_s=None)
    for section in content["graphs"][0]["sections"]:
        section["nodes"] = []
    document = _browse(tmp_path, content, "#select=section-4/0 section 1")
    assert len(document.find("rect", "run", "open")) == 4
    assert not document.find("rect", "exposed")
    assert not document.find("g", "panel", "predicted")


@needs_browser
def test_a_model_of_ten_thousand_nodes_makes_a_small_document(tmp_path: Path) -> None:
    """Nodes of its 24 blocks get elements when their section is opened, and only those in view."""
    content = example(24, 400)
    assert sum(graph["num_nodes"] for graph in content["graphs"]) > 10_000
    document = _browse(tmp_path, content)
    assert len(document.elements) < 3000
    assert not document.find("div", "node", "mono")
    document = _browse(tmp_path, content, "#search=aten.")
    assert len(document.elements) < 3500
    assert 0 < len(document.find("div", "node", "mono")) < 100
    assert len(document.find("span", "tag", "found")) == 1 + 26
    assert document.find("span", "tag", "found")[1].text == "300 matches"


@needs_browser
def test_one_graph_of_fifty_thousand_nodes_makes_a_small_document(tmp_path: Path) -> None:
    """The document is small also while its only section is open."""
    content = example(1)
    content["graphs"] = [_whole_graph("8/0", Reason.ONE_BUCKET, num_nodes=50_000)]
    document = _browse(tmp_path, content, "#search=mm_")
    assert 0 < len(document.find("div", "node", "mono")) < 100
    assert [e.text for e in document.find("span", "tag", "found")] == ["12,500 matches"] * 2


@needs_browser
def test_a_browser_can_draw_the_page(tmp_path: Path) -> None:
    """The picture is not empty, in light and in dark."""
    pictures = []
    for scheme in ("0", "1"):
        picture = tmp_path / f"{scheme}.png"
        flags = ("--window-size=1400,900", f"--blink-settings=preferredColorScheme={scheme}")
        _open(tmp_path, example(), "", *flags, f"--screenshot={picture}")
        pictures.append(picture.read_bytes())
        assert pictures[-1].startswith(b"\x89PNG")
        assert len(pictures[-1]) > 30_000
    assert pictures[0] != pictures[1]

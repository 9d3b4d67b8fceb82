"""The documentation says what is true: its commands and snippets run, its tables are complete.

Shell commands run as they are written, in a folder with the files that the page names
(`title="train.py"`), Python blocks one after another on two ranks, in one namespace a page. Only in
those, and in files of other pages, does `aot_eager` "compile" sections, which takes no time.
`documents.py` says which comments leave something out.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import importlib.util
import inspect
import io
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt import cli
from ddpopt.errors import Reason
from ddpopt.planning import AllreduceCost, Gradient, Profile
from ddpopt.planning.plan import plan_buckets
from tests.support.beside import compiled
from tests.support.browser import browse, needs_browser
from tests.support.documents import (
    DOCS,
    PAGES,
    ROOT,
    Block,
    blocks,
    command_of,
    commands,
    environment,
    is_command,
    run_command,
    split_variables,
)
from tests.support.models import MLP, batches
from tests.support.ranks import Ranks

sys.path.insert(0, str(DOCS / "tools"))

import command_line
import error_tables

# What a page says that its commands write.
WRITTEN = {
    "docs/getting-started.md": ("explanation.html",),
    "docs/reading-the-logs.md": ("dumps",),
}
ON_TWO_NODES = "run on two emulated nodes"
FILES_FROM = "docs/getting-started.md"  # for pages that run a train.py without showing it

# Commands that other tests run as they are written, some with a faster inner compiler, and look at
# what they print.
ELSEWHERE = {
    command_of(f"examples/{name}.py")
    for name in (
        "data_parallel",
        "minimal",
        "recipes/accelerate_loop",
        "recipes/lightning_fabric",
        "recipes/lightning_trainer",
        "recipes/nano_gpt",
        "recipes/ray_train",
        "recipes/regional",
        "recipes/trainer",
    )
}
# What is said in these files was done once, and is no instruction.
RECORDS = {"CHANGELOG.md", "benchmarks/RESULTS.md"}
# Pages whose Python blocks are only compiled.
COMPILE_ONLY = {
    "README.md": "the landing page has the same lines, and those are run",
    "benchmarks/README.md": "MyModule is the reader's",
}


def _python(page: str) -> list[Block]:
    return [b for b in blocks(page) if b.language == "python"]


def _runnable(page: str) -> list[Block]:
    """The page's Python blocks but those that name a file, or say why they are not run."""
    return [b for b in _python(page) if not b.title and not b.how]


def _use_aot_eager(text: str) -> str:
    asked = 'backend="ddpopt", options={'
    text = text.replace('backend="ddpopt")', asked + "})")
    return text.replace(asked, asked + '"inner": "aot_eager", ')


def _prepare(page: str, folder: Path) -> None:
    """Write the files that a page's commands need: its own, or those of Getting started."""
    files = {block.title: _use_aot_eager(block.text) for block in blocks(FILES_FROM)}
    files |= {block.title: block.text for block in blocks(page)}
    for name in filter(None, files):
        (folder / name).write_text(files[name])
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "my_package").mkdir()  # what pages call the reader's own
    shutil.copy(folder / "shapes.py", folder / "my_package" / "model.py")
    profile = Profile(
        gradients=tuple(
            Gradient(name=f"weight{k}", num_bytes=4_000_000, ready_s=0.01 * (k + 1))
            for k in range(12)
        ),
        forward_s=0.06,
        backward_s=0.13,
    )
    cost = AllreduceCost(startup_s=1e-4, s_per_byte=1e-9)
    plan_buckets(profile, cost, world_size=2).save(folder / "plan.json")


@contextlib.contextmanager
def _inside(folder: Path | str) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


# ---- Python blocks ----------------------------------------------------------------------------


def _exec_blocks(rank: int, blocks: list[Block], folder: str) -> None:
    """Run a page's blocks as one program would, with what the page takes for granted."""
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=0.03)
    namespace: dict[str, Any] = {
        "DistributedDataParallel": DistributedDataParallel,
        "Model": MLP,
        "batches": batches(rank, [(8, 64)] * 6),
        "ddp": ddp,
        "ddpopt": ddpopt,
        "model": MLP(),
        "nn": nn,
        "optimizer": torch.optim.SGD(ddp.parameters(), lr=0.1),
        "torch": torch,
    }
    with _inside(folder), contextlib.redirect_stdout(io.StringIO()):
        for block in blocks:
            text = _use_aot_eager(block.text)
            path = Path(f"line_{block.line}_rank_{rank}.py")  # so that Dynamo finds the source
            path.write_text(text)
            exec(compile(text, str(path.absolute()), "exec"), namespace)


@pytest.mark.quick("docs/index.md")
@pytest.mark.parametrize("page", [page for page in PAGES if _python(page)])
def test_python_blocks_run(ranks: Ranks, tmp_path: Path, page: str) -> None:
    """Two ranks run them; those that name a file, or say why not, are compiled."""
    for block in _python(page):
        compile(block.text, f"{page}:{block.line}", "exec")
    _prepare(page, tmp_path)
    to_run = _runnable(page)
    if to_run and page not in COMPILE_ONLY:
        ranks.run(_exec_blocks, to_run, str(tmp_path))


def test_profiles_have_the_ranges_that_their_page_names(ranks: Ranks, tmp_path: Path) -> None:
    """Ranges are of sections and allreduces of each rank, and of buckets in recorded steps."""
    ranks.run(_exec_blocks, _runnable("docs/reading-the-logs.md"), str(tmp_path))
    section, bucket = r"ddpopt: \d+/0 section \d backward", r"ddpopt: bucket \d ready \(.* KiB\)"
    for rank in range(2):
        scheduled = gzip.decompress((tmp_path / "profiles" / f"rank{rank}.json.gz").read_bytes())
        recorded = (tmp_path / f"profile{rank}.json").read_bytes()
        for text, expected in ((scheduled, [section]), (recorded, [section, bucket])):
            names = [str(event.get("name")) for event in json.loads(text)["traceEvents"]]
            for pattern in (*expected, "gloo:all_reduce"):
                assert any(re.fullmatch(pattern, name) for name in names), pattern


# ---- commands ---------------------------------------------------------------------------------


def _commands(page: str) -> list[str]:
    return [
        command
        for block in blocks(page)
        if block.is_shell and not block.how
        for command in block.commands
        if command not in block.skipped and command not in ELSEWHERE
    ]


def _run(command: str, folder: Path) -> None:
    """Run a command; ddpopt's own in this process, which saves the seconds of an import."""
    _, words = split_variables(command)
    if words[:3] == ["python", "-m", "ddpopt"]:
        words = ["ddpopt", *words[3:]]
    if words[0] == "ddpopt":
        with _inside(folder):
            assert cli.main(words[1:]) == 0, command
    else:
        run_command(command, folder)


@pytest.mark.parametrize("page", [page for page in PAGES if _commands(page)])
def test_commands_run(tmp_path: Path, page: str) -> None:
    """Commands run in turn, in a folder with the files that the page shows, and exit with 0."""
    _prepare(page, tmp_path)
    for command in _commands(page):
        _run(command, tmp_path)
    for name in WRITTEN.get(page, ()):
        assert (tmp_path / name).exists()


def test_commands_for_several_nodes_run_on_two_emulated_nodes(tmp_path: Path) -> None:
    """The same command is started twice, as on two machines, and both ranks print."""
    _prepare("README.md", tmp_path)
    blocks_of_nodes = [b for b in blocks(FILES_FROM) if b.how == ON_TWO_NODES]
    assert blocks_of_nodes
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for command in (command for block in blocks_of_nodes for command in block.commands):
        words = shlex.split(command.replace("node0:29400", f"localhost:{port}"))
        nodes = [
            subprocess.Popen(
                words, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True
            )
            for _ in range(2)
        ]
        texts = [node.communicate()[0] for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0]
        assert sorted(re.findall(r"rank (\d) of 2", "".join(texts))) == ["0", "1"]


def test_every_command_is_run_as_it_is_written_or_a_mark_says_why_not() -> None:
    """Commands stand in pages and in docstrings."""
    run = ELSEWHERE | {command for page in PAGES for command in _commands(page)}
    run |= {c for b in blocks(FILES_FROM) if b.how == ON_TWO_NODES for c in b.commands}
    for command in commands():
        assert command.is_skipped != (command.text in run), f"{command.place}: {command.text}"


def test_no_command_hides_in_a_block_without_a_language() -> None:
    """A block without a language has commands alone, or none."""
    for page in PAGES:
        for block in blocks(page):
            if not block.language and not block.is_shell:
                assert not any(map(is_command, block.text.splitlines())), f"{page}:{block.line}"


def test_all_pages_but_records_are_looked_at() -> None:
    pages = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("*.md")}
    for folder in ("benchmarks", "docs", "examples", "src", "tests"):
        pages |= {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.md")}
    assert pages == {*PAGES, *RECORDS}


def test_what_is_left_out_has_a_reason() -> None:
    """A comment that is none of the known ones would hide a block from the tests."""
    for page in PAGES:
        for block in blocks(page):
            assert re.fullmatch(rf"|(skip|compile only), .+|{ON_TWO_NODES}", block.how)
            assert set(block.skipped) <= set(block.commands), f"{page}:{block.line}"


# ---- tables and references --------------------------------------------------------------------


def test_the_reference_has_every_public_name() -> None:
    """A name is a link to its definition, which the site replaces by its reference."""
    links = re.findall(
        r"^- \[ddpopt\.([\w.]+)\]\(\.\./(.+)\)$", (DOCS / "api.md").read_text(), re.MULTILINE
    )
    for name, path in links:
        last = name.rpartition(".")[2]
        code = (ROOT / path).read_text()
        assert Path(path).stem == last or re.search(rf"^(class|def) {last}\b", code, re.MULTILINE)
    shown = [name for name, _ in links]
    rooms = (ddpopt.algorithms, ddpopt.planning, ddpopt.inspection, ddpopt.checks)
    names = {f"{room.__name__}.{name}" for room in rooms for name in room.__all__}
    names |= {f"ddpopt.{name}" for name in {*ddpopt.__all__} - {"algorithms", "planning", "errors"}}
    names |= {f"ddpopt.errors.{error.__name__}" for error in _errors()} - {
        "ddpopt.errors.DDPOptError"
    }
    assert names <= {f"ddpopt.{name}" for name in shown}
    assert len(shown) == len(set(shown))


def test_all_that_is_public_is_described() -> None:
    """All functions and classes of the reference are, with their methods and properties.

    Those of algorithms may say by their names what they are.
    """
    modules = (ddpopt, ddpopt.algorithms, ddpopt.planning, ddpopt.inspection, ddpopt.checks)
    public = {f"{m.__name__}.{name}": getattr(m, name) for m in modules for name in m.__all__}
    for kind in [value for name, value in public.items() if "algorithms" not in name] + _errors():
        for method, member in vars(kind).items() if isinstance(kind, type) else ():
            if _is_code(member) and not method.startswith("_"):
                public[f"{kind.__name__}.{method}"] = getattr(kind, method)
    assert [name for name, value in public.items() if not inspect.getdoc(value)] == []


def _errors() -> list[type]:
    values = [value for value in vars(ddpopt.errors).values() if isinstance(value, type)]
    return [value for value in values if issubclass(value, ddpopt.DDPOptError)]


def _is_code(member: object) -> bool:
    kinds = property | functools.cached_property | classmethod | staticmethod
    return callable(member) or isinstance(member, kinds)


def test_the_command_line_page_has_every_command() -> None:
    """The page has all options of commands, too."""
    names = [name for name, _ in command_line.commands()]
    text = command_line.render()
    for name in ("explain", "simulate", "sweep", "calibrate", "bench", "doctor"):
        assert f"ddpopt {name}" in names
        assert f"## ddpopt {name}\n" in text
    for _, parser in command_line.commands():
        for action in parser._actions:
            assert all(option in text for option in action.option_strings)


def test_every_exception_and_reason_has_a_cause_and_a_remedy() -> None:
    """Causes and remedies are in the tables of the page of errors."""
    rows = error_tables.exception_rows()
    assert {error.__name__ for error in _errors()} <= {row.name for row in rows}
    reasons = error_tables.reason_rows(Reason)
    assert [row.name for row in reasons] == [reason.name for reason in Reason]
    for row in [*rows, *reasons]:
        assert len(row.cause) > 10
        assert len(row.remedy) > 10
    for row, reason in zip(reasons, Reason, strict=True):
        if reason.is_expected and not reason.is_of_backward:
            continue
        assert not row.remedy.startswith("None needed"), f"{row.name} says not what to do"


def test_there_is_one_version() -> None:
    """The version is that of the next release, until its tag is set."""
    files = {
        "pyproject.toml": r'^version = "(.+?)"',
        "CITATION.cff": r"^version: (.+)$",
        "CHANGELOG.md": r"^## (\S+) \((?:unreleased|\d{4}-\d{2}-\d{2})\)$",
    }
    versions = {}
    for name, pattern in files.items():
        found = re.search(pattern, (ROOT / name).read_text(), re.MULTILINE)
        assert found is not None, name
        versions[name] = found[1]
    assert len(set(versions.values())) == 1, versions


def test_the_page_of_errors_has_what_the_source_has() -> None:
    """Else: `make errors`."""
    page = error_tables.PAGE.read_text()
    assert "ONE_BUCKET" in page
    assert page == error_tables.render_page(page)


def test_every_exception_is_shown_with_its_messages() -> None:
    """The base class is never raised itself."""
    shown = {message.kind for message in error_tables.messages()}
    raised = error_tables.exceptions().keys() - {"DDPOptError"}
    assert raised <= shown
    assert any("world_size is <var>world_size</var>" in m.text for m in error_tables.messages())


def test_every_warning_is_shown_with_names_for_its_placeholders() -> None:
    texts = [message.text for message in error_tables.warnings()]
    assert any(text.startswith("DDP formed other buckets than planned: <var>") for text in texts)
    assert not any(re.search(r"%[sdr]", text) for text in texts)


def test_the_keys_of_the_json_are_described(one_rank: None) -> None:
    """All keys of a model's explanation are."""
    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=0.03)
    compiled(ddp, "eager")(torch.randn(2, 64)).sum().backward()
    text = (DOCS / "reading-the-logs.md").read_text()
    document = ddpopt.explain(ddp).to_dict()
    (graph,) = document["graphs"]
    for keys in (document, graph, graph["sections"][0], document["buckets"][0]):
        assert [key for key in keys if f"`{key}`" not in text] == []


class _Drop(nn.Module):
    """Stochastic depth of a block; Dynamo makes its probability an input when it changes."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.probability = probability

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        if self.probability == 0.0:
            return x
        kept = 1.0 - self.probability
        return x * torch.empty([x.shape[0], 1]).bernoulli_(kept).div_(kept)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self._drop(self.first(x))
        return x + self._drop(self.second(x))


class _Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Drop(probability) for probability in (0.0, 0.1, 0.2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            torch._dynamo.graph_break()
            x = block(x)
        return x


@pytest.mark.parametrize("split", ["forward", "backward"])
def test_floats_that_dynamo_takes_for_inputs_are_no_obstacle(one_rank: None, split: str) -> None:
    """The page of questions says it of stochastic depth."""
    ddp = DistributedDataParallel(_Blocks(), bucket_cap_mb=0.015)
    run = compiled(ddp, split=split)
    for _ in range(3):
        run(torch.randn(4, 64)).sum().backward()
    cuts = ddpopt.explain(ddp).cuts
    assert len(cuts) >= 3
    assert all(len(cut.sections) > 1 for cut in cuts)


# ---- the site ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The site, built as `make docs` builds it."""
    missing = [n for n in ("mkdocs", "material", "mkdocstrings") if not importlib.util.find_spec(n)]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed (pip install 'ddpopt[docs]')")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    yield folder
    shutil.rmtree(folder)


def test_the_site_builds_strictly(site: Path) -> None:
    """All links and anchors lead somewhere, and generated parts are filled in."""
    assert (site / "index.html").exists()
    for page in site.rglob("*.html"):
        assert not re.search(r"<!-- generated|--8<--|<p>:::|<li>:::", page.read_text()), page
    for part in ("ONE_BUCKET", "CUDA_GRAPHS", "PlanError"):
        assert part in (site / "errors.html").read_text()
    reference = (site / "api.html").read_text()
    assert "check_boolean" not in reference
    for part in ("Rebuild the Reducer", "usage: ddpopt explain"):
        assert part in reference
    assert "NUM_MICRO_STEPS" in (site / "recipes.html").read_text()


def test_the_site_loads_nothing_from_the_network(site: Path) -> None:
    """No script, style, font or picture has an address elsewhere."""
    loads = re.compile(
        r'<(?:script|img|iframe|source)[^>]*\ssrc="(?:https?:)?//|url\(["\']?https?:'
    )
    styles = re.compile(r'<link(?![^>]*rel="canonical")[^>]*href="(?:https?:)?//')
    for path in [*site.rglob("*.html"), *site.rglob("*.css")]:
        text = path.read_text()
        assert not loads.search(text), path
        assert not styles.search(text), path


@needs_browser
def test_the_search_works_where_the_site_is_opened_as_files(site: Path, tmp_path: Path) -> None:
    """README says to open it so; browsers start no worker there."""
    text = browse(f"{(site / 'index.html').as_uri()}?q=ByteGrad", tmp_path, "--dump-dom")
    assert re.search(r'search-result__meta">\d+ matching documents', text)

"""What a person reads who starts `ddpopt doctor` on many ranks: rank 0's report on all of them."""

from __future__ import annotations

import json
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ddpopt.cli import doctor, launched, main
from ddpopt.cli.doctor import Check, Findings
from ddpopt.cli.launched import Launch, find_launch, settle
from ddpopt.cli.output import InputError, Report, Screen
from tests.cli.test_cli import _run_on_two_ranks
from tests.support.documents import environment

BAD = Check("C++ compiler", "there is no g++", "install one")


def _findings(rank: int, *checks: Check, failed: tuple[str, ...] = ()) -> Findings:
    """What a rank found, one of eight on a node, beside what all ranks have alike."""
    alike = [Check("python", "3.11.7"), Check("torch", "2.13.0")]
    return Findings(f"node{rank // 8}", [*alike, *checks], failed, {})


def _text(report: Report, capsys: pytest.CaptureFixture[str]) -> str:
    Screen(as_json=False).show(report)
    return capsys.readouterr().out


def test_of_many_ranks_alike_rows_are_one_and_a_rank_that_fails_is_named_with_its_host(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first line counts who is well; a rank that was not heard of cannot train."""
    good = Check("C++ compiler", "/usr/bin/g++")
    by_rank = {rank: _findings(rank, good) for rank in range(64) if rank != 5}
    for rank in (17, 18):
        by_rank[rank] = _findings(rank, BAD, failed=(BAD.name,))
    report = doctor.report_all(by_rank, 64)
    text = _text(report, capsys)
    assert text.startswith("61 of 64 ranks are well, on 8 hosts\n")
    assert "nothing was heard of rank 5 " in text
    assert re.search(r"C\+\+ compiler +61 of 64 +ok  /usr/bin/g\+\+\n", text)
    assert re.search(r"ranks 17-18 on node2  problem  there is no g\+\+; install one\n", text)
    assert "not be split on 3 of 64 ranks; see C++ compiler above" in text
    assert text.count("\n") < 15
    assert report.status == 1
    assert report.data["silent_ranks"] == [5]
    assert json.loads(json.dumps(report.data))["hosts"]["17"] == "node2"


def test_ranks_that_all_differ_fill_no_screen_and_problems_come_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ranks that are left out are counted, and the JSON has them."""
    by_rank = {rank: _findings(rank, Check("TORCH_TRACE", f"/t/{rank}")) for rank in range(512)}
    by_rank[400] = _findings(400, BAD, failed=(BAD.name,))
    report = doctor.report_all(by_rank, 512)
    text = _text(report, capsys)
    assert text.count("TORCH_TRACE") == 13
    assert "and 498 rows more" in text
    assert "rank 400 on node50" in text
    assert sum(check["name"] == "TORCH_TRACE" for check in report.data["checks"]) == 511


def test_rank_0_hears_of_each_rank_that_writes_in_time_and_all_end_alike() -> None:
    """The last of three writes nothing; findings arrive as they were."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    findings = [_findings(rank, BAD, failed=(BAD.name,)) for rank in range(2)]
    heard: dict[int, Findings] = {}

    def judge(found: dict[int, dict[str, Any]]) -> int:
        heard.update({rank: Findings.from_json(data) for rank, data in found.items()})
        return 1

    def end(rank: int) -> int:
        launch = Launch(rank, 3, "localhost", port)
        return settle(launch, findings[rank].to_json(), judge, wait_s=3)

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(end, range(2))) == [1, 1]
    assert heard.keys() == {0, 1}
    assert heard[1].host == "node0"
    assert heard[1].checks == findings[1].checks


def test_what_ends_an_exchange_is_an_error_and_so_is_a_store_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launch, answers = Launch(1, 2, "node0", 29400), threading.Event()
    monkeypatch.setattr(launched, "_GRACE_S", 0.1)
    monkeypatch.setattr(launched, "_exchange", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        settle(launch, {}, lambda _: 0, wait_s=60)
    monkeypatch.setattr(launched, "_exchange", lambda *_: answers.wait())
    with pytest.raises(TimeoutError, match="node0:29400"):
        settle(launch, {}, lambda _: 0, wait_s=0)
    answers.set()


def test_a_rank_that_reaches_nobody_speaks_for_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That rank has a table of its own, with its host, and why others are not in the table."""

    def fail(*_: object) -> None:
        raise TimeoutError("the store does not answer")

    launch = Launch(3, 4, "node0", 29400)
    monkeypatch.setattr(doctor, "find_launch", lambda: launch)
    monkeypatch.setattr(doctor, "settle", fail)
    monkeypatch.setattr(doctor, "_examine", lambda _screen: _findings(3))
    assert main(("doctor",)) == 1
    text = capsys.readouterr().out
    assert re.search(r"host +ok  node0\n", text)
    assert re.search(r"other ranks  problem  rank 3 cannot reach them: the store does not", text)


def test_a_launch_is_what_torchruns_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single process is no launch; a rank that is no number is bad input."""
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29400"}
    monkeypatch.setattr("os.environ", environment(**variables))
    assert find_launch() == Launch(1, 2, "node0", 29400)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert find_launch() is None
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(InputError, match="RANK"):
        find_launch()


@pytest.mark.slow
def test_torchruns_doctor_reports_once() -> None:
    """Rank 0 prints, for both."""
    done = _run_on_two_ranks("doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["can_split"]
    assert (report["num_ranks"], report["silent_ranks"]) == (2, [])
    assert set(report["hosts"].values()) == {socket.gethostname()}

"""Stored plans: the same call gives the same bytes without a search; whatever a plan follows from is in the key."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import partitioner.commands.plan_model as command
from partitioner.cli import run_command
from partitioner.planning import stored_plans
from partitioner.planning.stored_plans import CACHE, StoredPlan, plan_key, store_plan, stored_plan

TINY = ["gpt2", "--set", "size=tiny", "--set", "layers=1"]
CALL = ["plan", *TINY, "--strategy", "layer", "--cluster", "H100-80GB:2", "--batch-size", "8"]
PLAN = StoredPlan('{"a": 1}\n', "a table", 80)
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE, str(tmp_path / "plans"))
    return tmp_path / "plans"


def refuse_to_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> object:
        raise AssertionError("it plans anew")

    monkeypatch.setattr(command, "plan_model", refuse)


def test_the_same_call_gives_the_same_bytes_without_a_search(
    folder: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    assert run_command([*CALL, "-o", str(first)]) == 0
    table = capsys.readouterr().out
    (file,) = folder.iterdir()
    written = file.read_bytes()
    with monkeypatch.context() as patched:
        refuse_to_plan(patched)
        assert run_command([*CALL, "-o", str(second)]) == 0
        printed = capsys.readouterr()
        assert printed.out == table
        assert "planned before (--no-cache plans anew)" in printed.err
        assert second.read_bytes() == first.read_bytes()
        assert run_command([*CALL, "--json", "--quiet"]) == 0
        printed = capsys.readouterr()
        assert json.loads(printed.out) == json.loads(first.read_text())
        assert not printed.err
        patched.setenv("COLUMNS", "60")  # a table of another width is made of the plan
        assert run_command([*CALL, "--quiet"]) == 0
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 60 < max(map(len, table.splitlines()))
        assert run_command([*CALL, "-o", str(tmp_path)]) == 2  # checked all the same
        assert run_command([*CALL[:-1], "16"]) == 1  # not the same call: it would plan
    file.write_text("{}")  # no plan: searched for again, and rewritten
    assert run_command([*CALL, "--quiet"]) == 0
    assert len(file.read_bytes()) > len(written) / 2


def test_torch_is_not_imported_for_a_stored_plan(folder: Path) -> None:
    code = (
        "import sys; from partitioner.cli import run_command\n"
        "import partitioner.commands.plan as command\n"
        "command.stored_plan = lambda key: command.StoredPlan('{}', 'a table', command.terminal_width())\n"
        f"sys.exit(run_command({CALL}) or 10 * ('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "a table\n"), done.stderr


def test_neither_read_nor_written_where_it_is_switched_off(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = list[str]()
    monkeypatch.setattr(stored_plans, "store_plan", lambda *_: called.append("store"))
    assert run_command([*CALL, "--no-cache", "--quiet"]) == 0
    assert not called
    assert not folder.exists()
    monkeypatch.setenv(CACHE, "none")
    store_plan("key", PLAN)
    assert stored_plan("key") is None
    assert not folder.exists()


@pytest.mark.parametrize("model", ["net.py:make", "package.module:make"])
def test_models_of_the_users_own_have_no_key(model: str) -> None:
    assert plan_key(model, {}) is None


def test_everything_a_plan_follows_from_is_in_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, cluster, calibration = (tmp_path / name for name in ("config.json", "c.yaml", "calibration.json"))
    config.write_text("{}")
    cluster.write_text("nodes: []")
    library = tmp_path / "library"
    library.mkdir()
    (library / "__init__.py").write_text("a = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(stored_plans, "_LIBRARIES", ("torch", "library"))
    arguments = {"cluster": str(cluster), "batch_size": 8, "pin": ("a", "b")}

    def key() -> str | None:
        return plan_key(f"hf:{tmp_path}", arguments)

    def changes() -> Iterator[str]:
        config.write_text('{"layers": 2}')
        yield "the model's configuration"
        cluster.write_text("nodes: [{}]")
        yield "the cluster's file"
        arguments["pin"] = ("a", "c")
        yield "an argument"
        monkeypatch.setenv("PARTITIONER_CALIBRATION", str(calibration))
        yield "which calibration is used"
        calibration.write_text("{}")
        yield "what it says"
        monkeypatch.setenv("TRANSFORMERS_NEW", "1")
        yield "the environment of a library"
        os.utime(library / "__init__.py", ns=(1, 1))
        yield "the time at which a library's code changed"
        (library / "more.py").write_text("")
        yield "a further file of a library"
        monkeypatch.setattr(stored_plans, "_OURS", ("library",))
        yield "our own code"
        (library / "more.py").write_text("b")
        os.utime(library / "more.py", ns=(1, 1))
        yield "a letter of it"
        (tmp_path / "other-1.0.dist-info").mkdir()
        yield "the installed packages"
        monkeypatch.syspath_prepend(str(library))
        yield "where modules are looked for"
        monkeypatch.setattr(stored_plans.host, "core_count", lambda: 1000)
        yield "the machine"

    assert key() == key()
    assert plan_key("gpt2", arguments) != plan_key("bert", arguments)
    seen = {key()}
    for number, change in enumerate(changes(), 2):
        seen.add(key())
        assert len(seen) == number, change


@pytest.mark.parametrize(
    "text", ["", "[", "[]", "{}", '{"plan": 1}', '{"plan": "x", "table": "y", "width": 80, "digest": "z"}']
)
def test_files_that_are_no_stored_plans_are_left_aside(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "key.json").write_text(text)
    assert stored_plan("key") is None
    store_plan("key", PLAN)
    assert stored_plan("key") == PLAN
    (folder / "key.json").rename(folder / "other.json")  # the plan of another call
    assert stored_plan("other") is None


def test_what_was_used_least_recently_is_dropped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, name in enumerate(("a", "b")):
        store_plan(name, PLAN)
        os.utime(folder / f"{name}.json", (number, number))
    assert stored_plan("a") == PLAN  # used now
    size = (folder / "a.json").stat().st_size
    monkeypatch.setattr(stored_plans, "MOST_BYTES", 2 * size)
    store_plan("c", PLAN)
    assert {file.stem for file in folder.iterdir()} == {"a", "c"}


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE, str(tmp_path / "file"))
    store_plan("key", PLAN)
    assert stored_plan("key") is None

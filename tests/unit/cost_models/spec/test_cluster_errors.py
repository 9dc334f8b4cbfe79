"""Bad cluster files: every problem at once, with key path, expected, got and line (texts in ``bad_clusters.txt``)."""

from __future__ import annotations

from pathlib import Path

import pytest

from cost_models.cluster import ClusterSpec
from cost_models.errors import ClusterError


def _cases() -> dict[str, tuple[str, str, list[str]]]:
    """From ``bad_clusters.txt``: ``=== name``, the file, ``--- what``, then each reason on a line."""
    found = {}
    text = (Path(__file__).parent / "bad_clusters.txt").read_text(encoding="utf-8")
    for case in text.removeprefix("=== ").split("\n=== "):
        title, _, rest = case.partition("\n")
        file, _, error = ("\n" + rest).partition("\n--- ")
        what, *because = error.rstrip("\n").split("\n")
        found[title] = (file.removeprefix("\n") + "\n" if file else "", what, because)
    return found


CASES = _cases()


def test_there_are_many_cases() -> None:
    assert len(CASES) >= 50


@pytest.mark.parametrize("name", CASES)
def test_a_bad_file(tmp_path: Path, name: str) -> None:
    text, what, because = CASES[name]
    file = tmp_path / "cluster.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ClusterError) as caught:
        ClusterSpec.load(file)
    assert list(caught.value.because) == because
    assert caught.value.what == f"{file} {what}"
    assert caught.value.exit_code == 2


def _refused(text: str) -> str:
    with pytest.raises(ClusterError) as caught:
        ClusterSpec.parse(text)
    return caught.value.render()


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert _refused(f"{tmp_path}/none.yaml") == (
        f"error[cluster]: cannot read {tmp_path}/none.yaml\n"
        "  because: No such file or directory\n"
        "  try: give the path of a YAML or JSON cluster file"
    )
    assert "because: Is a directory" in _refused(str(tmp_path))
    (tmp_path / "binary.yaml").write_bytes(b"nodes: \xff")
    assert "because: it is not UTF-8 text (byte 7)" in _refused(f"{tmp_path}/binary.yaml")
    (tmp_path / "deep.yaml").write_text("[" * 3000)
    assert "is not valid YAML" in _refused(f"{tmp_path}/deep.yaml")


def test_json_files(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    file.write_text('{"nodes": [{"device": "H100-80GB",}]}')
    assert "is not valid JSON\n  because: line 1, column 35: " in _refused(str(file))
    file.write_text('{"nodes": [{"device": "H100-80GB", "device": "A100-80GB"}]}')
    assert 'because: the key "device" is given twice in one mapping' in _refused(str(file))
    file.write_text('{"nodes": [{"device": {"preset": "H100-80GB", "memory": NaN}}]}')
    assert 'because: nodes[0].device.memory: expected a size such as "80GiB", got nan\n' in _refused(
        str(file)
    )


def test_plain_data_has_no_lines() -> None:
    with pytest.raises(ClusterError) as caught:
        ClusterSpec.from_dict({"nodes": [{"device": {"preset": "H100-80GB", "memory": "eighty"}}]})
    assert caught.value.render() == (
        "error[cluster]: <dict> has 1 problem\n"
        '  because: nodes[0].device.memory: expected a size such as "80GiB", got "eighty"\n'
        "  try: correct the lines above; docs/01-hardware.md describes every key"
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("dgx-h10:8", 'there is no cluster "dgx-h10:8" (did you mean "dgx-h100"?)'),
        ("local", 'cannot read the cluster "local"\n  because: expected a number, as in "local:2"'),
        ("local:two", 'cannot read the cluster "local:two"'),
        ("local:0", "cannot make a cluster of 0 workers\n  because: expected 1 to 65536, as in NAME:2"),
        (
            "dgx-h100:-1",
            'cannot read the cluster "dgx-h100:-1"\n  because: expected a number, as in "dgx-h100:2"',
        ),
        ("dgx-h100:", 'cannot read the cluster "dgx-h100:"'),
        ("dgx-h100:99999", "cannot make a cluster of 99999 nodes"),
        ("dgx-h100:60000", "nodes: expected at most 65536 devices, got 480000"),
        ("H100-80GB:0", "cannot make a cluster of 0 devices"),
        ("x" * 5000, "there is no cluster"),
    ],
)
def test_bad_command_lines(text: str, reason: str) -> None:
    assert reason in _refused(text)


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match='there is no machine preset "H100-80GB"'):
        ClusterSpec.preset("H100-80GB")
    with pytest.raises(ClusterError, match='there is no device preset "H100"'):
        ClusterSpec.one_node("H100", 2)
    with pytest.raises(ClusterError, match="cannot write"):
        ClusterSpec.local(1).save(tmp_path / "no" / "folder.yaml")

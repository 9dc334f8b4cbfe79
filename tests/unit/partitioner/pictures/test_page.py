"""The report page as a file: nothing in the data becomes markup, and the policy lets our script run and nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from importlib.resources import files

import pytest

from partitioner.pictures.page import content_policy, escaped_json, page_script, page_style, render_page
from tests.support.made_reports import HOSTILE_NAMES, hostile_report, made_report, two_reports
from tests.support.unpacked import unpacked

PAGE = files("partitioner.pictures") / "page"
OWN_LIMIT_BYTES = 300 * 1024
FILE_LIMIT_BYTES = 2 * 1024**2
LINES_OF_A_FILE = 400


class Elements(HTMLParser):
    """Every element of a page, and the text of its scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.inside = ""
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": [], "title": []}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in self.texts:
            self.texts[tag].append("")
        self.inside = tag

    def handle_data(self, data: str) -> None:
        if self.inside in self.texts:
            self.texts[self.inside][-1] += data

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""


def test_names_of_any_kind_come_back_as_they_were() -> None:
    report = hostile_report()
    found = Elements(render_page(report))
    assert unpacked(json.loads(found.texts["script"][0])) == report
    assert [tag for tag, _ in found.tags].count("script") == 2
    assert "img" not in [tag for tag, _ in found.tags]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_title_is_text(name: str) -> None:
    report = made_report(2, 2, 4, 2)
    report["plans"][0]["title"] = name
    found = Elements(render_page(report))
    assert found.texts["title"] == [name[:200]]
    assert [tag for tag, _ in found.tags].count("script") == 2


def test_json_holds_no_character_that_ends_a_script() -> None:
    text = escaped_json({"name": "<!--</script>&\u2028\u2029", "lone": "\ud800"})
    assert not re.search("[<>&\u2028\u2029]", text)
    assert json.loads(text) == {"name": "<!--</script>&\u2028\u2029", "lone": "?"}


def test_numbers_that_json_does_not_know_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        escaped_json({"seconds": float("nan")})


def test_the_policy_names_script_and_style_by_hash_and_forbids_the_rest() -> None:
    found = Elements(render_page(made_report(2, 2, 4, 2)))
    (policy,) = [attributes["content"] for tag, attributes in found.tags if attributes.get("http-equiv")]
    hashes = [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (found.texts["script"][1], found.texts["style"][0])
    ]
    assert policy == (
        f"default-src 'none'; script-src 'sha256-{hashes[0]}'; style-src 'sha256-{hashes[1]}'; "
        "base-uri 'none'; form-action 'none'"
    )
    assert policy == content_policy(page_script(), page_style())


def test_nothing_is_loaded_from_elsewhere() -> None:
    found = Elements(render_page(two_reports()))
    loading = [
        (tag, key) for tag, attributes in found.tags for key in attributes if key in ("src", "srcset", "data")
    ]
    assert loading == []
    assert "link" not in [tag for tag, _ in found.tags]
    assert not re.search(
        r"url\((?!#)|@import|fetch\(|XMLHttpRequest|innerHTML|sourceMappingURL", page_style() + page_script()
    )


def test_no_attribute_of_ours_is_refused_by_our_policy() -> None:
    found = Elements(render_page(made_report(2, 2, 4, 2)))
    assert [
        tag
        for tag, attributes in found.tags
        if "style" in attributes or any(a.startswith("on") for a in attributes)
    ] == []


def test_the_layout_library_is_the_one_of_its_record() -> None:
    vendor = PAGE / "vendor"
    recorded = dict(
        re.findall(r"\| `([\w.]+)` \|.*\| `([0-9a-f]{64})` \|", (vendor / "VENDORED.md").read_text("utf-8"))
    )
    assert list(recorded) == ["dagre.min.js"]
    for name, wanted in recorded.items():
        assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == wanted


def test_the_licence_of_the_library_is_in_the_page() -> None:
    assert "Permission is hereby granted, free of charge" in page_script()


def test_pages_stay_small() -> None:
    large = len(render_page(made_report(8, 80, 125, 32)).encode())
    own = len((page_script() + page_style()).encode())
    assert own <= OWN_LIMIT_BYTES
    assert large <= FILE_LIMIT_BYTES


def test_scripts_and_styles_are_short_files_of_short_lines() -> None:
    lines = {
        file.name: file.read_text("utf-8").splitlines()
        for folder in ("scripts", "styles")
        for file in (PAGE / folder).iterdir()
    }
    assert {name: len(text) for name, text in lines.items() if len(text) > LINES_OF_A_FILE} == {}
    assert {name for name, text in lines.items() if any(len(line) > 124 for line in text)} == set()

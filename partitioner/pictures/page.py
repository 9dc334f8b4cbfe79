"""The report page: the data of one or two plans put into one HTML file that needs nothing else.

    page/page.html.j2        the frame: head, empty sections, data
    page/styles/*.css        looks, light and dark and printed
    page/scripts/*.js        one idea per file, put together in the order of their numbers
    page/vendor/             the layout library, unchanged (VENDORED.md)

The browser draws everything from the data, with text nodes only, so no name of a model can become markup. The page may
run its own script and style and do nothing else: its content security policy names both by hash and forbids the rest.

Data is packed first, and made of it again by ``page/scripts/00-report.js``:

    [7, 7, 7, 7, 9]                                         {"__runs__": [7, 4, 9, 1]}
    {"0:8": "waits for h of micro-batch 3 from rank 1"}     {"__texts__": ["waits for h of micro-batch # from rank 1"],
                                                             "__of__": {"0:8": [0, 3]}}
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from itertools import chain, groupby
from typing import Any

_ESCAPES = str.maketrans({character: f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"})
"""The characters that could end a script element or a line of script, and how JSON writes them."""
RUNS, TEXTS, OF = "__runs__", "__texts__", "__of__"
FEWEST = 8
"""Numbers and texts of which packing is worth while. By hand."""
_MICROBATCH = re.compile(r"(?<=micro-batch )\d+")


def render_page(data: Mapping[str, Any]) -> str:
    """Make the report page of ``data``: one or two plans, as the scripts in ``page/scripts`` read them."""
    from jinja2 import Environment, select_autoescape
    from markupsafe import Markup

    script, style = page_script(), page_style()
    template = Environment(autoescape=select_autoescape(default=True)).from_string(_text("page.html.j2"))
    return template.render(
        title=" and ".join(str(plan["title"]) for plan in data["plans"])[:200],
        policy=content_policy(script, style),
        # The three below are ours or escaped just here; everything else goes through autoescape.
        script=Markup(script),
        style=Markup(style),
        data=Markup(escaped_json(packed(data))),
    )


def escaped_json(data: Mapping[str, Any]) -> str:
    """Write data as JSON that may stand inside of a script element, whatever text it holds."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # A lone surrogate is legal in a Python string and in JSON, but not in a UTF-8 file.
    return text.translate(_ESCAPES).encode("utf-8", "replace").decode("utf-8")


def content_policy(script: str, style: str) -> str:
    """Write the content security policy: this script, this style, and nothing else from anywhere."""
    return (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )


@cache
def page_script() -> str:
    """Put the layout library and all scripts together: the text of the page's one script element."""
    library = _text("vendor/dagre.min.js").split("//# sourceMappingURL")[0]  # a map would be one more request
    licence = _text("vendor/dagre.LICENSE").replace("*/", "* /")
    own = "\n".join(_texts("scripts", ".js"))
    return f"\n/*! @dagrejs/dagre\n{licence}*/\n{library}\n(() => {{\n'use strict';\n{own}\n}})();\n"


@cache
def page_style() -> str:
    """Put all style sheets together: the text of the page's one style element."""
    return "\n" + "\n".join(_texts("styles", ".css"))


def _hash(text: str) -> str:
    """Write the hash of an inline element's text as a content security policy wants it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _texts(folder: str, ending: str) -> list[str]:
    """Read the files of a folder, in the order of their names."""
    found = (files(__package__) / "page" / folder).iterdir()
    return [
        file.read_text("utf-8")
        for file in sorted(found, key=lambda file: file.name)
        if file.name.endswith(ending)
    ]


def _text(name: str) -> str:
    return (files(__package__) / "page" / name).read_text("utf-8")


def packed(data: Any) -> Any:
    """Return data that is written in fewer bytes and means the same."""
    if isinstance(data, Mapping):
        if len(data) >= FEWEST and all(isinstance(value, str) for value in data.values()):
            return _packed_texts(data)
        return {key: packed(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        if len(data) >= FEWEST and all(type(value) in (int, float) for value in data):
            runs = [(value, len(list(row))) for value, row in groupby(data)]
            return {RUNS: list(chain(*runs))} if 2 * len(runs) < len(data) else data
        return [packed(value) for value in data]
    return data


def _packed_texts(data: Mapping[str, str]) -> dict[str, Any]:
    """Pack texts by name: each unlike one once, but for the number of its micro-batch."""
    number: dict[str, int] = {}
    of: dict[str, list[int]] = {}
    for key, text in data.items():
        found = _MICROBATCH.findall(text)
        if len(found) == 1 and "#" not in text:
            text = _MICROBATCH.sub("#", text)
            of[key] = [number.setdefault(text, len(number)), int(found[0])]
        else:
            of[key] = [number.setdefault(text, len(number))]
    return {TEXTS: list(number), OF: of}

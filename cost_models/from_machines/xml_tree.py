"""A small XML file as elements that know their line. A DOCTYPE is refused, so no entity is ever expanded."""

from __future__ import annotations

from dataclasses import dataclass, field
from xml.parsers import expat

from cost_models.errors import ClusterError
from cost_models.from_machines.seen import ToolText

MOST_DEPTH = 64
"""Deeper trees are none of machines: switches behind switches are a handful."""


@dataclass(eq=False)
class XmlElement:
    """An element: its attributes, its line, and what is in it."""

    tag: str
    attributes: dict[str, str]
    line: int
    parent: XmlElement | None = None
    children: list[XmlElement] = field(default_factory=list)

    def every(self, tag: str) -> list[XmlElement]:
        """List the elements of a name below this one, in the order of the file."""
        found, waiting = [], [*reversed(self.children)]
        while waiting:
            element = waiting.pop()
            if element.tag == tag:
                found.append(element)
            waiting += reversed(element.children)
        return found

    def above(self) -> list[XmlElement]:
        """List the elements that this one is in, the nearest first."""
        found, at = [], self.parent
        while at is not None:
            found.append(at)
            at = at.parent
        return found


def read_xml(text: ToolText, *tries: str) -> XmlElement:
    """Return the root; ``ClusterError`` names the line of what is no XML. ``tries``: what makes such a file."""
    root = XmlElement("", {}, 0)
    open_elements = [root]

    def start(tag: str, attributes: dict[str, str]) -> None:
        if len(open_elements) > MOST_DEPTH:
            raise text.wrong(
                parser.CurrentLineNumber, f"elements are nested deeper than {MOST_DEPTH}", *tries
            )
        inside = open_elements[-1]
        element = XmlElement(
            tag, attributes, parser.CurrentLineNumber, inside if inside is not root else None
        )
        inside.children.append(element)
        open_elements.append(element)

    def refuse(*_: object) -> None:
        raise text.wrong(
            parser.CurrentLineNumber, "it has a DOCTYPE, which no such file needs", "delete that line", *tries
        )

    parser = expat.ParserCreate()
    parser.StartElementHandler = start
    parser.EndElementHandler = lambda _: open_elements.pop()
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse("\n".join(text.lines).encode("utf-8", "replace"), True)
    except expat.ExpatError as error:
        raise text.wrong(error.lineno, f"it is no XML: {expat.ErrorString(error.code)}", *tries) from error
    except ClusterError:
        raise
    except (ValueError, LookupError) as error:  # an encoding that there is not
        raise text.wrong(1, str(error), *tries) from error
    return root.children[0]

"""JSON that ends too early is told from JSON that is wrong."""

import json

import pytest

from partitioner.record.file import was_cut_off

TEXT = json.dumps({"a": [1.5, -2e-5, True, None, False, 'é\\x"\u1234 ', 1e20, {"b": -0.5, "c": []}]})


@pytest.mark.parametrize("length", range(1, len(TEXT)))
def test_cut_anywhere(length: int) -> None:
    with pytest.raises(json.JSONDecodeError) as raised:
        json.loads(TEXT[:length])
    assert was_cut_off(raised.value), (TEXT[:length], raised.value)


@pytest.mark.parametrize("text", ["", "abc", '{"a": one}', '{"a" 1}', "[1] 2", '{"a": "\\x"}', "[1,, 2]"])
def test_wrong(text: str) -> None:
    with pytest.raises(json.JSONDecodeError) as raised:
        json.loads(text)
    assert not was_cut_off(raised.value)

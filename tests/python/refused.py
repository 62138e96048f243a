"""A call that must be refused: its error has one class and the form "[op] requirement; got value"."""

import re
from collections.abc import Callable

import pytest


def assert_refused(call: Callable[[], object], kind: type[Exception], part: str) -> None:
    """Checks the class of the error, not only that it derives from it; its form; and a part of its text."""
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    text = str(caught.value)
    assert re.match(r"\[[\w.]+\] .+; got .+", text, re.DOTALL), text
    assert part in text

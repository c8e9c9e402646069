"""JSON of any length, one value at a time, in the memory that one value and a megabyte take."""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final, cast

_DECODER: Final = json.JSONDecoder(strict=False)
_SPACE: Final = re.compile(r"[\s,]*")
_KEY_END: Final = re.compile(r"\s*:\s*")
_NEXT_OBJECT: Final = re.compile(r"\}\s*,\s*(?=\{)")
_LONGEST_VALUE: Final = 1 << 24
_TOKEN: Final = 32

Item = tuple[str, Any]


class JsonScanner:
    """Iterates over the parts of one JSON text: `(key, value)` of the top-level object.

    Arrays whose key is in `streamed` come element by element, each as `(key, element)`; so does a top-level array,
    under the first name of `streamed`. An element that is not valid JSON is left out and counted in `skipped`; a text
    that ends early gives all whole values, and `damage` says where it broke.
    """

    def __init__(self, pieces: Iterable[str], streamed: tuple[str, ...]) -> None:
        self._pieces = iter(pieces)
        self._streamed = streamed
        self._text = ""
        self._at = 0
        self._before = 0
        self._ended = False
        self.damage = ""
        self.skipped = 0

    def __iter__(self) -> Iterator[Item]:
        opening = self._peek()
        if opening == "[":
            self._at += 1
            yield from self._array(self._streamed[0])
        elif opening == "{":
            self._at += 1
            yield from self._object()
        else:
            self._break("this is no JSON object or array")

    @property
    def position(self) -> int:
        """Characters read so far."""
        return self._before + self._at

    def _object(self) -> Iterator[Item]:
        while True:
            sign = self._peek()
            if sign == "}":
                return
            key = self._value() if sign == '"' else None
            if not isinstance(key, str) or not self._colon():
                self._break("the file ends inside an object" if self._ended else "a key is expected")
                return
            if key in self._streamed and self._peek() == "[":
                self._at += 1
                yield from self._array(key)
                if self.damage:
                    return
                continue
            start = self.position
            value = self._value()
            if value is _NOTHING:
                self._break(f"the value of '{key}' at character {start:,} is cut off or broken")
                return
            yield key, value

    def _array(self, key: str) -> Iterator[Item]:
        read = 0
        while True:
            sign = self._peek()
            if sign == "]":
                self._at += 1
                return
            if not sign:
                self._break(f"'{key}' ends after {read:,} elements")
                return
            value = self._value()
            if value is not _NOTHING:
                read += 1
                yield key, value
            elif not self._resynchronise():
                self._break(f"'{key}' is cut off after {read:,} elements")
                return

    def _value(self) -> Any:
        """The value at the current place, `_NOTHING` where there is no whole and valid one."""
        failed_at = -1
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                place = error.pos - self._at
                settled = error.pos < len(self._text) - _TOKEN and not error.msg.startswith("Unterminated string")
                if (settled and place == failed_at) or len(self._text) - self._at > _LONGEST_VALUE or not self._more():
                    return _NOTHING
                failed_at = place
                continue
            if end >= len(self._text) and not isinstance(value, (dict, list, str)) and self._more():
                continue
            self._at = end
            return cast("Any", value)

    def _resynchronise(self) -> bool:
        """Go to the next object after a broken one."""
        self.skipped += 1
        while True:
            found = _NEXT_OBJECT.search(self._text, self._at + 1)
            if found:
                self._at = found.end()
                return True
            self._at = max(self._at, len(self._text) - 64)
            if not self._more():
                return False

    def _peek(self) -> str:
        """The next character that is no space or comma; empty at the end."""
        while True:
            found = _SPACE.match(self._text, self._at)
            self._at = found.end() if found else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _colon(self) -> bool:
        while self._at > len(self._text) - 2 * _TOKEN and self._more():
            pass
        found = _KEY_END.match(self._text, self._at)
        if found:
            self._at = found.end()
        return found is not None

    def _more(self) -> bool:
        """Read on; False at the end."""
        piece = next(self._pieces, None)
        if piece is None:
            self._ended = True
            return False
        self._before += self._at
        self._text = self._text[self._at :] + piece
        self._at = 0
        return True

    def _break(self, what: str) -> None:
        self.damage = f"{what} (character {self.position:,})"


class _Nothing:
    """Stands for the absence of a value, since null is one."""


_NOTHING: Final = _Nothing()

"""What a terminal may show of text that is not ours: of models, data, scripts and other machines.

A terminal obeys what it is sent: sequences that begin with an escape move the cursor, rename the window, or write into
the clipboard. Line ends and tabs are left as they are.
"""

from __future__ import annotations

import re
from typing import TextIO

# Controls, marks that turn the direction of writing or end a line, and halves of a pair, which no encoding has.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: object) -> str:
    """``text`` with what a terminal would obey written as ``\\uXXXX``, which is right in a string of JSON as well."""
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", str(text))


def say(*texts: object, sep: str = " ", file: TextIO | None = None) -> None:
    """``print`` of what is printable; to standard output if no ``file`` is given."""
    print(*map(printable, texts), sep=sep, file=file)

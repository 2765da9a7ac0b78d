"""Text from data as HTML: a completion must be able neither to become markup nor to hide."""

import html
from collections.abc import Iterable
from typing import Any

# Control characters and those that reorder the text around them, which a page would not show.
HIDDEN = {code: f"\\x{code:02x}" for code in (*range(32), 127) if chr(code) not in "\n\t"} | {
    code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
}


def escape(text: Any) -> str:
    """Text from data as HTML: escaped, characters that no page shows as their codes, lone surrogates replaced."""
    clean = str(text).replace("\r\n", "\n").translate(HIDDEN).encode("utf-8", "replace").decode("utf-8")
    return html.escape(clean, quote=True)


def cells(texts: Iterable[str]) -> str:
    """Cells of numbers in a table's row."""
    return "".join(f'<td class="n">{escape(text)}</td>' for text in texts)

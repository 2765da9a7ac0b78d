"""The collectives of a compiled program, from its text."""

import math
import re
from typing import NamedTuple

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_LINE = re.compile(rf"= (?P<type>.*?) (?P<kind>{'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8}


class Collective(NamedTuple):
    """One collective: its kind, the bytes of its result on a device, and the name of the operation it is made for. One
    in a loop's body stands once, however often the loop runs."""

    kind: str
    size: int
    name: str


def collectives(text: str) -> list[Collective]:
    """Those of an HLO module's text (`compiled.as_text()`)."""
    found = []
    for line in text.splitlines():
        if match := _LINE.search(line):
            arrays = _ARRAY.findall(match["type"])
            size = sum(_BYTES[kind] * math.prod(map(int, filter(None, dims.split(",")))) for kind, dims in arrays)
            name = re.search(r'op_name="([^"]*)"', line)
            found.append(Collective(match["kind"], size, name[1] if name else ""))
    return found

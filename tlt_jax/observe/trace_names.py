"""A trace for Perfetto whose slices say which named scope they belong to.

XLA names the slices of a CPU after its compiled operations (`fusion.3`). Which scope an operation came from stands in
the compiled programs, which the trace's own file (.xplane.pb, what xprof reads) holds beside the slices. It is in
protobuf's wire format; the few fields needed here are read by their numbers, in xplane.proto and hlo.proto.
"""

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PERFETTO = "perfetto_trace.json.gz"


def write_perfetto(folder: Path) -> Path:
    """Writes `PERFETTO` beside the trace that lies in `folder`; returns its path.

    A slice that is called after its compiled operation is called after where that came from instead, as in
    `forward_backward/transpose(jvp(attention))/dot_general`; every slice of one has that as its argument `scope`.
    """
    (source,), (planes,) = folder.glob("*.trace.json.gz"), folder.glob("*.xplane.pb")
    trace = json.loads(gzip.decompress(source.read_bytes()))
    trace.pop("metadata", None)  # Perfetto does not know it
    names = operation_names(planes.read_bytes())
    programs = _programs_of_runs(planes, {operation for _, operation in names})
    for event in trace["traceEvents"]:
        arguments = event.get("args") or {}
        operation = str(arguments.get("hlo_op"))
        program = programs.get(str(arguments.get("run_id")), str(arguments.get("hlo_module")))
        scope = names.get((program, operation))
        if scope:
            arguments["scope"] = scope
            if event["name"] == operation:
                event["name"] = scope
    path = folder / PERFETTO
    path.write_bytes(gzip.compress(json.dumps(trace).encode(), compresslevel=5))
    return path


def operation_names(planes: bytes) -> dict[tuple[str, str], str]:
    """{(program, operation): the path of named scopes it came from} of the programs in an XSpace.

    A program is called as in the trace, `jit_update(12)`, and also without its number, where the last one counts.
    """
    found = {}
    for plane in _all(planes, 1):
        if _text(plane, 2) != "/host:metadata":
            continue
        for entry in _all(plane, 4):  # a map's entry: key, value
            for metadata in _all(entry, 2):
                program = _text(metadata, 2)
                for proto in (held for stat in _all(metadata, 5) for held in _all(stat, 6)):
                    for operation, scope in _operations(proto):
                        found[program, operation] = found[program.rpartition("(")[0], operation] = scope
    return found


def _operations(proto: bytes) -> Iterator[tuple[str, str]]:
    """(operation, its scopes) of an HloProto: module (1), computations (3), instructions (2), metadata (7).

    A fusion without a name of its own has that of the last operation with one in the computation that it calls.
    """
    calling, ends = [], {}
    for computation in (part for module in _all(proto, 1) for part in _all(module, 3)):
        scope = ""
        for instruction in _all(computation, 2):
            own = "".join(_text(metadata, 2) for metadata in _all(instruction, 7))
            own = re.sub(r"^jit\([^)]*\)/", "", own)  # the outermost name is the jitted function's own
            if own:
                yield _text(instruction, 1), own
                scope = own
            else:
                calling.append((_text(instruction, 1), _numbers(instruction, 38)))  # ids of computations called
        ends.update(dict.fromkeys(_numbers(computation, 5), scope))
    for operation, called in calling:
        scope = next((ends[number] for number in called if ends.get(number)), "")
        if scope:
            yield operation, scope


def _programs_of_runs(planes: Path, operations: set[str]) -> dict[str, str]:
    """{the number of an execution: the program that ran}, for two programs may have one name."""
    from jax.profiler import ProfileData

    found = {}
    for plane in ProfileData.from_file(str(planes)).planes:
        for line in plane.lines:
            for event in line.events:
                stats: dict[str, Any] = dict(event.stats) if event.name in operations else {}
                if "run_id" in stats and "program_id" in stats:
                    found[str(stats["run_id"])] = f"{stats['hlo_module']}({stats['program_id']})"
    return found


def _all(message: bytes, number: int) -> Iterator[bytes]:
    """The values of a message's field that have a length of their own: texts, bytes, messages."""
    return (value for key, value in _fields(message) if key == number and isinstance(value, bytes))


def _numbers(message: bytes, number: int) -> list[int]:
    """The numbers of a message's field, one by one or packed."""
    found: list[int] = []
    for key, value in _fields(message):
        if key == number and isinstance(value, int):
            found.append(value)
        elif key == number and isinstance(value, bytes):
            at = 0
            while at < len(value):
                one, at = _varint(value, at)
                found.append(one)
    return found


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes | None]]:
    """(field, value) of a message; numbers of a fixed width, which are not needed here, are None."""
    at, end = 0, len(message)
    while at < end:
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            number, at = _varint(message, at)
            yield key >> 3, number
        elif kind == 2:
            size, at = _varint(message, at)
            yield key >> 3, message[at : at + size]
            at += size
        else:
            assert kind in (1, 5), kind
            yield key >> 3, None
            at += 8 if kind == 1 else 4


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number in base 128, least digit first, and where it ends."""
    value, shift = 0, 0
    while True:
        digit = message[at]
        value |= (digit & 127) << shift
        at, shift = at + 1, shift + 7
        if digit < 128:
            return value, at


def _text(message: bytes, number: int) -> str:
    return next((value.decode("utf-8", "replace") for value in _all(message, number)), "")

"""Python functions as prompt (signature and docstring) and completion (the rest of the body)."""

import ast
import warnings
from collections.abc import Iterator

Function = ast.FunctionDef | ast.AsyncFunctionDef


def extract_functions(source_text: str) -> list[tuple[str, str]]:
    """(prompt, body) of every function and method with a docstring and something after it, in source order.

    Functions inside functions are passed over; decorators are left out; the code is moved to column 0. The prompt
    ends right after the docstring's closing quotes; the body starts with a newline and indented code, keeps its
    comments and ends without a newline; prompt + body parses to the original's signature and statements, or the
    function is left out (a multi-line string that the move would change, say). Text that is not Python gives [].
    """
    source_text = source_text.replace("\r\n", "\n").replace("\r", "\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes and the like are the corpus's own affair
        tree = _parse(source_text)
        if tree is None:
            return []
        lines = source_text.encode("utf-8").split(b"\n")  # ast counts columns in UTF-8 bytes
        pairs = (_extract(function, lines) for function in _functions(tree))
        return [pair for pair in pairs if pair is not None]


def _parse(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _functions(root: ast.AST) -> Iterator[Function]:
    """Functions below `root` (in classes, `if`, `try` and so on) in their order, not looking inside functions."""
    waiting = [root]
    while waiting:  # not by recursion: a long chain of `elif` nests as deep as it is long
        node = waiting.pop()
        if isinstance(node, Function):
            if ast.get_docstring(node, clean=False) is not None and len(node.body) > 1:
                yield node
        elif not isinstance(node, ast.expr):
            waiting += reversed(list(ast.iter_child_nodes(node)))


def _extract(function: Function, lines: list[bytes]) -> tuple[str, str] | None:
    docstring, last = function.body[0], function.body[-1]
    assert docstring.end_lineno and docstring.end_col_offset and last.end_lineno and last.end_col_offset
    indent = lines[function.lineno - 1][: function.col_offset]
    after_docstring = lines[docstring.end_lineno - 1][docstring.end_col_offset :]
    after_last = lines[last.end_lineno - 1][last.end_col_offset :]
    if indent.strip() or after_docstring.strip():
        return None  # something else on the line: a comment, a statement, a closing bracket
    if after_last.strip() and not after_last.lstrip().startswith(b"#"):
        return None
    head = lines[function.lineno - 1 : docstring.end_lineno]
    head[-1] = head[-1][: docstring.end_col_offset]
    rest = lines[docstring.end_lineno : last.end_lineno]
    while rest and not rest[0].strip():
        rest = rest[1:]
    prompt = b"\n".join(line.removeprefix(indent) for line in head).decode("utf-8")
    body = "\n" + b"\n".join(line.removeprefix(indent) for line in rest).decode("utf-8").rstrip()
    return (prompt, body) if _same(function, prompt + body) else None


def _same(function: Function, text: str) -> bool:
    """Whether `text` is one function with the original's signature and its statements after the docstring."""
    tree = _parse(text)
    if tree is None or len(tree.body) != 1:
        return False
    moved = tree.body[0]
    try:
        return isinstance(moved, Function) and type(moved) is type(function) and _essence(moved) == _essence(function)
    except RecursionError:  # an expression too deep to compare
        return False


def _essence(function: Function) -> list[str | None]:
    returns = ast.dump(function.returns) if function.returns else None
    generics = [ast.dump(node) for node in getattr(function, "type_params", [])]
    return [function.name, ast.dump(function.args), returns, *generics, *(ast.dump(node) for node in function.body[1:])]

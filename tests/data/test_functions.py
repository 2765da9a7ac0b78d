"""Functions out of source text."""

import ast
import inspect
import textwrap

from tlt_jax.data.functions import extract_functions


def one(source):
    [pair] = extract_functions(textwrap.dedent(source))
    return pair


def test_prompt_and_body():
    prompt, body = one('''
        @decorated(1)
        def f(x: int = 1) -> int:
            """Adds."""

            # why
            y = x + 1  # how
            return y  # last
    ''')
    assert prompt == 'def f(x: int = 1) -> int:\n    """Adds."""'
    assert body == "\n    # why\n    y = x + 1  # how\n    return y  # last"


def test_methods_move_to_column_0():
    prompt, body = one('''
        class A:
            if True:
                async def f(self):
                    """One.

                    Two é.
                    """
                    if self:

                        return 'é'
    ''')
    assert prompt == 'async def f(self):\n    """One.\n\n    Two é.\n    """'
    assert body == "\n    if self:\n\n        return 'é'"


def test_what_is_left_out():
    source = textwrap.dedent('''
        def no_docstring():
            return 1
        def only_docstring():
            """Doc."""
        def formatted():
            f"""Doc."""
            return 1
        def one_line(): "Doc."; return 1
        def commented():
            """Doc."""  # noqa
            return 1
        class A:
            def text(self):
                """Doc."""
                return """a
                b"""
        def outer():
            def inner():
                """Doc."""
                return 1
            class B:
                def method(self):
                    """Doc."""
                    return 1
            return inner
    ''')
    assert extract_functions(source) == []


def test_a_string_that_does_not_move_stays():
    _, body = one('class A:\n    def f(self):\n        """Doc."""\n        return """a\nb"""\n')
    assert body == '\n    return """a\nb"""'
    _, body = one('def f():\n    """Doc."""\n    return """a\n    b"""\n')
    assert body == '\n    return """a\n    b"""'


def test_tabs_carriage_returns_and_form_feeds():
    assert one('class A:\r\n\tdef f(self):\r\n\t\t"""Doc."""\r\n\t\treturn 1\r\n') == (
        'def f(self):\n\t"""Doc."""', "\n\treturn 1",
    )  # fmt: skip
    assert one('\f\ndef f():\n    "Doc."\n\f\n    return 1\n') == ('def f():\n    "Doc."', "\n    return 1")


def test_text_that_is_not_python():
    for text in ["", "def f(:", "x\0y", "((" * 5000, "# Title\n\nsome prose, and 'quotes\n"]:
        assert extract_functions(text) == []


def test_expressions_too_deep_to_compare_do_no_harm():
    deep = "+".join(["x"] * 3000)
    assert len(extract_functions(f'def f(x):\n    """Doc."""\n    return {deep}\n')) in (0, 1)


def test_on_a_real_file():
    source = inspect.getsource(textwrap)
    pairs = extract_functions(source)
    assert len(pairs) > 8
    for prompt, body in pairs:
        [function] = ast.parse(prompt + body).body
        assert ast.get_docstring(function) and len(function.body) > 1
        assert prompt.startswith("def ") and prompt[-1] in "\"'"
        assert body.startswith("\n ") and body == body.rstrip()


def test_a_long_chain_of_elif_is_read():
    chain = "if x == 0:\n    pass\n" + "".join(f"elif x == {i}:\n    pass\n" for i in range(1, 1200))
    function = 'def f(x):\n    """Doc."""\n    return x\n'
    assert extract_functions(function + chain) in ([('def f(x):\n    """Doc."""', "\n    return x")], [])

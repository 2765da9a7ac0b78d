"""The entry: `python -m tlt_jax.main --config X [key=value ...]`; `tlt VERB ...` is the same program.

Exit codes: 0 done; 1 our own fault (the traceback is in log.txt); 2 the user's input is wrong (one message, no
traceback); 130 and 143 interrupted by SIGINT and SIGTERM, after saving.
"""

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence

from tlt_jax.cli.options import FAULT, USER_ERROR
from tlt_jax.config import ConfigError

VERBS = {
    "run": "run the stages of a config (the default verb)",
    "validate": "check a config; touches no device",
    "report": "write the report of a run directory again",
    "export": "write a run's model as a Hugging Face directory",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] not in VERBS:
        if words[:1] in (["-h"], ["--help"]) or not words:
            return _overview()
        if not words[0].startswith("-") and "=" not in words[0]:
            print(f"error: unknown verb {words[0]!r}; expected one of {', '.join(VERBS)}", file=sys.stderr)
            return USER_ERROR
        words = ["run", *words]
    verb = importlib.import_module(f"tlt_jax.cli.{words[0]}")
    parser = argparse.ArgumentParser(
        prog=f"tlt {words[0]}",
        description=verb.__doc__,
        epilog=verb.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add(parser)
    arguments = parser.parse_intermixed_args(words[1:])
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns there of what is meant
    try:
        return verb.main(arguments)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return 130
    except Exception:
        # The handler that writes log.txt is gone by now if the run had one; it wrote the traceback itself.
        logging.getLogger("tlt_jax").exception("tlt_jax failed; this is a fault of ours")
        return FAULT


def _overview() -> int:
    print(__doc__)
    print("verbs:")
    for verb, text in VERBS.items():
        print(f"  {verb:9} {text}")
    print("\n`tlt VERB --help` shows a verb's options and examples.")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The entry: `python -m tlt_jax.main --config X [key=value ...]`; `tlt VERB ...` is the same program.

Exit codes: 0 done; 1 our own fault (the traceback is in log.txt); 2 the user's input or the machine (a full disk, too
little memory) does not allow it: one message, no traceback; 3 another process of the run was lost; 130 and 143
interrupted by SIGINT and SIGTERM, after saving.
"""

import contextlib
import difflib
import errno
import os
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from tlt_jax.cli.codes import DONE, FAULT, INTERRUPTED, USER_ERROR

VERBS = {
    "run": "run the stages of a config (the default verb)",
    "validate": "check a config; touches no device",
    "report": "write the report of a run directory again",
    "export": "write a run's model as a Hugging Face directory",
    "launch": "start a config on a cluster",
}


# What JAX's and Orbax's errors say where memory or disk do not suffice; with one of the latter words it is the disk.
EXHAUSTED = ("RESOURCE_EXHAUSTED", "Failed writing", "No space left")
JAX_REFUSES = ("for environment 'JAX_", "for JAX flag")  # a variable of the environment, when it is imported
DISK = ("local file", "Failed writing", "No space left")

# Of the system's errors, those that say what it does not allow.
REFUSALS = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.EMFILE,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.EIO,
)


def entry() -> NoReturn:
    """The program: ends with the exit code of `main`."""
    sys.unraisablehook = _unraisable
    code = main()
    hosts = sys.modules.get("tlt_jax.parallel.hosts")
    alone = hosts is not None and hosts.failed.is_set()
    waiting = code in (FAULT, USER_ERROR) and any(
        not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()
    )
    if alone or waiting:
        sys.stdout.flush()
        sys.stderr.flush()
        # Before JAX waits for the other processes, which are gone too, or Orbax's threads, after a save that failed,
        # for each other: for five minutes.
        os._exit(code)
    sys.exit(code)


def _unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    """What nobody can catch. Where a save fails, TensorStore's threads go on to call an event loop that Orbax has
    closed by then, once for each array: that stands in log.txt, and the save's own error is told."""
    error = unraisable.exc_value
    if isinstance(error, RuntimeError) and str(error) == "Event loop is closed":
        import logging

        logging.getLogger("tlt_jax").debug("after a save that failed", exc_info=error)
    else:
        sys.__unraisablehook__(unraisable)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        return _overview()
    if words[0] == "--version":
        return _version()
    if words[0] not in VERBS:
        if not words[0].startswith("-") and "=" not in words[0]:
            near = difflib.get_close_matches(words[0], VERBS, 1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            return _refuse(f"unknown verb {words[0]!r}; expected one of {', '.join(VERBS)}{meant}")
        words = ["run", *words]
    try:
        return _run_verb(words[0], words[1:])
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        import logging

        log, message = logging.getLogger("tlt_jax"), _told(error)
        # The handler that writes log.txt is still there if the run had one.
        if message is None:
            log.exception("tlt_jax failed; this is a fault of ours")
            return FAULT
        log.debug("refused", exc_info=error)
        return _refuse(message)


def _run_verb(name: str, words: list[str]) -> int:
    # Imported here, so that an interruption while modules load is handled too.
    import argparse
    import importlib
    import logging

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            sys.exit(_refuse(f"{message}; see {self.prog} --help"))

    verb = importlib.import_module(f"tlt_jax.cli.{name}")
    parser = Parser(
        prog=f"tlt {name}",
        description=verb.__doc__,
        epilog=verb.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add(parser)
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns there of what is meant
    return verb.main(parser.parse_intermixed_args(words))


def _told(error: Exception) -> str | None:
    """What to tell the user of an error that is not ours: the input's, the disk's, the memory's; None if it is ours."""
    from tlt_jax.config import ConfigError

    if isinstance(error, ConfigError):
        return str(error)
    text = " ".join(str(error).split())
    if isinstance(error, ValueError) and any(words in text for words in JAX_REFUSES):
        return f"JAX does not start: {text}; expected an environment whose JAX_* variables it can read"
    if isinstance(error, OSError) and error.errno in REFUSALS:
        return text.removeprefix(f"[Errno {error.errno}] ")
    if isinstance(error, MemoryError) or any(words in text for words in EXHAUSTED):
        if any(words in text for words in DISK):
            return f"the disk is full, or lets no more be written; the same command goes on once it does ({text[:300]})"
        return f"out of memory; --dry-run shows what the config needs ({text[:300]})"
    return None


def _refuse(message: str) -> int:
    # Nobody may be there to read it: the exit code says as much.
    with contextlib.suppress(OSError):
        print(f"error: {message}", file=sys.stderr, flush=True)
    return USER_ERROR


def _overview() -> int:
    print("tlt_jax: trains a language model in three stages, from one config\n")
    print("  python -m tlt_jax.main --config X [key=value ...]   runs it; `tlt` is the same program\n")
    print("verbs:")
    for verb, text in VERBS.items():
        print(f"  {verb:9} {text}")
    print("\n`tlt VERB --help` shows a verb's options and examples. Exit codes: 0 done; 1 a fault of ours; 2 the input")
    print("or the machine does not allow it; 3 another process was lost; 130 and 143 interrupted, after saving.")
    return DONE


def _version() -> int:
    from tlt_jax import __version__

    print(f"tlt_jax {__version__}")
    return DONE


if __name__ == "__main__":
    entry()

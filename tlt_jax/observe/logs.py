"""The log of a run: everything to log.txt, the messages to the console."""

import io
import logging
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

LOGGER_NAME = "tlt_jax"
LIBRARIES = "absl"  # where Orbax logs
_FILE_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


class LogFile(logging.FileHandler):
    """The file of a log; where it cannot be written (a full disk), that is said once, and the run's own files decide
    whether it goes on."""

    told = False

    def _open(self) -> io.TextIOWrapper:
        # Without a buffer, which would keep what could not be written, and fail again with it at the end.
        raw: Any = io.FileIO(self.baseFilename, "a")
        return io.TextIOWrapper(raw, encoding=self.encoding, errors=self.errors, write_through=True)

    def handleError(self, record: logging.LogRecord) -> None:
        """Say that a line is lost."""
        if not self.told:
            self.told = True
            print(f"warning: {self.baseFilename} cannot be written: {sys.exc_info()[1]}", file=sys.stderr)


class LastingConsole(Console):
    """A console whose reader may leave (`| head`): the run goes on without it."""

    def on_broken_pipe(self) -> None:
        """Print nothing from here on."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for whoever else flushes it at the end


CONSOLE = LastingConsole()


class ConsoleHandler(logging.Handler):
    """Prints the message alone by rich, above a live progress bar if one is shown; tracebacks stay in log.txt."""

    def __init__(self, console: Console, level: int = logging.INFO):
        super().__init__(level)
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record; a failure to print is handled as the logging module handles it."""
        try:
            self.console.print(_line(record), soft_wrap=True)
        except Exception:
            self.handleError(record)


def log_errors_alone() -> None:
    """Send errors of "tlt_jax" to the console, and nothing to a file: for processes that leave writing to another."""
    _connect(ConsoleHandler(CONSOLE, logging.ERROR))


def set_up_logging(run_dir: str | Path, console: Console | None = None) -> logging.Logger:
    """Send the logger "tlt_jax" to `<run_dir>/log.txt` and to the console; returns the logger.

    The file takes timestamps, levels and tracebacks and is appended to; the console takes messages from INFO up.
    `console` defaults to the one that `Progress` uses too, so that lines and bars don't collide. Calling
    it again replaces the handlers.
    """
    run_dir = Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    file_handler = LogFile(run_dir / "log.txt", encoding="utf-8", errors="backslashreplace")
    file_handler.setFormatter(logging.Formatter(_FILE_FORMAT))
    _connect(ConsoleHandler(console or CONSOLE), file_handler)
    logger = logging.getLogger(LOGGER_NAME)
    logger.setLevel(logging.DEBUG)
    return logger


def close_logging() -> None:
    """Close and remove the handlers of "tlt_jax" and of its libraries, whose records reach the root logger again."""
    for name in (LOGGER_NAME, LIBRARIES):
        logger = logging.getLogger(name)
        for handler in list(logger.handlers):
            if isinstance(handler, logging.FileHandler | ConsoleHandler):
                logger.removeHandler(handler)
                handler.close()
        logger.propagate = True


def _connect(console: ConsoleHandler, *others: logging.Handler) -> None:
    """In the place of earlier handlers. A library's error that comes with a traceback goes to the `others` alone: it
    is raised too, and whoever catches it says so once, where Orbax's threads would log it five times over."""
    close_logging()
    raised = ConsoleHandler(console.console, console.level)
    raised.addFilter(lambda record: record.exc_info is None)
    for name, handlers in ((LOGGER_NAME, (console, *others)), (LIBRARIES, (raised, *others))):
        logger = logging.getLogger(name)
        logger.propagate = False  # a root handler of some library would print every message a second time
        for handler in handlers:
            logger.addHandler(handler)


def _line(record: logging.LogRecord) -> Text:
    line = Text()
    if record.levelno >= logging.ERROR:
        line.append("error: ", style="bold red")
    elif record.levelno >= logging.WARNING:
        line.append("warning: ", style="bold yellow")
    return line.append(record.getMessage())

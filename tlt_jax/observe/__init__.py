"""What a run leaves behind: metrics, samples, logs, progress in the terminal, trackers, and the report.

Nothing imported here imports JAX or, at module level, matplotlib or a tracker's library: the report verb answers at
once. What needs JAX (profile, utilisation) is imported from its own module.
"""

from tlt_jax.observe.files import read_json, sweep_temporary, to_json, write_json, write_text_atomically
from tlt_jax.observe.logs import close_logging, log_errors_alone, set_up_logging
from tlt_jax.observe.metrics import MetricsLog, NoLog, read_rows
from tlt_jax.observe.progress import Progress
from tlt_jax.observe.report import build_report, write_report
from tlt_jax.observe.trackers import TRACKERS, check_trackers, open_trackers
from tlt_jax.observe.tracking import Tracker

__all__ = [
    "TRACKERS",
    "MetricsLog",
    "NoLog",
    "Progress",
    "Tracker",
    "build_report",
    "check_trackers",
    "close_logging",
    "log_errors_alone",
    "open_trackers",
    "read_json",
    "read_rows",
    "set_up_logging",
    "sweep_temporary",
    "to_json",
    "write_json",
    "write_report",
    "write_text_atomically",
]

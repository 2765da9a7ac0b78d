"""The account of a run's time in the report: on what the seconds of all starts went, and the share that computed."""

from collections.abc import Mapping
from typing import Any

from tlt_jax.observe.figures import show_seconds, show_value

# The kinds of time, in the report's words and colour (style.py). Every second of a run is of one of them.
KINDS = {
    "computing": ("steps, rollouts, rewards, updates, evaluation", 3),
    "compiling": ("JAX tracing and compiling", 6),
    "loading": ("start-up, data, models", 1),
    "saving": ("checkpoints and export, while they held the run", 5),
    "waiting": ("for data, and for other processes", 4),
    "restarts": ("lost to restarts: steps done again, and start-up", 2),
}

MOST_SECONDS = 1e12  # more than any run has


def account_of(seconds: Mapping[str, Any]) -> dict[str, Any] | None:
    """{"seconds": by kind, "whole": their sum, "goodput": computing / whole}; None where nothing was recorded."""
    kinds = {kind: sound_seconds(seconds.get(kind)) for kind in KINDS}
    whole = sum(kinds.values())
    return {"seconds": kinds, "whole": whole, "goodput": kinds["computing"] / whole} if whole > 0 else None


def sound_seconds(value: Any) -> float:
    """Seconds that a file holds; 0 where somebody wrote something else there."""
    return float(value) if isinstance(value, int | float) and 0 < value < MOST_SECONDS else 0.0


def render_account(account: dict[str, Any] | None) -> str:
    """The account as a bar and a table; "" where there is none."""
    if account is None:
        return ""
    seconds, whole = account["seconds"], account["whole"]
    parts = "".join(
        f'<i style="width:{100 * seconds[kind] / whole:.2f}%;background:var(--c{colour})" title="{kind}"></i>'
        for kind, (_, colour) in KINDS.items()
        if seconds[kind]
    )
    rows = "".join(
        f'<tr><th scope="row"><span class="dot" style="background:var(--c{colour})"></span>{kind}</th><td>{words}</td>'
        f'<td class="n">{show_seconds(seconds[kind])}</td><td class="n">{_share(seconds[kind] / whole)}</td></tr>'
        for kind, (words, colour) in KINDS.items()
    )
    rows += (
        f'<tr class="sum"><th scope="row">All</th><td>of every start</td><td class="n">{show_seconds(whole)}</td>'
        '<td class="n">100%</td></tr>'
    )
    return (
        f"<h3>The whole run: goodput {_share(account['goodput'])}</h3>"
        f'<div class="bars"><span>All starts</span><span>{show_seconds(whole)}</span>'
        f'<span class="bar" style="width:100%">{parts}</span></div>'
        '<div class="scroll" tabindex="0"><table><thead><tr><th scope="col">Kind</th><th scope="col">On</th>'
        f'<th scope="col" class="n">Time</th><th scope="col" class="n">Share</th></tr></thead><tbody>{rows}</tbody>'
        '</table></div><p class="note">From the opening of the run directory to its end, all starts together; of a'
        " start that was killed, up to its last row. Goodput is the share that computed.</p>"
    )


def _share(share: float) -> str:
    return show_value("share_fraction", share)

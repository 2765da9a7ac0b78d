"""The report's sections on why a run was as fast as it was: its health, and what was compiled."""

from typing import Any

from tlt_jax.observe.figures import show_count, show_number, show_size, show_value
from tlt_jax.observe.markup import cells, escape

MEASURED = ("draft_length", "round_ms", "tokens_per_call", "tokens_per_second")
MEMORY = ("arguments", "temporaries", "output", "aliased")


def health_section(phases: list[dict[str, Any]]) -> str:
    """The hints that were given, by phase; "" for a run that looked for none."""
    looked = [phase for phase in phases if phase["health"] is not None]
    if not looked:
        return ""
    hints = [(phase["label"], hint) for phase in looked for hint in phase["health"]]
    items = "".join(
        f"<li>{escape(label)}: <strong>{escape(hint['name'])}</strong>: {escape(hint['text'])}.</li>"
        for label, hint in hints
    )
    found = (
        f'<div class="warning"><ul>{items}</ul></div>'
        if hints
        else '<p class="none">Nothing was found: not input-bound, memory-bound or recompiling, no loss that does not'
        " fall.</p>"
    )
    return f'<section><h2 id="health">Health</h2>{found}</section>'


def programs_section(phases: list[dict[str, Any]]) -> str:
    """What each compiled step computes and takes, and the largest arrays of each phase's state."""
    rows, kept = [], []
    for phase in phases:
        for program in phase["programs"] or []:
            name = program["name"] + (f", {program['shape']}" if program.get("shape") else "")
            rows.append(
                f'<tr><th scope="row">{escape(phase["label"])}</th><td>{escape(name)}</td>'
                + cells([show_count(program.get("flops")), *(show_size(program.get(part)) for part in MEMORY)])
                + "</tr>"
            )
        buffers = [f"{buffer['name']} {show_size(buffer.get('bytes'))}" for buffer in phase["buffers"] or []]
        if buffers:
            kept.append(f"<li>{escape(phase['label'])}: {escape(', '.join(buffers))}</li>")
    if not rows:
        return ""
    head = "".join(f'<th scope="col" class="n">{part}</th>' for part in ("FLOPs", *MEMORY))
    table = (
        f'<div class="scroll" tabindex="0"><table><thead><tr><th scope="col">Phase</th>'
        f'<th scope="col">Step, shape of its batch</th>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )
    note = (
        '<p class="note">One call on one device, as the compiler says: of a loop, layers or decoded tokens, it counts'
        " the FLOPs of one round. Aliased bytes are output that takes its argument's place.</p>"
    )
    state = f"<details><summary>Largest arrays of the state, on one device</summary><ul>{''.join(kept)}</ul></details>"
    return f'<section><h2 id="programs">Compiled steps</h2>{table}{note}{state if kept else ""}</section>'


def drafting_section(phases: list[dict[str, Any]]) -> str:
    """What each choice of drafter and draft length cost and gave, at each size of the pool; "" where nothing was
    decoded."""
    tables = [phase["drafting"] for phase in phases if phase["drafting"]]
    if not tables:
        return ""
    shown = sorted(tables[-1], key=lambda row: (-(row.get("size") or 0), -(row.get("tokens_per_second") or 0)))
    rows = "".join(
        f'<tr><th scope="row">{show_number(row.get("size"))}</th><td>{escape(row["drafter"])}</td>'
        + cells(show_number(row.get(name)) for name in MEASURED)
        + cells([show_value("_fraction", row.get("share"))])
        + "</tr>"
        for row in shown
    )
    names = ("Drafts", "Round, ms", "Tokens a call", "Tokens/s of a full pool", "Share of rounds")
    head = "".join(f'<th scope="col" class="n">{name}</th>' for name in names)
    return (
        '<section><h2 id="drafting">Drafting</h2><div class="scroll" tabindex="0"><table><thead><tr>'
        f'<th scope="col">Pool</th><th scope="col">Drafter</th>{head}</tr></thead><tbody>{rows}</tbody>'
        '</table></div><p class="note">Over the whole run: the median time of a round of drafts and their verification,'
        " and the tokens that a sequence is expected to gain from one, by the drafts that were kept so far."
        " `auto` goes by their ratio.</p></section>"
    )

"""The report's style sheet: one column on a phone, quiet tables, light, dark and paper."""

CSS = """
:root {
  color-scheme: light dark;
  --ink: #1c2024; --soft: #5b6470; --paper: #ffffff; --panel: #f6f7f9; --rule: #dfe3e8; --grid: #e3e6ea;
  --c1: #0072b2; --c2: #d55e00; --c3: #009e73; --c4: #b0568c; --c5: #b87f00; --c6: #3a9bd6; --c0: #9aa3ad;
  --good: #00704f; --bad: #a63f00; --warn: #fff4dc; --warn-rule: #e69f00;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e4e7eb; --soft: #9aa5b1; --paper: #14171a; --panel: #1c2126; --rule: #323a42; --grid: #2b3239;
    --c1: #56a8e0; --c2: #ef7f3a; --c3: #2cc295; --c4: #dd8fbd; --c5: #e6b23c; --c6: #8fcdf5; --c0: #6b7682;
    --good: #3ccb9d; --bad: #f2935a; --warn: #2e2713;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0 auto; padding: 2.5rem 1.25rem 4rem; max-width: 70rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", sans-serif;
}
header p { margin: .25rem 0 0; color: var(--soft); }
.over { font-size: .8rem; letter-spacing: .08em; text-transform: uppercase; color: var(--soft); }
h1 { font-size: 2.1rem; line-height: 1.15; margin: .2rem 0 0; letter-spacing: -.015em; overflow-wrap: anywhere; }
h2 { font-size: 1.4rem; line-height: 1.2; margin: 3.25rem 0 .9rem; letter-spacing: -.01em; }
h3 { font-size: 1.05rem; margin: 2rem 0 .6rem; }
h2 + .meta { margin-top: -.6rem; }
.meta, .detail, figcaption, .note { color: var(--soft); font-size: .875rem; }
a { color: var(--c1); }
nav { margin: 1.25rem 0 0; font-size: .9rem; display: flex; flex-wrap: wrap; gap: .25rem 1.1rem; }
nav a { text-decoration: none; }
nav a:hover { text-decoration: underline; }
.warning { margin: 1.5rem 0 0; padding: .75rem 1rem; background: var(--warn); border-left: 4px solid var(--warn-rule); }
.warning ul { margin: .35rem 0 0; padding-left: 1.2rem; }
.warning li { overflow-wrap: anywhere; }

.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(12rem, 1fr)); gap: 1px; margin: 2rem 1px 0; }
.figures > div { box-shadow: 0 0 0 1px var(--rule); padding: 1rem 1.1rem 1.1rem; }
.figures h2 { font-size: .875rem; font-weight: 600; margin: 0; letter-spacing: 0; }
.figures .big { font-size: 1.65rem; line-height: 1.2; font-weight: 650; margin: .35rem 0 .3rem; white-space: nowrap;
  letter-spacing: -.02em; font-variant-numeric: tabular-nums; }
.figures .from { color: var(--soft); font-weight: 400; font-size: 1.15rem; }
.figures .detail { margin: 0; font-size: .8125rem; line-height: 1.4; }

table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .4rem .75rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--rule); }
th:first-child, td:first-child { padding-left: 0; }
th:last-child, td:last-child { padding-right: 0; }
thead th { color: var(--soft); font-weight: 600; font-size: .8125rem; border-bottom-color: var(--soft);
  vertical-align: bottom; }
td.n, th.n { text-align: right; white-space: nowrap; }
.facts { display: grid; grid-template-columns: 1fr 1fr; gap: 0 2.5rem; margin: 0; font-size: .9rem;
  font-variant-numeric: tabular-nums; }
.facts > div { display: flex; gap: 1rem; padding: .4rem 0; border-bottom: 1px solid var(--rule); min-width: 0; }
.facts .wide { grid-column: 1 / -1; }
.facts dt { flex: 0 0 7.5rem; color: var(--soft); }
.facts dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
.all { width: 100%; }
tbody th { font-weight: 400; overflow-wrap: anywhere; }
.all tr.group th { font-weight: 650; padding-top: 1.3rem; }
.scroll { overflow-x: auto; }
.scroll table { width: 100%; }
.scroll th, .scroll td { white-space: nowrap; }
.scroll th:first-child { position: sticky; left: 0; background: var(--paper); padding-right: .9rem; }
tr.sum > *, tr.sum > th { font-weight: 650; border-bottom: 0; }

.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(18.5rem, 100%), 1fr)); gap: 1.6rem 1.75rem;
  margin: 1.4rem 0 0; }
figure { display: flex; flex-direction: column; margin: 0; min-width: 0; break-inside: avoid; }
figcaption { margin-bottom: .35rem; line-height: 1.35; }
figcaption b { display: block; color: var(--ink); font-size: .9375rem; font-weight: 600; }
.key { display: inline-block; margin-right: .9rem; white-space: nowrap; font-variant-numeric: tabular-nums; }
.key svg { width: 22px; height: 8px; margin-right: .35rem; vertical-align: 1px; }
.chart { display: block; width: 100%; margin-top: auto; height: auto; overflow: visible; color: var(--soft);
  font-family: inherit; }
.chart * { stroke-linejoin: round; stroke-linecap: butt; }

.bars { display: grid; grid-template-columns: max-content max-content 1fr; gap: .45rem .9rem; align-items: center;
  font-size: .9rem; font-variant-numeric: tabular-nums; }
.bars > span:nth-child(3n + 2) { text-align: right; }
.bar { display: flex; height: 1.15rem; min-width: 3px; overflow: hidden; }
.bar i { display: block; height: 100%; border-right: 1px solid var(--paper); }
.legend { margin: .9rem 0 1.4rem; font-size: .875rem; color: var(--soft); display: flex; flex-wrap: wrap;
  gap: .2rem 1.1rem; }
.dot { display: inline-block; width: .7em; height: .7em; margin-right: .4em; }
.bar i, .dot { print-color-adjust: exact; -webkit-print-color-adjust: exact; }

.sample { margin: 1.2rem 0 0; padding: 1rem 1.1rem; background: var(--panel); border-radius: 4px; }
.sample h4 { margin: 0 0 .3rem; font-size: .8125rem; font-weight: 600; color: var(--soft); }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; margin-top: .9rem; }
.pair > div { min-width: 0; }
pre { margin: 0; font: .8125rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; tab-size: 4; }
.pair pre, .sample details pre { padding: .6rem .7rem; background: var(--paper); border: 1px solid var(--rule);
  min-height: 2.7rem; }
.tag { font-weight: 600; }
.tag.yes { color: var(--good); }
.tag.no { color: var(--bad); }
.none { color: var(--soft); font-style: italic; }
details { margin-top: .8rem; font-size: .875rem; }
summary { cursor: pointer; color: var(--soft); }
details pre { margin-top: .5rem; }
.notes { max-width: 46rem; padding-left: 1.2rem; }
.notes li { margin: .4rem 0; }
footer { margin-top: 3rem; padding-top: .8rem; border-top: 1px solid var(--rule); color: var(--soft);
  font-size: .8125rem; }

@media (max-width: 40rem) {
  body { padding: 1.5rem 1rem 3rem; }
  h1 { font-size: 1.7rem; }
  h2 { margin-top: 2.5rem; }
  .figures { grid-template-columns: 1fr; }
  .pair { grid-template-columns: 1fr; }
  .sample { margin-left: -1rem; margin-right: -1rem; border-radius: 0; padding: 1rem; }
  .facts { grid-template-columns: 1fr; }
  th, td { padding: .4rem .4rem; }
  .bars { grid-template-columns: 1fr max-content; gap: .15rem .6rem; }
  .bars .bar { grid-column: 1 / -1; margin-bottom: .5rem; }
  .charts { gap: 1.9rem; }
}
@media print {
  :root {
    color-scheme: light;
    --ink: #000; --soft: #444; --paper: #fff; --panel: #fff; --rule: #bbb; --grid: #ddd; --warn: #fff;
    --c1: #0072b2; --c2: #d55e00; --c3: #009e73; --c4: #b0568c; --c5: #b87f00; --c6: #3a9bd6; --c0: #9aa3ad;
  }
  @page { margin: 16mm 14mm; }
  body { max-width: none; padding: 0; font-size: 10.5pt; }
  nav { display: none; }
  h2, h3, h4 { break-after: avoid; }
  .sample, .figures > div, tr, .bars { break-inside: avoid; }
  .sample { border: 1px solid var(--rule); }
  .charts { grid-template-columns: repeat(3, 1fr); }
  .scroll { overflow: visible; }
}
"""

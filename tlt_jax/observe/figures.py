"""Which metrics are drawn together, how a metric is called, and how its values are written."""

from collections.abc import Iterable
from dataclasses import dataclass

PHASE_LABELS = {
    ("pretrain", "pretrain"): "Pretrain",
    ("finetune", "warmup"): "Finetune: warm-up",
    ("finetune", "policy"): "Finetune: policy",
    ("align", "reward_model"): "Align: reward model",
    ("align", "ppo"): "Align: PPO",
    ("distill", "drafters"): "Distill: drafters",
}
PERCENT_ENDINGS = ("_fraction", "accuracy", "acceptance_rate", "valid_share", "mfu")
RL_PHASES = ("policy", "ppo")


@dataclass(frozen=True)
class Chart:
    """A drawing: its title, and the metrics on it with their words for the legend.

    `marks` are levels drawn as thin lines; `minor` drawings are folded away; `exact` quantities, which follow a rule
    and carry no noise, are not smoothed.
    """

    title: str
    metrics: tuple[tuple[str, str], ...]
    marks: tuple[float, ...] = ()
    minor: bool = False
    exact: bool = False


CHARTS = (
    Chart("Loss", (("train/loss", "training"), ("eval/loss", "held out"), ("train/exit_loss", "early exit"))),
    Chart("Bits per byte, held out", (("eval/bits_per_byte", "model"),)),
    Chart(
        "Accuracy of the reward model, held-out pairs",
        (("eval/accuracy", "reward model"), ("eval/length_accuracy", "length alone")),
        marks=(0.5,),
    ),
    Chart("Reward", (("rl/reward", "mean"),)),
    Chart("KL to the reference", (("rl/kl", "KL"),)),
    Chart("KL coefficient", (("rl/kl_coef", "coefficient"),), exact=True),
    Chart("Entropy, nats a token", (("rl/entropy", "policy"),)),
    Chart("Target calls per token", (("rollout/target_calls_per_token", "speculative"),), marks=(1.0,)),
    Chart("Tokens per target call", (("rollout/accepted_length", "kept drafts and the call's own"),)),
    Chart("Completions, held-out prompts", (("eval/valid_fraction", "valid"), ("eval/distinct_fraction", "distinct"))),
    Chart("Body nats per token, held out", (("eval/body_nats_per_token", "model"),)),
    Chart(
        "Truncated and looping rollouts",
        (("rollout/truncated_fraction", "truncated"), ("rollout/loop_fraction", "loops")),
    ),
    Chart("Completion length, tokens", (("rollout/length_mean", "mean"),), minor=True),
    Chart(
        "Tokens per second",
        (("train/tokens_per_second", "training"), ("rollout/tokens_per_second", "rollout")),
        minor=True,
    ),
    Chart("Model FLOPs utilisation", (("train/mfu", "of the devices' peak"),), minor=True),
    Chart("Waiting for data", (("train/data_wait_fraction", "of the time"),), minor=True),
    Chart("Gradient norm", (("train/grad_norm", "norm"),), minor=True),
    Chart("Learning rate", (("train/lr", "rate"),), minor=True, exact=True),
)


def charts_for(metrics: Iterable[str]) -> list[Chart]:
    """The charts to try for a phase that has `metrics`; the parts of a reward get a chart behind the reward's."""
    parts = sorted(name for name in metrics if name.startswith("rl/reward_") and name != "rl/reward_std")
    metrics = set(metrics)
    charts = list(CHARTS)
    if "train/main_loss" in metrics:  # of a loss with an early exit's, the part that is like the held-out loss
        loss = (("train/main_loss", "training"), *CHARTS[0].metrics[1:])
        charts[0] = Chart(CHARTS[0].title, loss)
    if parts:
        words = tuple((name, name.removeprefix("rl/reward_").replace("_", " ")) for name in parts[:6])
        charts.insert([chart.title for chart in charts].index("Reward") + 1, Chart("Parts of the reward", words))
    return charts


def phase_label(stage: str, phase: str) -> str:
    """How a phase is called in the report; a phase without a label is called by its names."""
    return PHASE_LABELS.get((stage, phase), stage if stage == phase else f"{stage}: {phase}".replace("_", " "))


def spoken(label: str) -> str:
    """A phase's label inside a sentence."""
    return label.lower().replace("ppo", "PPO")


def is_percent(metric: str) -> bool:
    """Whether a metric is a share of one, written in percent."""
    return metric.endswith(PERCENT_ENDINGS)


def show_value(metric: str, value: float | None) -> str:
    """A metric's value as the report writes it: shares in percent, the rest to about four digits."""
    if value is None:
        return "–"
    if is_percent(metric):
        return f"{100 * value:.1f}%"
    return show_number(value)


def show_number(value: float) -> str:
    """A number to about four digits, with a true minus: 12,345 / 123.4 / 12.34 / 1.234 / 0.0123 / 1.2e-5."""
    size, sign = abs(value), "−" if value < 0 else ""
    if size and size < 1e-3:
        mantissa, exponent = f"{size:.1e}".split("e")
        return f"{sign}{mantissa}e{int(exponent)}"
    if size >= 1000 or float(size).is_integer():
        return f"{sign}{size:,.0f}"
    for limit, digits in ((100, 1), (10, 2), (0.1, 3)):
        if size >= limit:
            return f"{sign}{size:.{digits}f}"
    return f"{sign}{size:.4f}"


def show_change(metric: str, before: float | None, after: float | None) -> str:
    """The difference with its sign, in points where the metric is a percentage."""
    if before is None or after is None:
        return "–"
    change = after - before
    sign = "+" if change > 0 else "−" if change < 0 else "±"
    return f"{sign}{100 * abs(change):.1f} pts" if is_percent(metric) else f"{sign}{show_number(abs(change))}"


def show_seconds(seconds: float | None) -> str:
    """A duration as people say it: 0.42 s, 12.3 s, 3 min 20 s, 1 h 05 min."""
    if seconds is None:
        return "–"
    if seconds < 10:
        return f"{seconds:.2f} s" if seconds else "0 s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def show_count(value: float | None) -> str:
    """A count with thousands separated, or in millions and billions where it is that large."""
    if value is None:
        return "–"
    for limit, word in ((1e9, "B"), (1e6, "M")):
        if abs(value) >= limit:
            return f"{value / limit:.2f} {word}"
    return f"{value:,.0f}"


def show_size(size: float | None) -> str:
    """Bytes as KiB, MiB or GiB."""
    if size is None:
        return "–"
    for limit, word in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= limit:
            return f"{show_number(size / limit)} {word}"
    return f"{size:,.0f} B"

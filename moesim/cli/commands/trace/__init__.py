"""`moesim trace`: commands that look into traces, or make them."""

import typer

from moesim.cli.commands.trace.check import check
from moesim.cli.commands.trace.check_residency import check_residency
from moesim.cli.commands.trace.export import export
from moesim.cli.commands.trace.import_ import import_
from moesim.cli.commands.trace.info import info
from moesim.cli.commands.trace.predict import predict
from moesim.cli.commands.trace.stats import stats
from moesim.cli.commands.trace.synth import synth
from moesim.cli.commands.trace.widths import widths

app = typer.Typer(
    no_args_is_help=True,
    # As in `moesim.cli.app`.
    rich_markup_mode=None,
    help="Look into traces, or make them of foreign files.",
)
for _name, _function, _short_help in (
    ("info", info, "Say what a trace holds."),
    ("stats", stats, "Characterise its routing, layer by layer."),
    ("import", import_, "Make a trace of a foreign file."),
    ("check", check, "Say whether a trace can be trusted."),
    ("export", export, "Write a trace in another layout."),
    ("synth", synth, "Draw a synthetic trace."),
    ("predict", predict, "Add synthetic predictions to a trace."),
    ("widths", widths, "Give the experts of one layer bit-widths of their own."),
    (
        "check-residency",
        check_residency,
        "Compare a replay with the residency an engine recorded.",
    ),
):
    app.command(_name, short_help=_short_help)(_function)

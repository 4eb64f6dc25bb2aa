"""`moesim trace`: commands that look into traces, or make them."""

import typer

from moesim.cli.commands.trace import describe, make

app = typer.Typer(
    no_args_is_help=True,
    # As in `moesim.cli.app`.
    rich_markup_mode=None,
    help="Look into traces, or make them of foreign files.",
)
for _name, _function, _short_help in (
    ("info", describe.info, "Say what a trace holds."),
    ("stats", describe.stats, "Characterise its routing, layer by layer."),
    ("import", make.import_, "Make a trace of a foreign file."),
    ("check", describe.check, "Say whether a trace can be trusted."),
    ("export", make.export, "Write a trace in another layout."),
    ("synth", make.synth, "Draw a synthetic trace."),
    ("predict", make.predict, "Add synthetic predictions to a trace."),
    ("widths", make.widths, "Give the experts of one layer bit-widths of their own."),
):
    app.command(_name, short_help=_short_help)(_function)

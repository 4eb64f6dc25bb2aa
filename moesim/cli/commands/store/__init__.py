"""`moesim store`: experts on disk, ready to be read one by one."""

import typer

from moesim.cli.commands.store.build import build

app = typer.Typer(
    no_args_is_help=True,
    # As in `moesim.cli.app`.
    rich_markup_mode=None,
    help="Experts on disk, ready to be read one by one.",
)
app.command("build", short_help="Write a model's experts into a store.")(build)


@app.callback()
def _group() -> None:
    # Without a callback typer would take the only command for the group itself.
    pass

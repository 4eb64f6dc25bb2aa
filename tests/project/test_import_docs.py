"""The commands around an import. Those of docs/how-to/import.md run in test_docs.py."""

import json

from support import foreign_files as files
from support.imports import bring
from typer.testing import CliRunner

from moesim import cli
from moesim.cli.commands.trace.make import ImportOptions


def run(*arguments, code=0):
    result = CliRunner().invoke(cli.app, list(map(str, arguments)))
    assert result.exit_code == code, (arguments, result.output, result.exception)
    return result


def test_options_of_the_import_are_words():
    def texts(**given):
        paths = {"sources": ("a",), "target": "b"}
        return ImportOptions(**paths, **given).for_importer()

    assert texts(map="pos=p", prompt_tokens=5) == {"map": "pos=p", "prompt_tokens": "5"}
    assert texts(prompt_tokens=0, batch=2, others=("cut_at=8",)) == {
        "prompt_tokens": "0",
        "batch": "2",
        "cut_at": "8",
    }


def test_check_warns_with_its_exit_code(tmp_path):
    truth = files.routing(((4, 8), (4, 8)))
    truth[1] = truth[0]
    _, trace = bring(files.per_token(tmp_path / "dump", truth))
    result = run("trace", "check", trace.path, code=1)
    assert "warning: 1 sequences are copies of others (1 = 0)" in result.output
    told = json.loads(run("trace", "check", trace.path, "--json", code=1).output)
    assert (told["trusted"], [one["kind"] for one in told["findings"]]) == (
        False,
        ["copy"],
    )

"""Run command lines in this process, as a user would in an empty folder."""

import pytest

from moesim import cli


def runner(capsys, monkeypatch, folder):
    """A function that runs one command line; it returns (exit code, stdout, stderr)."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    (folder / "cwd").mkdir()
    monkeypatch.chdir(folder / "cwd")

    def run(*words):
        with pytest.raises(SystemExit) as end:
            cli.main([str(word) for word in words])
        printed = capsys.readouterr()
        return end.value.code or 0, printed.out, printed.err

    return run


def refused(result, *parts):
    """One line on standard error, exit code 2, nothing on standard output."""
    code, out, err = result
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for part in parts:
        assert part in err
    return True

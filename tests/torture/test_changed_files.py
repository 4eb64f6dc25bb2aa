"""Files that changed on their way: whatever is read, the answer is one line, or what
the file says. No traceback, and no file of ours silently wrong.
"""

import random
import re
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesim.cli.errors import message_for_users
from torture import attacks
from torture.injuries import injured
from torture.subjects import subjects

SEEDS = st.integers(0, 1 << 32)


class Victim:
    """A file of one kind, and another one of it."""

    def __init__(self, subject, folder):
        self.subject = subject
        (folder / "other").mkdir()
        self.other = subject.make(folder / "other", 1).read_bytes()
        self.path = subject.make(folder, 0)
        self.data = self.path.read_bytes()
        self.expected = subject.read(self.path)

    def wrong(self, mutant, *, strictly=False):
        """What is wrong with how a mutant is read; nothing where all is well."""
        # A new file every time, as one that was copied.
        self.path.unlink()
        self.path.write_bytes(mutant)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                content = self.subject.read(self.path)
        except Exception as error:  # noqa: BLE001 - this is what is looked for
            message = message_for_users(error)
            if message is None:
                return f"a traceback: {error!r}"
            return f"several lines: {message!r}" if "\n" in message else ""
        # What stands in somebody's text is what it says; a seal says that it is ours.
        may_differ = mutant == self.data or not (strictly or self.subject.is_sealed)
        return "" if content == self.expected or may_differ else "silently other"


def named(subject):
    return subject.name


@pytest.fixture(scope="module", params=subjects(), ids=named)
def victim(request, tmp_path_factory):
    return Victim(request.param, tmp_path_factory.mktemp("victim"))


@attacks
@given(seed=SEEDS)
def test_mutated_files_are_read_or_refused_in_one_line(victim, seed):
    dice = random.Random(seed)
    for _ in range(5):
        mutant = injured(victim.data, dice, victim.other)
        assert victim.wrong(victim.subject.seal(mutant)) == ""


# -- a field too many or too few -------------------------------------------------------

TEXTS = ("llama_cpp", "megatron", "route_trace", "columns_csv", "lattice", "per_token", "imp")  # fmt: skip
SEPARATORS = b",;:|\t /=[](){}-"


@pytest.fixture(scope="module", params=TEXTS)
def text(request, tmp_path_factory):
    (subject,) = (
        each for each in subjects() if each.name == f"foreign {request.param}"
    )
    return Victim(subject, tmp_path_factory.mktemp("text"))


@attacks
@given(seed=SEEDS)
def test_no_value_moves_into_another_column_and_none_is_lost(text, seed):
    """A line with a separator doubled, gone or exchanged, or a field twice or gone, is
    refused, or read as before.
    """
    dice = random.Random(seed)
    lines = text.data.split(b"\n")
    at = dice.choice([number for number, line in enumerate(lines) if line.strip()])
    line = lines[at]
    places = [match.start() for match in re.finditer(rb"[,;:|\t \[\](){}]", line)]
    place = dice.choice(places or [0])
    stop = min((later for later in places if later > place), default=len(line))
    other = bytes([dice.choice(SEPARATORS)])
    lines[at] = dice.choice(
        (
            line[: place + 1] + line[place:],
            line[:place] + line[place + 1 :],
            line[:place] + other + line[place + 1 :],
            line[:place] + other + line[place:],
            line[:stop] + line[place:],
            line[:place] + line[stop:],
        )
    )
    assert text.wrong(b"\n".join(lines), strictly=True) == "", lines[at][:90]

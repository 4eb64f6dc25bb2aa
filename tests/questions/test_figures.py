"""Figures as researchers make them: on Axes of theirs, in a style of theirs."""

import matplotlib as mpl
import pandas as pd
import pytest

import moesim
from moesim.base.options import ConfigError
from moesim.reporting.figures import Axis, Figure, names

mpl.use("Agg")
import matplotlib.pyplot as plt


@pytest.fixture(scope="module")
def drawn():
    """A call of each function that draws, but for the Axes."""
    options = {"hw": "rtx4060ti", "steps": 4}
    one = moesim.compare("tiny", ["greedy", "on-demand"], **options)
    several = moesim.compare(
        "tiny", ["greedy", "on-demand"], cache_ratio=[0.1, 0.5], keep=False, **options
    )
    run = one.runs["greedy"]
    rates = moesim.hit_rates("tiny", ["lru", "belady"], [0.25, 0.5])
    gap = moesim.gap("tiny", "on-demand", **options)
    advice = moesim.advise(
        "qwen3-30b-a3b", cpu="Ryzen 7 5700X", ram="32GB DDR4", gpu="RTX 3060"
    )
    trace = moesim.answer(moesim.open_trace("tiny"))
    return {
        **{
            name: lambda ax, name=name, answer=answer: answer.plot(name, ax=ax)
            for answer in map(moesim.answer, (one, several, run, rates, gap, advice))
            for name in answer.figures
        },
        **{
            name: lambda ax, name=name: trace.plot(name, ax=ax)
            for name in trace.figures
        },
    }


NAMES = (
    "policies", "times", "hits", "parts", "step", "placement",
    "decode", "prefill", "curves", "load", "entropy", "overlap", "reuse", "working_set",
    "similarity", "information",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_is_drawn_on_axes_of_yours_and_returns_them(drawn, name):
    picture, (left, right) = plt.subplots(1, 2)
    assert drawn[name](left) is left
    assert left.has_data()
    assert not right.has_data()
    assert left.get_xlabel()
    plt.close(picture)


@pytest.mark.parametrize("name", ["policies", "times", "hits"])
def test_a_style_of_yours_is_honoured(drawn, name):
    with plt.style.context({"axes.prop_cycle": mpl.cycler(color=["#123456"])}):
        ax = drawn[name](None)
    colours = {mpl.colors.to_hex(line.get_color()) for line in ax.get_lines()}
    colours |= {mpl.colors.to_hex(bar.get_facecolor()) for bar in ax.patches}
    assert "#123456" in colours
    plt.close("all")


@pytest.mark.parametrize("style", ["paper", "screen"])
def test_styles_ship(style):
    with plt.style.context(moesim.style(style)):
        width = plt.rcParams["figure.figsize"][0]
    assert width == {"paper": 3.3, "screen": 6.4}[style]
    with pytest.raises(ConfigError, match="paper, screen"):
        moesim.style("poster")


def test_as_many_axes_as_panels_are_wanted():
    frame = moesim.sweep(
        "tiny", ["greedy"], hw=["rtx4060ti", "rtx3080ti"], cache_ratio=[0.1, 0.5],
        steps=2, jobs=1,
    )  # fmt: skip
    picture, axes = plt.subplots(1, 2)
    answer = moesim.answer(frame)
    assert list(answer.plot("times", ax=axes)) == list(axes)
    with pytest.raises(ConfigError, match="expected 2 Axes, one for each panel, got 1"):
        answer.plot("times", ax=axes[0])
    plt.close(picture)


def test_every_panel_shows_its_marks():
    """The limits of the first one hid those of the others."""
    rows = pd.DataFrame({"x": [1, 2, 1, 2], "y": [1, 1, 5, 5], "of": list("aabb")})
    figure = Figure(rows, Axis("x", "x"), Axis("y", "y", zero=True), "", panel="of")
    picture, axes = plt.subplots(1, 2, sharey=True)
    for ax in figure.draw(axes):
        low, high = ax.get_ylim()
        assert low == 0
        assert high > 5
    plt.close(picture)


def test_an_interval_lies_along_what_is_measured_and_words_stand_behind_it():
    rows = pd.DataFrame({"of": ["a"], "share": [0.5], "low": [0.4], "high": [0.7]})
    share = Axis("share", "share", ".0%")
    for mark in ("point", "bar"):
        figure = Figure(
            rows, share, names("of", "", rows["of"]), "", mark=mark, low="low",
            high="high", text="of",
        )  # fmt: skip
        ax = figure.draw()
        (ends,) = ax.collections[-1].get_segments()
        assert ends.tolist() == [[pytest.approx(0.4), 0], [pytest.approx(0.7), 0]]
        assert ax.texts[0].xy == (0.7, 0)
        assert ax.xaxis.get_major_formatter()(0.5, 0) == "50 %"
    plt.close("all")

"""A profile says where every number came from, survives a round trip, and refuses what
it cannot trust.
"""

import tomllib

import pytest
import tomli_w
from support.raw_profiles import number, raw_profile

from moesim.hwprofiles import profile as profile_module
from moesim.hwprofiles.profile import (
    default_profile,
    list_profiles,
    load_profile,
    parse_profile,
    save_profile,
)
from moesim.hwprofiles.schema import ProfileError

SHIPPED = list_profiles()


def _file(name):
    return profile_module._DATA / f"{name}.toml"


def _raw(name):
    return tomllib.loads(_file(name).read_text(encoding="utf-8"))


# Files that state everything themselves; the others only what differs from one.
WHOLE = [name for name in SHIPPED if "base" not in _raw(name)]
ASSUMED = {"kind": "assumed", "source": "a test"}


def profile(**changes):
    return parse_profile(raw_profile(**changes), where="hw.toml")


def refused(**changes):
    with pytest.raises(ProfileError) as caught:
        profile(**changes)
    message = str(caught.value)
    assert message.startswith("hw.toml: ")
    assert "\n" not in message
    return message


def numbers_of(table, path=""):
    """Every table with a `value` or `seconds`, and every bare number outside of
    them.
    """
    for key, entry in table.items():
        inner = f"{path}.{key}"
        if isinstance(entry, dict) and ("value" in entry or "seconds" in entry):
            yield inner, entry
        elif isinstance(entry, dict):
            yield from numbers_of(entry, inner)
        elif isinstance(entry, int | float):
            yield inner, None


def test_a_machine_without_a_card_shares_its_memory():
    assert load_profile("two-core-host").shares_memory
    assert not load_profile("rtx4060ti").shares_memory


@pytest.mark.parametrize("name", SHIPPED)
def test_every_number_that_ships_says_where_it_came_from(name):
    raw = _raw(name)
    entries = dict(
        numbers_of({key: entry for key, entry in raw.items() if key != "fit"})
    )
    assert len(entries) > (25 if name in WHOLE else 0)
    for path, entry in entries.items():
        assert entry is not None, f"{path} is a bare number"
        assert len(entry["source"]) > 8, path
        if entry["kind"] == "measured":
            assert entry["samples"] >= 1, path
            assert {"spread", "date"} <= set(entry), path
        assert "/" + "work" not in entry["source"]


@pytest.mark.parametrize("name", WHOLE)
def test_what_ships_is_what_saving_writes(name, tmp_path):
    loaded = load_profile(name)
    saved = save_profile(loaded, tmp_path / "copy.toml")
    assert saved.read_bytes() == _file(name).read_bytes()
    assert load_profile(saved) == loaded
    assert load_profile(saved).digest == loaded.digest
    assert [path.name for path in tmp_path.iterdir()] == ["copy.toml"]


def test_a_profile_with_a_base_states_only_what_differs(tmp_path):
    """Its own numbers replace the base's whole; everything else is the base's."""
    own = tmp_path / "own.toml"
    own.write_text(
        'base = "rtx3090-epyc7532"\nname = "own"\n[costs.h2d.latency_s]\n'
        'value = 0.5\nkind = "assumed"\nsource = "a test"\n'
    )
    base = load_profile("rtx3090-epyc7532")
    made = load_profile(own)
    assert made.numbers["costs.h2d.latency_s"].source == "a test"
    changed = {
        path for path in base.numbers if made.numbers[path] != base.numbers[path]
    }
    assert changed == {"costs.h2d.latency_s"}
    assert made.description == base.description
    # Written out again it needs no base.
    assert load_profile(save_profile(made, tmp_path / "whole.toml")) == made


def test_an_unknown_base_is_refused_and_a_profile_is_not_its_own(tmp_path):
    own = tmp_path / "own.toml"
    own.write_text('base = "rtx3091"\n')
    with pytest.raises(ProfileError, match=r"own\.toml: base: .*'rtx3091'; known: "):
        load_profile(own)


def test_calibrated_fields_survive_a_round_trip(tmp_path):
    details = {"samples": 40, "spread": 1e-6, "date": "2026-01-01"}
    scatter = {"interval": [9e-6, 1.1e-5], "quantiles": [0.9, 1.0, 1.4]}
    calibrated = number(1e-5, "measured", **details, **scatter)
    curve = {"tokens": [1, 4], "seconds": [1e-3, 2e-3], "spread": [1e-5, 2e-5]}
    curve |= {"kind": "measured", "source": "a test", "samples": 9}
    curve |= {"date": "2026-01-01", "quantiles": [0.9, 1.0, 1.2]}
    widths = {"hidden": 8, "intermediate": 4, "bytes": 384, "dtype": "float32"}
    curve["reference"] = widths
    link = {"latency_s": calibrated, "bytes_per_s": number(1e10)}
    missed = {"residual_median": 0.01, "residual_worst": 0.05}
    fit = {"h2d": {"samples": 40, "held_out": 5, **missed}}
    made = profile(costs={"h2d": link, "cpu": {"points": curve}}, fit=fit)
    again = load_profile(save_profile(made, tmp_path / "hw.toml"))
    assert again == made
    assert again.numbers["costs.h2d.latency_s"].quantiles == (0.9, 1.0, 1.4)
    assert again.curves["costs.cpu.points"].reference.bytes == 384


def test_a_machine_knows_its_lanes_workers_and_memory():
    machine = profile()
    assert machine.lanes == ("control", "cpu", "gpu0", "h2d0", "d2h0", "ssd")
    assert machine.workers["accelerator"] == ("gpu0", "h2d0", "d2h0")
    assert (machine.gpus, machine.cores, machine.cpu_threads) == (1, 2, 1)
    assert machine.memory == (1 << 30, 1 << 31, 2, False)


def test_unknown_contention_is_one_and_unknown_power_is_none():
    assert profile().contention.slowdown("cpu", "h2d") == 1.0
    assert profile().power is None
    slowed = profile(
        contention={"cpu": {"h2d": number(1.25)}},
        power={"gpu0": {"busy_w": number(300.0)}},
    )
    assert slowed.contention.slowdown("cpu", "h2d") == 1.25
    assert slowed.contention.slowdown("h2d", "cpu") == 1.0
    assert slowed.power.busy_w["gpu0"] == 300.0
    assert slowed.power.busy_w["cpu"] == slowed.power.platform_idle_w == 0.0


def test_the_digest_follows_content_and_not_place():
    assert (
        profile().digest == parse_profile(raw_profile(), where="elsewhere.toml").digest
    )
    assert profile().digest != profile(cores=number(3)).digest


def test_three_busy_workers_do_not_fit_two_cores():
    workers = {
        "control": ["control"],
        "cpu": ["cpu"],
        "accelerator": ["gpu0", "h2d0", "d2h0"],
        "ssd": ["ssd"],
    }
    assert "keep 3 cores busy, found 2 cores" in refused(workers=workers)
    assert profile(workers=workers, accelerator="cuda").workers["control"] == (
        "control",
    )


@pytest.mark.parametrize(("changes", "message"), [
    ({"colour": "red"}, "colour: unknown key"),
    ({"kind": "guessed"}, "kind: expected 'measured', 'published' or 'datasheet'"),
    ({"accelerator": "tpu"}, "accelerator: expected 'cuda', 'rocm', 'xpu', 'mps' or"),
    ({"name": 3}, "name: expected a valid string, found 3"),
    ({"cores": 2}, "cores: expected a table with value, kind and source, found 2"),
    ({"costs": {"h2d": {"latency": number(1)}}},
     "costs.h2d.latency: unknown number (did you mean"),
    ({"costs": {"h2d": {"latency_s": {"value": 1, "kind": "assumed"}}}},
     "latency_s.source: expected a value, found none"),
    ({"costs": {"h2d": {"latency_s": number(1, "rumour")}}},
     "costs.h2d.latency_s.kind: expected 'measured', "),
    ({"costs": {"h2d": {"latency_s": number(1, "measured")}}},
     "latency_s: a measured number needs"),
    ({"costs": {"h2d": {"latency_s": number(1, samples=0)}}},
     "latency_s.samples: expected a count >= 1, found 0"),
    ({"costs": {"h2d": {"latency_s": number(1, samples="many")}}},
     "latency_s.samples: expected a valid integer, found 'many'"),
    ({"costs": {"h2d": {"latency_s": number(-1)}}},
     "costs.h2d.latency_s: expected a number >= 0, found -1"),
    ({"costs": {"h2d": {"bytes_per_s": number(0)}}},
     "costs.h2d.bytes_per_s: expected a number > 0, found 0"),
    ({"costs": {"h2d": {"bytes_per_s": number(float("nan"))}}},
     "expected a finite number, found nan"),
    ({"costs": {"h2d": {"bytes_per_s": number(True)}}},
     "expected a valid number, found True"),
    ({"costs": {"h2d": {"latency_s": number(1, unit="s")}}},
     "costs.h2d.latency_s.unit: Unexpected"),
    ({"costs": {"h2d": {"latency_s": number(1, interval=[2, 1])}}},
     "latency_s.interval: expected [low, high]"),
    ({"cores": number(2.5)}, "cores: expected a whole number"),
    ({"costs": {"h2d": {"latency_s": {"vlaue": 1}}}},
     "costs.h2d.latency_s: expected value (a number) or seconds"),
    ({"contention": {"cpu": {"h2d": number(0.5)}}},
     "contention.cpu.h2d: expected a number >= 1, found 0.5"),
    ({"workers": {"all": ["control", "cpu"]}}, "missing or unknown: ssd"),
    ({"workers": {"all": ["control", "cpu", "cpu"]}}, "lane 'cpu' has two workers"),
    ({"workers": ["cpu"]}, "workers: expected an object, found ['cpu']"),
    ({"fit": {"h2d": {"luck": 1.0}}}, "fit.h2d.luck.[key]: expected 'samples'"),
    ({"costs": {"h2d": {"points": {"bytes": [2, 1], "seconds": [1, 1]} | ASSUMED}}},
     "costs.h2d.points.bytes: expected ascending numbers"),
    ({"costs": {"cpu": {"points": {"tokens": [1], "seconds": [1]} | ASSUMED}}},
     "costs.cpu.points.reference: expected hidden, intermediate, bytes and dtype"),
])  # fmt: skip
def test_a_profile_that_cannot_be_trusted_is_refused_in_one_line(changes, message):
    assert message in refused(**changes)


def test_an_unknown_name_is_answered_with_a_close_one():
    with pytest.raises(
        ProfileError,
        match=r"unknown hardware profile 'rtx3090-epic7532' .did you mean 'rtx3090-",
    ):
        load_profile("rtx3090-epic7532")


def test_a_missing_or_broken_file_is_one_line(tmp_path):
    with pytest.raises(
        ProfileError, match=r"absent\.toml: cannot be read: No such file"
    ):
        load_profile(tmp_path / "absent.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("name = ", encoding="utf-8")
    with pytest.raises(ProfileError, match=r"broken\.toml: not TOML"):
        load_profile(broken)
    with pytest.raises(ProfileError, match=r"cannot be written"):
        save_profile(profile(), broken / "folder.toml")
    with pytest.raises(ProfileError, match=r"ends in \.toml"):
        save_profile(profile(), tmp_path / "hw.json")


def test_the_default_is_the_nearest_profile(tmp_path, monkeypatch):
    folder = tmp_path / "here"
    home = tmp_path / "home"
    folder.mkdir()
    (home / "moesim").mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    assert default_profile().name == "rtx3090-epyc7532"
    (home / "moesim" / "hw.toml").write_text(
        tomli_w.dumps(raw_profile(name="of-the-user")), encoding="utf-8"
    )
    assert default_profile().name == "of-the-user"
    (folder / "hw.toml").write_text(
        tomli_w.dumps(raw_profile(name="of-the-folder")), encoding="utf-8"
    )
    assert default_profile().name == "of-the-folder"

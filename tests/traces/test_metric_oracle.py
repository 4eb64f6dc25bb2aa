"""Every metric of drawn runs against a second, slow implementation over the tables."""

import numpy as np
import pytest
from support.engine_pairs import machine
from support.metric_oracle import (
    Tables,
    expected_metrics,
    expected_requests,
    placement_of,
    row_figures,
)
from support.small_trace import write_trace

import moesim
from moesim.runs.config import RunConfig
from moesim.runs.sweeps.plan import planned
from moesim.runs.sweeps.rows import carry_out
from moesim.traces.format.schema import ModelShape
from moesim.traces.timeline.metrics import summarise

POLICIES = (
    "greedy", "on-demand", "all-cpu", "fiddler", "greedy+lfu+next-gate",
    "on-demand+lru+next-gate", "on-demand+lru+none", "dali", "hybrimoe", "belady",
)  # fmt: skip


COLUMNS = ("scores", "pred1_raw", "pred2_raw", "pred3_raw", "pred1_res")


class DrawnRun:
    """A configuration drawn from a seed, replayed."""

    def __init__(self, seed, folder):
        self.rng = rng = np.random.default_rng(seed)
        pick = rng.choice
        layers = int(rng.integers(1, 5))
        shape = ModelShape(
            name="drawn", layers=layers, experts=8, top_k=int(rng.integers(1, 4)),
            hidden=64, expert_intermediate=32,
            expert_bytes=(int(pick([1 << 18, 1 << 22])),) * layers, other_bytes=1 << 20,
        )  # fmt: skip
        self.lengths = [
            (int(rng.integers(0, 7)), int(rng.integers(0, 9)))
            for _ in range(rng.integers(1, 7))
        ]
        self.lengths = [each if any(each) else (1, 0) for each in self.lengths]
        trace = write_trace(
            folder / f"{seed}.parquet",
            shape,
            self.lengths,
            columns=COLUMNS,
            seed=seed,
            ragged=layers > 1 and bool(rng.random() < 0.2),
        )
        self.batch = int(rng.integers(1, 5))
        self.arrivals = self._arrivals(folder / f"{seed}.txt")
        policy = str(pick([each for each in POLICIES if each != "belady"]))
        if not self.arrivals and rng.random() < 0.15:
            policy = "on-demand+belady+none"
        gpus = int(rng.integers(1, 4))
        self.options = {
            "batch": self.batch,
            "micro_batch": int(rng.integers(4, 9)) if rng.random() < 0.4 else None,
            "steps": int(rng.integers(1, 12)) if rng.random() < 0.4 else None,
            "cache_ratio": float(rng.uniform(0, 1)),
            "gpu_split": str(pick(["layers", "experts"])),
            "draft_tokens": (
                int(rng.integers(1, 4))
                if self.batch == 1 and not self.arrivals and rng.random() < 0.5
                else 0
            ),
            "seed": seed,
            "arrivals": self.arrivals,
            "slo": "ttft=0.02,tpot=0.001" if self.arrivals else None,
        }
        if rng.random() < 0.3:
            # Staging takes as many as a layer has.
            least = 12 * shape.max_expert_bytes
            self.options["host_memory"] = max(least, int(shape.routed_bytes * 0.6))
        slowdown = {"cpu": {"h2d0": 1.3}} if rng.random() < 0.2 else None
        self.profile = machine(gpus=gpus, slowdown=slowdown)
        self.power = {
            lane: tuple(rng.uniform(0, 100, 2).tolist()) for lane in self.profile.lanes
        }
        self.power["platform"] = (50.0, 0.0)
        config = RunConfig.of(trace, policy, hw=self.profile, **self.options)
        self.run = moesim.replay(config)
        # Summed up on the way, without tables.
        (point,) = planned([config]).points
        self.row = carry_out(point, lambda _share: None)

    def _arrivals(self, file):
        kind = self.rng.choice(["none", "none", "poisson", "file"])
        if kind == "none":
            return None
        if kind == "poisson":
            return f"poisson:{self.rng.choice([20, 200, 2000])}"
        times_s = np.cumsum(self.rng.exponential(0.02, len(self.lengths)))
        file.write_text("\n".join(map(repr, times_s.tolist())))
        return str(file)

    def times_s(self):
        from moesim.traces.format.arrivals import arrival_times

        return arrival_times(self.arrivals, self.options["seed"])

    @property
    def is_cut_in_prompt(self):
        """Whether the last pass is one of a prompt whose tokens were not all computed."""
        steps = self.run.timeline.step_frame()
        if self.options["steps"] is None or not len(steps):
            return False
        if steps["phase"].iloc[-1] != "prefill":
            return False
        if self.arrivals:
            return False
        batch = int(steps["batch"].iloc[-1])
        prompts = self.lengths[batch * self.batch :][: self.batch]
        computed = steps.loc[steps["batch"] == batch, "tokens"].sum()
        return computed < sum(prompt for prompt, _ in prompts)


def agrees(got, expected):
    if isinstance(expected, dict):
        return got.keys() == expected.keys() and all(
            agrees(got[name], value) for name, value in expected.items()
        )
    if isinstance(expected, list):
        return len(got) == len(expected) and all(map(agrees, got, expected))
    if isinstance(expected, str):
        return got == expected
    if got is None or expected is None:
        return got is expected
    return got == pytest.approx(expected, rel=1e-9, abs=1e-12, nan_ok=True)


def differences(got, expected):
    """Figures that differ by name, with both values."""
    return {
        name: (got.get(name), value)
        for name, value in expected.items()
        if not agrees(got.get(name, "absent"), value)
    }


def test_every_metric_equals_a_second_implementation(request, tmp_path):
    """Arrivals, drafts, micro-batches, several GPUs, ragged batches, cut steps."""
    wrong = {}
    for seed in range(request.config.option.metric_draws):
        drawn = DrawnRun(seed, tmp_path)
        metrics = drawn.run.metrics
        timeline = drawn.run.timeline
        tables = Tables.of(timeline)
        expected = expected_metrics(
            tables, drawn.power, is_cut_in_prompt=drawn.is_cut_in_prompt
        )
        got = summarise(timeline, power=drawn.power)
        assert set(got) == set(expected)
        # Only the replay knows of requests, and where it was cut.
        got |= {name: metrics[name] for name in got if "energy" not in name}
        got["tokens_per_kj"] = summarise(timeline, power=drawn.power)["tokens_per_kj"]
        if drawn.arrivals:
            served = expected_requests(
                tables.steps,
                drawn.lengths,
                drawn.times_s(),
                drawn.batch,
                {"ttft": 0.02, "tpot": 0.001},
                expected["makespan_s"],
            )
            # What a user sees replaces what the batch sees.
            expected |= {name: served[name] for name in served.keys() & got.keys()}
            expected["requests"] = served
            got["requests"] = metrics["requests"]

        row = drawn.row
        # Watts were drawn for `summarise` alone.
        names = row.keys() & expected.keys() - {"energy_j", "tokens_per_kj"}
        in_row = {name: expected[name] for name in names}
        in_row |= row_figures(tables, expected)
        if drawn.arrivals:
            # Requests wait for each other: the run is one sample.
            in_row |= expected["requests"]
            in_row["batch_decode_s"] = [expected["tpot_s"] or 0.0]
            in_row["batch_decode_tokens"] = [int(expected["tpot_s"] is not None)]
            in_row["batch_makespan_s"] = [expected["makespan_s"]]
        placement = drawn.run.placement().to_numpy().tolist()
        found = differences(got, expected) | differences(row, in_row)
        if not agrees(placement, placement_of(tables.accesses)):
            found["placement"] = placement
        if found:
            wrong[seed] = found
    assert wrong == {}
